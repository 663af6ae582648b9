"""Programming models: each one's example is built wherever its compiler is, and judged where it can
run; what is missing is said with its fix; what is only compiled is never taken for more.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from patcher.agent import run_loop
from patcher.bench import (
    Candidate,
    Check,
    Evaluation,
    Language,
    MissingError,
    Op,
    Outcome,
    UsageError,
    guess_language,
    load_op,
)
from patcher.bench.judge import JudgeSettings, evaluate
from patcher.bench.sandbox.policy import sandbox_description
from patcher.bench.toolchains import EXAMPLE_OP, Built, build, compilers, load, toolchain
from patcher.bench.toolchains.foreign import MetalToolchain, SyclToolchain
from patcher.doctor import examine
from patcher.integrate import Patch
from patcher.models import Reply, Usage
from patcher.models.replay import RecordedReply, ReplayModel
from patcher.pipeline import start
from patcher.plan import RunPlan
from patcher.prompting.extract import blocks
from patcher.prompting.rendering import Prompts
from patcher.runs.run import Run
from patcher.settings import resolve

OPS = Path(__file__).parents[2] / "data/ops"
COMPILED_ONLY = [language for language in Language if language.compile_only]
BUILT = [language for language in Language if language not in (Language.TORCH, Language.TRITON)]
QUICK = JudgeSettings(pairs=3, calls=20, lives_s=0, points=1)


@pytest.fixture(autouse=True)
def _ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(OPS))


@pytest.fixture
def op() -> Op:
    return load_op(EXAMPLE_OP)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any compiler."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(compilers, "search_path", lambda: str(empty))
    return empty


def example(language: Language) -> Candidate:
    return Candidate(op=EXAMPLE_OP, language=language, source=toolchain(language).example)


def needs(language: Language) -> None:
    if missing := toolchain(language).missing():
        pytest.skip(f"{language}: {missing}")


def patcher(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "patcher", *words],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", "PATCHER_OPS": str(OPS), **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("language", list(Language))
def test_hints_are_a_prompt_with_one_whole_example(language: Language, op: Op) -> None:
    kind = "cpu" if language is Language.CPP else "cuda"
    text = Prompts(op, language, "a device", op.sweep(kind)).generate(None)
    rules = text[text.index("# Rules for") :].partition("\n# ")[0]
    [shown] = blocks(rules)
    assert shown.source + "\n" == re.sub(r"\n{3,}", "\n\n", toolchain(language).example)
    assert shown.tag in language.traits.tags
    assert shown.source.count("scaled_add(") >= 1
    assert ("neither run nor timed" in rules) is language.compile_only


@pytest.mark.parametrize("language", list(Language))
def test_a_language_is_told_by_its_example(language: Language) -> None:
    candidate = example(language)
    assert guess_language(Path(candidate.file_name), candidate.source) is language


@pytest.mark.parametrize("language", BUILT)
def test_the_example_builds_where_its_compiler_is(language: Language, op: Op) -> None:
    needs(language)
    built = build(example(language), op.contract)
    assert built.ok, built.log
    assert built.path is not None
    assert built.path.stat().st_size > 0
    assert (built.binding == "none") is language.compile_only
    assert build(example(language), op.contract).cached


@pytest.mark.parametrize("language", [Language.CPP, Language.HIP, Language.SYCL, Language.METAL])
def test_what_does_not_compile_says_why(language: Language) -> None:
    needs(language)
    source = example(language).source + "\nint scaled_add_broken = no_such_name;\n"
    said = evaluate(Candidate(op=EXAMPLE_OP, language=language, source=source))
    assert said.outcome is Outcome.COMPILATION_FAILURE
    assert "no_such_name" in said.log
    assert "/tmp" not in said.log


def test_the_judge_finds_the_cpp_example_right() -> None:
    needs(Language.CPP)
    said = evaluate(example(Language.CPP), QUICK)
    assert said.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), said.failed_checks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_example_is_right(op: Op, dtype: torch.dtype) -> None:
    x, y = (torch.randn(1000).to(dtype) for _ in range(2))
    out = torch.full((1000,), torch.nan, dtype=dtype)
    load(build(example(Language.TORCH), op.contract), EXAMPLE_OP)(x, y, out, 0.5)
    torch.testing.assert_close(out, op.reference(x, y, out, 0.5)["out"].to(dtype))


@pytest.mark.parametrize("language", [Language.CUDA, Language.TRITON, Language.CUTEDSL])
def test_the_judge_finds_the_example_right_on_a_gpu(language: Language) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    needs(language)
    said = evaluate(example(language), QUICK)
    assert said.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), (said.failed_checks, said.log)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")
def test_the_triton_example_is_right_in_the_interpreter(tmp_path: Path) -> None:
    # not in bfloat16, which the interpreter truncates; in a process of its own: Triton reads the
    # variable when it is imported
    (tmp_path / "example.py").write_text(example(Language.TRITON).source, encoding="utf-8")
    code = (
        "import torch, example\n"
        "x, y = torch.randn(3000), torch.randn(3000)\n"
        "out = torch.full((3000,), torch.nan)\n"
        "example.scaled_add(x, y, out, 0.3)\n"
        "torch.testing.assert_close(out, (x.double() + 0.3 * y.double()).float())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_cuda_examples_take_the_callers_stream() -> None:
    for language in (Language.CUDA, Language.HIP):
        assert "0, stream>>>" in example(language).source
    assert "use_tvm_ffi_env_stream=True" in example(Language.CUTEDSL).source


BROKEN_KERNEL = ("out[i] = total.to(", "out[i] = total.no_such_method(")
NEEDS_A_GPU = (
    "    if out.numel():\n",
    "    torch.cuda.current_stream()\n    if out.numel():\n",
)


def test_cute_dsl_compiles_without_a_gpu_or_says_what_it_could_not_check(op: Op) -> None:
    needs(Language.CUTEDSL)
    right = example(Language.CUTEDSL).source

    def built(*change: str) -> Built:
        source = right.replace(*change) if change else right
        assert not change or source != right
        return build(
            Candidate(op=EXAMPLE_OP, language=Language.CUTEDSL, source=source), op.contract
        )

    good = built()
    assert good.ok
    assert "compiled 2 kernel functions: launch" in good.log, "one for each dtype"
    broken = built(*BROKEN_KERNEL)
    assert not broken.ok
    assert "no_such_method" in broken.log
    if not torch.cuda.is_available():
        unchecked = built(*NEEDS_A_GPU)
        assert unchecked.ok, "the runner decides"
        assert "not checked without a GPU" in unchecked.log


def test_a_cute_dsl_file_is_compiled_in_confinement(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(Language.CUTEDSL)
    isolated, reason = sandbox_description()
    if not isolated:
        pytest.skip(reason)
    monkeypatch.setenv("SOME_TOKEN", "secret")
    look = (
        f"import os\nprint('sees', os.path.exists({str(op.folder)!r}), "
        "os.environ.get('SOME_TOKEN'))\n"
    )
    source = look + example(Language.CUTEDSL).source
    built = build(Candidate(op=EXAMPLE_OP, language=Language.CUTEDSL, source=source), op.contract)
    assert "sees False None" in built.log


def test_a_cute_dsl_file_without_the_entry_is_refused_before_it_runs(op: Op) -> None:
    needs(Language.CUTEDSL)
    source = "import cutlass\nraise SystemExit('it ran')  # scaled_add\n"
    built = build(Candidate(op=EXAMPLE_OP, language=Language.CUTEDSL, source=source), op.contract)
    assert (built.ok, built.log) == (False, "no top-level function scaled_add")


@pytest.mark.parametrize(
    "language",
    [Language.CPP, Language.CUDA, *COMPILED_ONLY],
)
def test_without_its_compiler_a_language_says_what_to_install(
    language: Language, bare: Path, op: Op
) -> None:
    missing = toolchain(language).missing()
    assert missing is not None
    assert missing.fix
    with pytest.raises(MissingError, match=f"cannot build {language} here") as raised:
        build(example(language), op.contract)
    assert raised.value.hint == missing.fix


def test_without_its_package_cute_dsl_says_what_to_install() -> None:
    if toolchain(Language.CUTEDSL).missing() is None:
        pytest.skip("nvidia-cutlass-dsl is installed here")
    with pytest.raises(MissingError, match="cannot build cutedsl here") as raised:
        toolchain(Language.CUTEDSL).demand()
    assert raised.value.hint == "pip install nvidia-cutlass-dsl"


def test_cute_dsl_whose_modules_are_not_there_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where packages were unpacked into a folder whose .pth files nobody reads."""
    if importlib.util.find_spec("cutlass"):
        pytest.skip("cutlass is installed here")
    known = tmp_path / "nvidia_cutlass_dsl-4.5.2.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.5.2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    missing = toolchain(Language.CUTEDSL).missing()
    assert missing is not None
    assert "`import cutlass` fails" in missing.reason
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass/__init__.py").touch()
    importlib.invalidate_caches()
    assert toolchain(Language.CUTEDSL).missing() is None


