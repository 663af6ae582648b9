"""What other packages add: a distribution that is really installed, and ones that are broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from point_package import point_package

from patcher.bench import (
    Language,
    MissingError,
    Registry,
    UsageError,
    guess_language,
    load_op,
    plugins,
    preset,
    preset_problems,
    presets,
)
from patcher.bench.engines import ENGINES, in_process, open_engine
from patcher.bench.toolchains import TOOLCHAINS, toolchain
from patcher.bench.workload import Workload
from patcher.cli import main
from patcher.doctor import examine
from patcher.integrate.points import POINTS, all_specs, engine_wants, find_point, specs_of
from patcher.models import MODELS, open_model
from patcher.plugins import found_plugins
from patcher.strategies import STRATEGIES, open_strategy

PACKAGE = Path(__file__).parents[1] / "data/plugin_package"
OPS = Path(__file__).parents[1] / "data/ops"
OUR_PRESETS = sorted(
    path.stem for path in (Path(__file__).parents[2] / "bench/workloads").glob("*.toml")
)
KINDS = ("engines", "models", "patch_points", "presets", "strategies", "toolchains")
NORM = """
import numpy as np


def widened(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual += input
    scale = 1 / np.sqrt(np.mean(np.square(residual), axis=-1, keepdims=True) + np.float32(epsilon))
    np.multiply(residual, scale, out=input)
    input *= widened(weight)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example package."""
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, source)  # building writes beside the sources
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Run:
    """Run Python where the package is installed, in a folder of its own."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site), "PATCHER_OPS": str(OPS), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def told(result: subprocess.CompletedProcess[str], codes: tuple[int, ...] = (0, 1)) -> Any:
    assert result.returncode in codes, result.stderr[-3000:] + result.stdout[-3000:]
    return json.loads(result.stdout)


def example() -> str:
    hints = (PACKAGE / "toyserve_patcher/hints/numpy.md.j2").read_text()
    found = re.search(r"```python\n(.*?)```", hints, re.DOTALL)
    assert found
    return found[1]


def test_the_package_touches_nothing_of_ours(site: Path) -> None:
    tops = {path.name for path in site.iterdir()} - {"bin"}
    assert tops == {"toyserve", "toyserve_patcher", "toyserve-1.2.3.dist-info"}


def test_one_of_each_is_found(run: Run) -> None:
    code = """
        import json
        from patcher.bench import Language, presets
        from patcher.bench.engines import ENGINES
        from patcher.models import MODELS
        from patcher.plugins import found_plugins
        print(json.dumps({
            "plugins": [each.model_dump() for each in found_plugins()],
            "languages": list(Language),
            "presets": list(presets()),
            "engines": list(ENGINES),
            "models": MODELS.listing(),
        }))
    """
    found = told(run("-c", textwrap.dedent(code)))
    assert {(each["group"], each["name"]) for each in found["plugins"]} == {
        ("patcher.engines", "toyserve"),
        ("patcher.models", "shelf"),
        ("patcher.patch_points", "toyserve"),
        ("patcher.presets", "toyserve"),
        ("patcher.strategies", "first-right"),
        ("patcher.toolchains", "numpy"),
    }
    assert all(not each["problem"] for each in found["plugins"])
    assert {each["origin"] for each in found["plugins"]} == {"toyserve 1.2.3"}
    assert found["languages"][-1] == "numpy"
    assert found["presets"][-1] == "toy-4l"
    assert found["engines"] == ["transformers", "vllm", "sglang", "toyserve"]
    assert found["models"].endswith("replay, shelf (from toyserve 1.2.3)")


def test_the_doctor_names_each_and_where_it_is_from(run: Run) -> None:
    found = {
        each["name"]: each
        for each in told(run("-m", "patcher", "doctor", "--json"))["findings"]
        if each["name"].startswith("plugin ") or each["name"] == "toolchain numpy"
    }
    assert {each["status"] for each in found.values()} == {"ok"}
    assert "from toyserve 1.2.3" in found["plugin engines toyserve"]["detail"]
    assert len(found) == 7


@pytest.mark.slow
def test_its_language_is_evaluated(run: Run, tmp_path: Path) -> None:
    (tmp_path / "kernel.np").write_text(example())
    words = ("evaluate", "scaled_add", "kernel.np", "--pairs", "3", "--json")
    for _ in range(4):
        evaluation = told(run("-m", "patcher", *words))
        failed = [check["name"] for check in evaluation["checks"] if not check["passed"]]
        if failed != ["clocks"]:  # all that a busy machine is doubted for
            break
    assert evaluation["outcome"] in ("correct", "too_slow"), evaluation
    assert evaluation["language"] == "numpy"
    assert [timing["axes"]["n"] for timing in evaluation["timings"]] == [1000, 70000]
    wrong = example().replace("np.float32(scale)", "np.float32(scale + 1e-3)")
    (tmp_path / "kernel.np").write_text(wrong)
    assert told(run("-m", "patcher", *words), (1,))["outcome"] == "mismatch"
    (tmp_path / "kernel.np").write_text("def another(x): ...\n# scaled_add\n")
    failed_build = told(run("-m", "patcher", *words), (1,))
    assert failed_build["outcome"] == "compilation_failure"
    assert "no top-level function scaled_add" in failed_build["log"]


OPTIMISE = """
import sys
from patcher import pipeline
from patcher.bench import Language
from patcher.plan import RunPlan
from patcher.settings import resolve
from patcher.strategies.search import Search

search = Search.of(None, Language("numpy"), "first-right")
plan = RunPlan(
    op="scaled_add", language=Language("numpy"), whole=False, judge_pairs=3, search=search
)
settings = resolve({"model": "shelf:" + sys.argv[1], "iterations": 6, "memory": "off"})
run = pipeline.start(settings, "optimize", None, None, plan)
pipeline.execute(run, lambda *_: None, lambda _: None)
"""


@pytest.mark.slow
def test_its_strategy_and_its_model_optimise_in_its_language(run: Run, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    # several of the right one: a busy machine may be doubted for its clocks
    broken = example().replace("out += x", "out -= x")
    for number, source in enumerate([broken, *[example()] * 5]):
        text = f"Here it is.\n\n```python\n{source}# draft {number}\n```\n"
        (shelf / f"{number}.md").write_text(text)
    spec = ("--language", "numpy", "--strategy", "first-right", "--model", f"shelf:{shelf}")
    estimate = told(run("-m", "patcher", "optimize", "scaled_add", *spec, "--dry-run", "--json"))
    assert estimate["language"] == "numpy"

    result = run("-c", OPTIMISE, str(shelf))
    if result.returncode:  # it is right, and may not be faster
        assert "BudgetError" in result.stderr, result.stderr[-3000:]
    [folder] = (tmp_path / "patcher-runs").iterdir()
    loop = json.loads((folder / "ops/scaled_add/optimisation.json").read_text())
    assert (loop["strategy"], loop["language"]) == ("first-right", "numpy")
    tried = [folder / f"ops/scaled_add/{number}" for number in range(len(loop["iterations"]))]
    outcomes = [json.loads((one / "evaluation.json").read_text())["outcome"] for one in tried]
    assert outcomes[0] == "mismatch"
    assert outcomes[-1] in ("correct", "too_slow"), outcomes
    assert set(outcomes[1:-1]) <= {"guard_violation"}
    assert (tried[-1] / "candidate.np").read_text() == f"{example()}# draft {len(tried) - 1}\n"
    assert "# Rules for NumPy" in (tried[0] / "generate.prompt.md").read_text()


BUNDLE = """
import sys
from pathlib import Path
from patcher.bench import Candidate, Evaluation, Language, Timing, load_op
from patcher.integrate import Patch

candidate = Candidate(
    op="fused_add_rms_norm", language=Language("numpy"), source=Path("norm.np").read_text()
)
timing = Timing(
    axes={"tokens": 4}, candidate_us=1, baseline_us=2, speedup=2, speedup_low=1.9,
    speedup_high=2.1, pairs=4, calls=8,
)
evaluation = Evaluation(
    op=candidate.op, language="numpy", digest=candidate.digest, outcome="correct",
    timings=(timing,), geomean_speedup=2.0,
)
Patch.create(
    Path("patch"), load_op(candidate.op), candidate, evaluation, engine="toyserve", made_by="test"
)
"""


@pytest.fixture
def bundle(run: Run, tmp_path: Path) -> Path:
    """A patch of its patch point, in its language."""
    (tmp_path / "norm.np").write_text(NORM)
    made = run("-c", BUNDLE)
    assert made.returncode == 0, made.stderr
    return tmp_path / "patch"


def test_its_patch_point_takes_a_kernel_in_and_out(run: Run, bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["target"]["made_with"] == "1.2.3"
    assert manifest["target"]["versions"] == ">=1.2,<2"
    assert manifest["contract"]["patch_points"][-1]["engine"] == "toyserve"
    code = """
        import json, torch
        from pathlib import Path
        from patcher.bench import Workload
        from patcher.bench.engines import open_engine
        from patcher.integrate import Patch, prepare, verify
        from toyserve.layers import RMSNorm

        patch, original = Patch.load(Path("patch")), RMSNorm.forward
        engine = open_engine(Workload(
            model="toy-4l", engine="toyserve", device="cpu", dtype="float32", batch=2,
            input_len=4, output_len=3, threads=1,
        ))
        prompts = engine.prompts(0)
        before = engine.logits(prompts)
        with prepare(engine.model, patch) as book:
            inside, patched = RMSNorm.forward is not original, engine.logits(prompts)
        print(json.dumps({
            "failure": verify(patch).failure and verify(patch).failure.detail,
            "calls": sum(book.calls.values()), "fallbacks": sum(book.fallbacks.values()),
            "inside": inside, "outside": RMSNorm.forward is original,
            "close": torch.allclose(before, patched, atol=1e-4),
            "same": torch.equal(before, engine.logits(prompts)),
        }))
    """
    found = told(run("-c", textwrap.dedent(code)))
    assert found == {
        "failure": None,
        "calls": 5,
        "fallbacks": 0,
        "inside": True,
        "outside": True,
        "close": True,
        "same": True,
    }


def test_its_engine_is_measured_with_its_patch_and_without(run: Run, bundle: Path) -> None:
    words = ("throughput", "toy-4l", "--engine", "toyserve", "--device", "cpu", "--threads", "1")
    options = ("--patch", str(bundle), "--pairs", "6", "--json")
    found = told(run("-m", "patcher", *words, *options))
    [measured] = found["measured"]
    assert measured["throughput"]["workload"]["engine"] == "toyserve"
    assert measured["throughput"]["comparison"]["pairs"] >= 2
    assert sum(measured["receipt"]["calls"].values()) > 100
    assert measured["receipt"]["fallbacks"] == {}
    assert measured["reverted_identical"] is True
    assert measured["quality"]["passed"]
    assert measured["quality"]["between"]["rmse"] > 0, "another kernel ran"
    [decision] = found["decisions"]
    assert decision["verdict"] in ("accept", "reject", "inconclusive")


def test_what_a_language_of_nobody_is_called_is_an_error() -> None:
    with pytest.raises(ValueError, match="numpy"):
        Language("numpy")
    with pytest.raises(UsageError, match=r"cannot tell the language of kernel\.np") as caught:
        guess_language(Path("kernel.np"), "")
    assert "--language cpp|cuda|" in caught.value.hint


Distribution = Callable[..., None]


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """Put a distribution on the path: its entry points, and the text of its one module."""
    monkeypatch.syspath_prepend(tmp_path)

    def distribution(name: str, group: str, entry: str, target: str, source: str = "") -> None:
        info = tmp_path / f"{name}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[patcher.{group}]\n{entry} = {target}\n")
        (tmp_path / f"{name}_module.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"{name}_module", raising=False)

    return distribution


@pytest.mark.parametrize("kind", KINDS)
def test_everything_of_ours_is_where_the_table_says(kind: str) -> None:
    registry = Registry[Any](kind)
    for name in registry:
        try:
            found = registry.load(name)
        except ModuleNotFoundError as error:  # an engine that is not installed here
            found = error.name or "patcher"
            if found.startswith("patcher"):
                raise
        assert found is not None


def test_the_table_names_what_there_is() -> None:
    assert list(Registry("strategies")) == list(STRATEGIES)
    assert list(TOOLCHAINS) == [language.value for language in Language]
    for language in Language:
        assert toolchain(language).language is language


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_of_nobody_lists_what_there_is(kind: str, distribution: Distribution) -> None:
    distribution("extra", kind, "another", "extra_module:THING", "THING = 1")
    registry = Registry[Any](kind)
    with pytest.raises(UsageError, match=f"unknown {registry.noun} 'nothing'") as caught:
        registry.load("nothing")
    assert "another (from extra 0.1)" in caught.value.hint
    assert all(name in caught.value.hint for name in registry)
    assert registry.load("another") == 1


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import nothing_of_the_kind", "ModuleNotFoundError: No module named 'nothing_of_the_kind"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("OTHER = 1", "AttributeError: module 'broken_module' has no attribute 'THING'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_said_and_breaks_nothing_else(
    distribution: Distribution, source: str, cause: str
) -> None:
    distribution("broken", "engines", "wreck", "broken_module:THING", source)
    with pytest.raises(MissingError) as caught:
        in_process("wreck")
    assert caught.value.message.startswith("the engine 'wreck' of broken 0.1 cannot be imported")
    assert cause in caught.value.message
    assert caught.value.hint == "repair or uninstall broken"
    [found] = plugins()
    assert (found.name, found.origin) == ("wreck", "broken 0.1")
    assert cause in found.problem
    assert list(ENGINES) == ["transformers", "vllm", "sglang", "wreck"]
    assert in_process("transformers")
    workload = Workload(
        model="gpt-oss-tiny", device="cpu", dtype="float32", batch=1, input_len=1, output_len=1
    )
    with pytest.raises(MissingError, match="cannot be imported"):
        open_engine(workload.model_copy(update={"engine": "wreck"}))


def test_a_broken_language_leaves_the_others_alone(distribution: Distribution) -> None:
    distribution("broken", "toolchains", "wreck", "broken_module:THING", "1 / 0")
    language = Language("wreck")
    assert language is Language("wreck")
    assert language in list(Language)
    with pytest.raises(MissingError, match=r"the language 'wreck' of broken 0\.1 cannot be"):
        toolchain(language)
    told_of = {finding.name: finding for finding in examine()}
    for name in ("toolchain wreck", "plugin toolchains wreck"):
        assert told_of[name].status == "warn"
        assert "ZeroDivisionError" in told_of[name].detail
    assert guess_language(Path("kernel.cu"), "") is Language.CUDA
    with pytest.raises(UsageError, match="cannot tell") as caught:
        guess_language(Path("kernel.np"), "")
    assert "ZeroDivisionError" in caught.value.hint


def test_a_name_of_ours_stays_ours(distribution: Distribution) -> None:
    distribution("taker", "toolchains", "cpp", "taker_module:THING", "THING = None")
    assert toolchain(Language.CPP).language is Language.CPP
    [found] = plugins()
    assert found.problem == "patcher has a language of that name, which is used"


def test_two_packages_with_one_name_are_both_named(distribution: Distribution) -> None:
    for name in ("one", "two"):
        distribution(name, "models", "same", f"{name}_module:THING", "THING = None")
    with pytest.raises(UsageError, match=r"one 0\.1 and two 0\.1 both bring the model provider"):
        MODELS.load("same")
    assert [found.problem for found in plugins()] == 2 * [
        "another package brings one of that name: neither is used"
    ]


def test_a_package_adds_a_point_to_an_engine_of_ours(distribution: Distribution) -> None:
    source = point_package("transformers", "mine")
    distribution("more", "patch_points", "transformers.more", "more_module:POINTS", source)
    assert find_point("transformers", "mine").op == "fused_add_rms_norm"
    assert find_point("transformers", "gpt_oss.router").op == "moe_topk"
    named = specs_of(load_op("fused_add_rms_norm"), "transformers")
    assert [spec.point for spec in named] == ["gpt_oss.decoder_layer", "add_norm"]
    with pytest.raises(UsageError, match="no patch point theirs in transformers") as caught:
        find_point("transformers", "theirs")
    assert "gpt_oss.router, mine" in caught.value.message
    listed = [spec.point for spec in all_specs(load_op("fused_add_rms_norm"))]
    assert listed[-1] == "mine"
    assert "gpt_oss.decoder_layer" in listed


def test_the_table_of_ops_lists_points_of_packages(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = point_package("transformers", "mine")
    distribution("more", "patch_points", "transformers.more", "more_module:POINTS", source)
    monkeypatch.setenv("COLUMNS", "200")
    for words, said in (
        (("ops",), "transformers >=5: mine"),
        (("ops", "show", "fused_add_rms_norm"), "#   transformers >=5: mine"),
        (("ops", "show", "fused_add_rms_norm", "--json"), '"mine"'),
    ):
        monkeypatch.setattr("sys.argv", ["patcher", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 0
        assert said in capsys.readouterr().out


def test_a_package_takes_no_point_of_ours(distribution: Distribution) -> None:
    source = point_package("transformers", "gpt_oss.router")
    distribution("taker", "patch_points", "transformers.taker", "taker_module:POINTS", source)
    assert find_point("transformers", "gpt_oss.router").op == "moe_topk"
    [found] = found_plugins()
    assert found.problem == "patcher has patch points of these names: gpt_oss.router"


def test_broken_points_leave_those_of_ours_alone(
    distribution: Distribution, caplog: pytest.LogCaptureFixture
) -> None:
    distribution("broken", "patch_points", "transformers.wreck", "broken_module:POINTS", "1 / 0")
    assert find_point("transformers", "gpt_oss.router").op == "moe_topk"
    assert specs_of(load_op("moe_topk"), "transformers")
    engine_wants("transformers")
    assert "ZeroDivisionError" in caplog.text
    with pytest.raises(MissingError, match="ZeroDivisionError"):
        find_point("transformers", "wreck")
    [found] = found_plugins()
    assert "ZeroDivisionError" in found.problem


def test_names_of_strategies_and_models_say_where_they_come_from(
    distribution: Distribution, tmp_path: Path
) -> None:
    distribution(
        "more", "strategies", "mine", "more_module:mine", "def mine(**numbers): return numbers"
    )
    assert open_strategy("mine", width=3, seed=7) == {"width": 3, "islands": None, "seed": 7}  # type: ignore[comparison-overlap]
    with pytest.raises(UsageError, match="unknown strategy 'nope'") as caught:
        open_strategy("nope")
    assert "mine (from more 0.1)" in caught.value.hint
    with pytest.raises(UsageError, match="unknown model 'nope'"):
        open_model("nope", tmp_path)


PRESET = """
name = "{name}"
summary = "two layers of llama"
architecture = "{architecture}"
dtype = "float32"
fits_cpu = true
parameters_b = 0.0001
batch = 2
input_len = 4
output_len = 3
[config]
num_hidden_layers = 2
hidden_size = 32
intermediate_size = 48
num_attention_heads = 2
num_key_value_heads = 1
vocab_size = 64
"""


def test_a_preset_of_the_users_own_of_any_architecture_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "presets").mkdir(parents=True)
    (home / "presets/llama.toml").write_text(PRESET.format(name="mini-llama", architecture="llama"))
    (tmp_path / "odd.toml").write_text(PRESET.format(name="odd", architecture="no_such_model"))
    monkeypatch.setenv("PATCHER_HOME", str(home))
    monkeypatch.setenv("PATCHER_PRESETS", str(tmp_path))
    assert list(presets()) == [*OUR_PRESETS, "odd", "mini-llama"]
    workload = Workload(
        model="mini-llama", device="cpu", dtype="float32", batch=2, input_len=4, output_len=3
    )
    engine = open_engine(workload)
    assert engine.generate(engine.prompts(1), 3).tokens.shape == (2, 4)
    assert type(engine.model).__name__ == "LlamaForCausalLM"
    with pytest.raises(
        UsageError, match="cannot configure the preset odd, of the architecture 'no"
    ):
        open_engine(workload.model_copy(update={"model": "odd"}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PRESET.format(name="gpt-oss-tiny", architecture="llama"), "there is one of that name"),
        ("extra = 1" + PRESET.format(name="mine", architecture="llama"), "extra"),
        (
            PRESET.format(name="mine", architecture="llama").replace("num_hidden_layers = 2", ""),
            "num_hidden_layers",
        ),
        ("name = ", "is not a valid preset"),
    ],
)
def test_a_preset_of_the_users_own_that_cannot_be_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setenv("PATCHER_PRESETS", str(tmp_path))
    with pytest.raises(UsageError, match=said) as caught:
        presets()
    assert "mine.toml" in caught.value.message


def test_a_folder_of_presets_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_PRESETS", "nowhere")
    with pytest.raises(UsageError, match="PATCHER_PRESETS names nowhere, which is no folder"):
        presets()


def test_presets_of_a_package_that_cannot_be_are_left_out_and_said(
    distribution: Distribution, tmp_path: Path
) -> None:
    distribution("more", "presets", "more", "more_presets")
    (tmp_path / "more_presets").mkdir()
    (tmp_path / "more_presets/__init__.py").touch()
    taken = PRESET.format(name="gpt-oss-tiny", architecture="llama")
    good = PRESET.format(name="good", architecture="llama")
    for name, text in (("a", good), ("b", taken)):
        (tmp_path / f"more_presets/{name}.toml").write_text(text)
    assert list(presets()) == [*OUR_PRESETS, "good"]
    assert presets()["gpt-oss-tiny"].architecture == "gpt_oss"
    said = "the preset 'gpt-oss-tiny' of more_presets: the name is taken"
    assert preset_problems() == {"more_presets": said}
    [listed] = found_plugins()
    assert listed.problem == said
    with pytest.raises(UsageError, match="unknown model 'nope'") as caught:
        preset("nope")
    assert "the name is taken" in caught.value.hint


def test_nothing_is_installed_here_that_adds_anything() -> None:
    """What the other tests say of names holds for an environment without plugins."""
    groups = [importlib.metadata.entry_points(group=f"patcher.{kind}") for kind in KINDS]
    assert not [entry for group in groups for entry in group]
    assert plugins() == found_plugins() == []
    assert list(POINTS) == ["sglang", "tensorrt_llm", "transformers", "vllm"]
