"""`python -m patcher.integrate`: patches in programs that know nothing of them, by environment;
and what keeps a patch out of transformers, told and harmless.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import CANDIDATE, LAYERS, OP, TINY, evaluation, state
from transformers_sample import GPT_OSS

import patcher.integrate.patch
from patcher import bench
from patcher.bench import Candidate, Language
from patcher.bench.engines import Engine, open_engine
from patcher.integrate import Patch, Store, Switches, activate, read_receipts
from patcher.integrate.transformers.points import POINTS

ROOT = Path(__file__).resolve().parents[2]
TORCH = """
import torch
def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    input.copy_(weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)))
"""
PROGRAM = """
    import multiprocessing, sys

    def tokens(seed):
        import torch, transformers
        torch.manual_seed(seed)
        config = transformers.GptOssConfig(
            num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_local_experts=4,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=128, pad_token_id=0, initializer_range=0.2,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        prompt = torch.arange(1, 9).view(2, 4)
        found = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        return found.tolist()

    if __name__ == "__main__":
        assert sys.argv[1:] == ["--flag", "x"]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print([tokens(3), pool.apply(tokens, (3,))])
            pool.close()
            pool.join()
"""


def bundle(folder: Path, point: str) -> Patch:
    op = bench.load_op(POINTS[point].op)
    file = op.folder / "solutions" / "cpu_torch" / f"{op.name}.py"
    source = file.read_text() if file.is_file() else TORCH
    candidate = Candidate(op=op.name, language=Language.TORCH, source=source)
    found = evaluation(candidate).model_copy(update={"op": op.name, "language": "torch"})
    return Patch.create(folder, op, candidate, found, engine="transformers", made_by="test")


def test_every_process_is_patched_by_the_environment_alone(store: Store, tmp_path: Path) -> None:
    for point in GPT_OSS:
        store.apply(bundle(tmp_path / point, point).folder)
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATCHER_RECEIPTS": str(tmp_path / "receipts"),
        "PATCHER_PATCHES": "on",
        "PATCHER_STRICT": "1",
        "OMP_NUM_THREADS": "1",
    }

    # in this process, where nothing is switched on
    space: dict[str, Any] = {"__name__": "program"}
    exec(script.read_text(), space)
    plain = space["tokens"](3)
    done = subprocess.run(
        [sys.executable, "-m", "patcher.integrate", str(script), "--flag", "x"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{[plain, plain]}\n"
    receipts = read_receipts(tmp_path / "receipts")
    assert len({receipt.pid for receipt in receipts}) == 2
    assert len(receipts) == 2 * len(GPT_OSS)
    for receipt in receipts:
        point = receipt.point.removeprefix("transformers:")
        # a prefill and two decode steps of two layers
        assert receipt.total_calls == 3 * 2 * (2 if point == "gpt_oss.decoder_layer" else 1)
        assert not receipt.fallbacks
        assert receipt.failure is None


OTHER_MODEL = """
    import transformers
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128,
    )
    print(type(transformers.AutoModelForCausalLM.from_config(config)).__name__)