def test_the_command_refuses_a_missing_compiler_and_names_the_fix(tmp_path: Path) -> None:
    if compilers.find("xcrun"):
        pytest.skip("Metal's compiler is here")
    candidate = example(Language.METAL)
    (tmp_path / candidate.file_name).write_text(candidate.source, encoding="utf-8")
    done = patcher("evaluate", EXAMPLE_OP, candidate.file_name, "--json", cwd=tmp_path)
    assert done.returncode == 3
    said = json.loads(done.stdout)["error"]
    assert said["kind"] == "missing"
    assert "xcrun" in said["message"]
    assert "Xcode" in said["hint"]


def test_the_doctor_lists_every_language(bare: Path) -> None:
    found = {one.name: one for one in examine() if one.name.startswith("toolchain ")}
    assert list(found) == [f"toolchain {language}" for language in Language]
    for language in (Language.CPP, Language.CUDA, *COMPILED_ONLY):
        one = found[f"toolchain {language}"]
        assert one.status == ("fail" if language is Language.CPP else "warn")
        assert one.detail
        assert one.fix
    assert found["toolchain torch"].detail == "ready"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Candidate:
    """g++ stands in for SYCL's compilers, which few machines have: the compile is a real one, of a
    source that includes nothing of SYCL.
    """
    needs(Language.CPP)
    monkeypatch.setattr(SyclToolchain, "compiler", lambda _: ["g++"])
    return Candidate(op=EXAMPLE_OP, language=Language.SYCL, source=toolchain(Language.CPP).example)


def test_what_is_only_compiled_is_called_that_and_nothing_more(
    stand_in: Candidate, op: Op, tmp_path: Path
) -> None:
    said = evaluate(stand_in)
    assert said.outcome is Outcome.COMPILED
    assert [check.name for check in said.checks] == ["build"]
    assert (said.timings, said.geomean_speedup, said.baseline) == ((), None, None)
    assert "neither run nor timed" in said.log
    assert said.sandbox == "nothing of it was run"
    with pytest.raises(UsageError, match="this is compiled"):
        Patch.create(tmp_path / "patch", op, stand_in, said, engine="transformers", made_by="test")
    with pytest.raises(UsageError, match="only be compiled"):
        load(build(stand_in, op.contract), EXAMPLE_OP)


@pytest.mark.parametrize(
    "claim", [{"geomean_speedup": 2.0}, {"baseline": "eager"}, {"outcome": Outcome.CORRECT}]
)
def test_an_evaluation_cannot_claim_more_than_that_it_compiled(claim: dict[str, object]) -> None:
    said = {"op": EXAMPLE_OP, "language": "hip", "digest": "0", "outcome": Outcome.COMPILED}
    assert Evaluation(**said)
    with pytest.raises(ValidationError):
        Evaluation(**{**said, **claim})


@pytest.mark.parametrize(
    "settings",
    [
        JudgeSettings(sweep="cpu"),
        JudgeSettings(baseline="eager"),
        JudgeSettings(device="cuda"),
        JudgeSettings(sanitize=True),
    ],
    ids=lambda settings: "asked",
)
@pytest.mark.parametrize("language", COMPILED_ONLY)
def test_sweeps_and_baselines_are_refused_where_nothing_runs(
    language: Language, settings: JudgeSettings
) -> None:
    with pytest.raises(UsageError, match=f"a {language} kernel can only be compiled") as raised:
        evaluate(example(language), settings)
    assert raised.value.hint.startswith("drop --")