"""


@feature("`python -m patcher.integrate` with a model of its own", "refused", "norm")
def test_a_patch_that_needs_a_built_model_says_so(store: Store, tmp_path: Path) -> None:
    """It would be unused without a word: nothing in such a program imports gpt-oss."""
    for point in ("norm", "gpt_oss.router"):
        store.apply(bundle(tmp_path / point, point).folder)
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(OTHER_MODEL))
    done = subprocess.run(
        [sys.executable, "-m", "patcher.integrate", str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATCHER_RECEIPTS": str(tmp_path / "receipts"),
            "PATCHER_PATCHES": "on",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "LlamaForCausalLM\n"
    assert "the engine's own kernel runs: norms are found in a built model alone" in done.stderr
    assert 'call integrate.activate("transformers", model) once the model is built' in done.stderr
    [receipt] = read_receipts(tmp_path / "receipts")
    assert receipt.point == "transformers:norm"
    assert receipt.failure == "norms are found in a built model alone"


@pytest.mark.parametrize("line", [[], ["-m"], ["--help"]])
def test_a_launcher_without_a_program_says_how_it_is_used(line: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "patcher.integrate", *line], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.startswith("usage: python -m patcher.integrate needs a program\n")


SHOWN = """
import sys
waits = any(type(finder).__name__ == "_AfterImport" for finder in sys.meta_path)
print(behind, sys.flags.utf8_mode, sys.argv[1:], waits)
"""


@pytest.mark.parametrize(("patches", "waits"), [("", False), ("off", False), ("on", True)])
def test_the_launcher_keeps_flags_and_runs_the_sitecustomize_behind_its_own(
    tmp_path: Path, patches: str, waits: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.behind = 'yes'")
    (tmp_path / "shown.py").write_text(SHOWN)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    result = subprocess.run(
        [sys.executable, "-X", "utf8", "-m", "patcher.integrate", "-m", "shown", "-x"],
        env={**os.environ, "PYTHONPATH": path, "PATCHER_PATCHES": patches},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"yes 1 ['-x'] {waits}\n"


def test_a_python_that_ignores_the_environment_is_refused() -> None:
    blind = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n"
         "import patcher.integrate.__main__ as m; m.command([], ['x'])"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert "does not read PYTHONPATH" in blind.stderr


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(TINY)


def wrong_version(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(patcher.integrate.patch, "engine_version", lambda engine: "5.16.0")


def changed_fingerprint(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from transformers.models.gpt_oss import modeling_gpt_oss

    class GptOssRMSNorm(modeling_gpt_oss.GptOssRMSNorm):
        """A release that changed the norm."""

    monkeypatch.setattr(modeling_gpt_oss, "GptOssRMSNorm", GptOssRMSNorm)


def corrupt_bundle(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    file = next((Store().root / "patches").rglob("sources/*"))
    file.write_text(file.read_text() + " ")


def missing_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATCHER_CACHE", str(folder / "cache"))


def unwritable_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("PATCHER_CACHE", str(folder / "file" / "cache"))


@pytest.mark.parametrize("later", [False, True], ids=["model", "process"])
@pytest.mark.parametrize(
    ("spoil", "kind", "sentence"),
    [
        (wrong_version, bench.VerificationError, "5.16.0 is installed"),
        (changed_fingerprint, bench.VerificationError, "differs from that of"),
        (corrupt_bundle, bench.VerificationError, "was changed after the patch was made"),
        (missing_compiler, bench.MissingError, r"g\+\+ is not on PATH"),
        (unwritable_cache, bench.UsageError, "cache"),
    ],
)
def test_what_keeps_a_patch_out_is_told_once_and_harms_nothing(
    engine: Engine,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[pytest.MonkeyPatch, Path], None],
    kind: type[bench.PatcherError],
    sentence: str,
    later: bool,
) -> None:
    patch = Patch.create(
        tmp_path / "patch", OP, CANDIDATE, evaluation(), engine="transformers", made_by="test"
    )
    store.apply(patch.folder)
    clean, prompts = state(engine.model), engine.prompts(1)
    before = engine.generate(prompts, 2).tokens
    spoil(monkeypatch, tmp_path)
    target: Any = None if later else engine.model
    with pytest.raises(kind, match=sentence) as caught:
        activate("transformers", target, switches=Switches("on", strict=True, receipts=None))
    assert caught.value.exit_code == kind.exit_code != 1
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    caplog.clear()
    receipts = tmp_path / "receipts"
    with (
        caplog.at_level(logging.ERROR, "patcher"),
        activate(
            "transformers", target, switches=Switches("on", strict=False, receipts=receipts)
        ) as active,
    ):
        assert active.installed == []
        assert state(engine.model) == clean
        assert torch.equal(engine.generate(prompts, 2).tokens, before)
    [record] = caplog.records
    assert str(caught.value) in record.getMessage()
    if spoil is not corrupt_bundle:  # then it is not known which patch it was
        [receipt] = read_receipts(receipts)
        assert receipt.failure == str(caught.value)
        assert receipt.total_calls == 0


def test_a_model_that_is_not_what_the_patch_replaces_is_left_alone(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of the models that are built later, where the others are patched."""
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    store.apply(bundle(tmp_path / "patch", "gpt_oss.router").folder)
    build = source.GptOssMLP.__init__

    class Other(source.GptOssTopKRouter):
        """A router of someone's own."""

    def build_other(mlp: Any, config: Any) -> None:
        build(mlp, config)
        mlp.router = Other(config)

    with activate("transformers", switches=Switches("on", strict=False, receipts=None)) as active:
        with monkeypatch.context() as other, caplog.at_level(logging.ERROR, "patcher"):
            other.setattr(source.GptOssMLP, "__init__", build_other)
            odd = open_engine(TINY)
        plain = open_engine(TINY)
        book = active.installed[0].book
        tokens = [each.generate(each.prompts(1), 1).tokens for each in (odd, plain)]
        assert torch.equal(*tokens)
        assert book.calls.total() == 2 * LAYERS
        assert book.fallbacks == {"a model that is not what the patch replaces": 1}
    assert "a model is not patched" in caplog.text