@pytest.mark.parametrize(("whole", "sweep"), [(True, None), (False, "cpu")])
def test_a_run_that_could_never_end_well_is_refused_at_once(
    tmp_path: Path, whole: bool, sweep: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = RunPlan(op=EXAMPLE_OP, language=Language.METAL, whole=whole, sweep=sweep)
    with pytest.raises(UsageError, match="a metal kernel is only compiled here"):
        start(resolve({}), "optimize", None, None, plan)
    assert list(tmp_path.iterdir()) == []


def test_the_loop_ends_with_the_first_candidate_that_compiles(tmp_path: Path, op: Op) -> None:
    """Replies are recorded ones, verdicts scripted: a failure, then `compiled`."""
    sources = [f"void {EXAMPLE_OP}() {{}} // {number}\n" for number in range(3)]
    lines = [
        RecordedReply(
            step=f"{EXAMPLE_OP}/{number}/ask-generate",
            role="generate",
            prompt_digest="0" * 64,
            system="",
            prompt="",
            reply=Reply(
                text=f"```cpp\n{source}```\n",
                model="recorded-model",
                usage=Usage(),
                stop_reason="end_turn",
                source="api",
                prompt_digest="0" * 64,
            ),
        ).model_dump_json()
        for number, source in enumerate(sources)
    ]
    (tmp_path / "replies.jsonl").write_text("\n".join(lines), encoding="utf-8")
    outcomes = iter((Outcome.COMPILATION_FAILURE, Outcome.COMPILED))

    def judge(candidate: Candidate) -> Evaluation:
        outcome = next(outcomes)
        passed = outcome is Outcome.COMPILED
        return Evaluation(
            op=candidate.op,
            language=candidate.language,
            digest=candidate.digest,
            outcome=outcome,
            checks=(Check(name="build", passed=passed, detail="hipcc"),),
        )

    with Run.create(tmp_path / "runs", command="optimize") as run:
        model = ReplayModel(tmp_path / "replies.jsonl")
        found = run_loop(run, op, Language.HIP, model, judge, 3, "a device", diagnoser=None)
    assert [one.outcome for one in found.iterations] == ["compilation_failure", "compiled"]
    assert (found.stopped, found.best_file, found.best_digest) == ("compiled", None, None)


def test_optimize_writes_hip_and_ends_when_it_compiles(tmp_path: Path) -> None:
    needs(Language.HIP)
    words = ("optimize", EXAMPLE_OP, "--language", "hip", "--model", "exchange:ask", "--json")
    first = patcher(*words, cwd=tmp_path)
    assert first.returncode == 6, first.stdout + first.stderr
    [prompt] = (tmp_path / "ask").glob("*.prompt.md")
    assert "this machine only compiles" in prompt.read_text(encoding="utf-8")
    reply = prompt.with_name(prompt.name.replace(".prompt.md", ".reply.md"))
    reply.write_text(f"```cpp\n{example(Language.HIP).source}```\n", encoding="utf-8")
    [run] = (tmp_path / "patcher-runs").iterdir()
    second = patcher("resume", run.name, "--json", cwd=tmp_path)
    assert second.returncode == 1, second.stdout + second.stderr
    found = json.loads(second.stdout)["optimisation"]
    assert (found["stopped"], found["best_file"]) == ("compiled", None)


def test_metal_is_compiled_once_for_each_choice_of_dtypes(op: Op) -> None:
    unit = MetalToolchain().unit(example(Language.METAL), op.contract)
    assert unit.count('#include "scaled_add.metal"') == 2
    assert "#define T float\n" in unit
    assert "#define T bfloat\n" in unit
    assert unit.count("#undef T\n") == 2


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A double of nvcc that says its version and compiles anything; its folder."""
    folder = tmp_path / "cuda"
    (folder / "bin").mkdir(parents=True)
    set_release(folder, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return folder


def set_release(folder: Path, release: str) -> None:
    compiler = folder / "bin" / "nvcc"
    compiler.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && {{ echo "release {release}"; exit 0; }}\n'
        "echo built > candidate.so\n"
    )
    compiler.chmod(0o755)


UPGRADES = {
    "torch": lambda patch: patch.setattr("torch.__version__", "2.99.0"),
    "torch of another commit": lambda patch: patch.setattr("torch.version.git_version", "0"),
    "torch's ABI": lambda patch: patch.setattr("torch.compiled_with_cxx11_abi", lambda: "other"),
    "torch's CUDA": lambda patch: patch.setattr("torch.version.cuda", "13.9"),
    "Python": lambda patch: patch.setitem(sysconfig.get_config_vars(), "SOABI", "cpython-399"),
}


@pytest.mark.parametrize("upgraded", [*UPGRADES, "CUDA", "apache-tvm-ffi"])
def test_a_build_from_before_an_upgrade_is_not_used(
    nvcc: Path, op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upgraded: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    sources = {
        "torch": f"#include <torch/extension.h>\nvoid {op.name}() {{}}\n",
        "tvm-ffi": f"void {op.name}() {{}}\n",
    }

    def cached(binding: str) -> bool:
        candidate = Candidate(op=op.name, language=Language.CUDA, source=sources[binding])
        built = build(candidate, op.contract, folder=cache)
        assert built.ok, built.log
        assert built.binding == binding
        return built.cached

    for binding in sources:
        assert not cached(binding)
        assert cached(binding)
    if upgraded == "CUDA":
        set_release(nvcc, "13.1")
    elif upgraded == "apache-tvm-ffi":
        version = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata,
            "version",
            lambda name: "99" if name == "apache-tvm-ffi" else version(name),
        )
    else:
        UPGRADES[upgraded](monkeypatch)
    assert cached("torch") == (upgraded == "apache-tvm-ffi")
    assert cached("tvm-ffi") == (upgraded in UPGRADES)
