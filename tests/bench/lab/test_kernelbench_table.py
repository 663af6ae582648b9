"""The table of a public benchmark, over runs of small imported problems with recorded replies."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from agent_sample import Line, recording, verdict
from command_line import patcher as command

from patcher import pipeline
from patcher.bench import (
    BaselineTime,
    BudgetError,
    Candidate,
    Evaluation,
    Language,
    Outcome,
    UsageError,
)
from patcher.bench import load_op as op_of
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.lab import kernelbench_figures
from patcher.bench.lab.gpu_queue import read_plan
from patcher.bench.lab.kernelbench_columns import main as columns_main
from patcher.bench.lab.kernelbench_columns import write
from patcher.bench.lab.kernelbench_figures import column, timed_sizes
from patcher.bench.lab.kernelbench_narrow import ProblemRow, names_narrower
from patcher.bench.lab.kernelbench_published import ours
from patcher.bench.lab.kernelbench_shares import (
    ColumnTimes,
    gain_shares,
    read_verdicts,
    summaries,
    times_of,
)
from patcher.bench.lab.kernelbench_table import SO_FAR, main
from patcher.bench.lab.loop_runs import bootstrap_geomean, median_of
from patcher.bench.lab.own_check import own_check, package_of
from patcher.kernel_search import stage
from patcher.plan import RunPlan
from patcher.settings import resolve
from patcher.strategies.search import Search

PROBLEM = """import torch
import torch.nn as nn

rows = 256
width = 64


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return torch.relu(self.norm(x))


def get_inputs():
    return [torch.rand(rows, width)]


def get_init_inputs():
    return [width]
"""
OP = "level2_3_norm_relu"
NORM = """import torch


def {op}(x, norm_weight, norm_bias, output):
    y = torch.nn.functional.layer_norm(x, x.shape[-1:]{weights})
    output.copy_(y.{end}())
"""
RIGHT = {"weights": ", norm_weight, norm_bias", "end": "relu_"}
WRONG = {"weights": "", "end": "relu_"}
"""Leaves out gain and shift, which are 1 and 0 in a module that was never trained."""
WORSE = {"weights": "", "end": "tanh_"}
CPP = """#include <tvm/ffi/container/tensor.h>
#include <cmath>
using tvm::ffi::TensorView;
void level2_3_norm_relu(TensorView x, TensorView g, TensorView s, TensorView out) {
  auto* a = static_cast<const float*>(x.data_ptr());
  auto* y = static_cast<float*>(out.data_ptr());
  const int64_t rows = x.size(0), width = x.size(1);
  for (int64_t r = 0; r < rows; ++r, a += width, y += width) {
    double mean = 0, square = 0;
    for (int64_t i = 0; i < width; ++i) mean += a[i] / width;
    for (int64_t i = 0; i < width; ++i) square += (a[i] - mean) * (a[i] - mean) / width;
    for (int64_t i = 0; i < width; ++i)
      y[i] = float(std::fmax(0.0, (a[i] - mean) / std::sqrt(square + 1e-5)));
  }
}
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("benchmark")
    problem = folder / "level2" / "3_Norm_Relu.py"
    problem.parent.mkdir()
    problem.write_text(PROBLEM)
    precisions = [word for name in ("fp32", "tf32", "bf16") for word in ("--precision", name)]
    columns = [*precisions, "--size", "rows=64"]
    words = ["import", str(problem), "--out", str(folder / "ops"), *columns]
    done = command(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATCHER_OPS", str(folder / "ops"))
        yield folder


class FixedJudge:
    """In place of the judge: by the source, with a time for each baseline."""

    def prepare(self, candidates: object) -> None:
        """Nothing is built."""

    def evaluate(self, candidates: list[Candidate]) -> list[Evaluation]:
        return [self._one(each) for each in candidates]

    def _one(self, candidate: Candidate) -> Evaluation:
        if "norm_weight, norm_bias)" not in candidate.source:
            return verdict(candidate, Outcome.MISMATCH)
        if "# stop" in candidate.source:
            raise BudgetError("no time left")
        said = verdict(candidate, 3.0 if "float16" in candidate.source else 2.0)
        at = {"axes": {"x_0": 64}}
        said = said.model_copy(
            update={"timings": tuple(each.model_copy(update=at) for each in said.timings)}
        )
        times = {"eager": BaselineTime(time_us=10), "torch.compile": BaselineTime(time_us=12)}
        if candidate.op == OP:
            return said.model_copy(update={"baselines": times})
        half = [
            each.model_copy(update={"baseline_us": 5.0, "candidate_us": 2.5})
            for each in said.timings
        ]
        return said.model_copy(update={"timings": tuple(half)})


@contextmanager
def judges(*_: object, **__: object) -> Iterator[FixedJudge]:
    yield FixedJudge()


@pytest.fixture
def fixed_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "open_judges", judges)
    monkeypatch.setattr(stage, "require_same_device", lambda _, found: found)


def source(op: str, form: dict[str, str]) -> str:
    return NORM.format(op=op, **form)


def loop(folder: Path, op: str, sources: list[str], language: Language = Language.TORCH) -> None:
    """A run whose replies were recorded."""
    told = folder / op
    told.mkdir(exist_ok=True)
    lines: list[Line] = [
        (f"{at}/generate", f"```python\n{each}```") for at, each in enumerate(sources)
    ]
    recording(told, lines, op)
    settings = resolve(
        {
            "model": f"replay:{told / 'recording.jsonl'}",
            "analyst": "off",
            "diagnoser": "off",
            "iterations": len(sources),
            "memory": "off",
            "runs_dir": folder / "runs",
            **({} if language is Language.TORCH else {"judge": f"exchange:{told / 'jobs'}"}),
        }
    )
    plan = RunPlan(op=op, language=language, whole=False, search=Search(seed=1))
    with pipeline.start(settings, "optimize", None, None, plan) as run:
        try:
            pipeline.execute(run, lambda *_: None, lambda _: None)
        except BudgetError:
            assert "# stop" in sources[-1]


@pytest.mark.usefixtures("fixed_judge")
def test_one_command_makes_the_table_and_its_figures(
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bf16 = f"{OP}_bf16"
    loop(places, OP, [source(OP, WRONG), source(OP, WORSE), source(OP, RIGHT)])
    loop(places, bf16, [source(bf16, RIGHT)])
    loop(places, bf16, ["no kernel", source(bf16, RIGHT) + "# stop\n"])
    out = places / "table"
    words = [str(places / "runs"), "--out", str(out), "--problems", str(places / "level2")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert (out / "README.md").read_text() == shown
    table = json.loads((out / "table.json").read_text())

    plain, half = table["columns"]
    assert (plain["precision"], plain["runs"], plain["partial"]) == ("fp32", 1, 0)
    assert [each["value"] for each in plain["right_by"]] == [0, 0, 1]
    assert [each["value"] for each in plain["fast"]["1.2"]] == [0, 0, 1]
    assert (plain["judged"], plain["refused"]) == (3, 2)
    assert plain["tokens"] == 3 * 150
    assert (plain["input_tokens"], plain["output_tokens"]) == (300, 150)
    assert plain["output_characters"] > len(NORM) > 0
    assert "| patcher, fp32 | patcher, bf16 | KForge | CudaForge |" in shown
    assert "| speedup, geomean | 2 | 2 | 5.13 |  |" in shown
    assert SO_FAR not in shown
    assert (half["precision"], half["runs"], half["partial"]) == ("bf16", 1, 1)
    assert "**partial**" in shown
    # 10 us to 2.5 us, of which the baseline in bf16 alone makes 5 us
    shares = {each["precision"]: each for each in table["shares"]}
    assert shares["bf16"]["gain"] == pytest.approx(4)
    assert shares["bf16"]["precision_pct"] == pytest.approx(50)
    assert (shares["fp32"]["precision_pct"], shares["fp32"]["fusion_pct"]) == (0, 100)

    own = {(each["op"], each["iteration"]): each for each in table["checked"]}
    assert (own[OP, 0]["judge"], own[OP, 0]["own"]) == ("mismatch", "accepted")
    assert (own[OP, 1]["judge"], own[OP, 1]["own"]) == ("mismatch", "refused")
    assert (own[OP, 2]["judge"], own[OP, 2]["own"]) == ("right", "accepted")
    assert re.search(r"\| refused \| 1 \| 1 \| 0 \|", shown)
    assert f"- {OP}, iteration 0: mismatch" in shown

    again = [str(places / "runs"), "--out", str(places / "so-far"), "--so-far"]
    assert main(again) == 0
    assert SO_FAR in capsys.readouterr().out
    [_, so_far] = json.loads((places / "so-far" / "table.json").read_text())["columns"]
    assert (so_far["runs"], so_far["partial"]) == (2, 1)

    def never(*_: object) -> None:
        raise AssertionError("what was checked is checked again")

    monkeypatch.setattr(kernelbench_figures, "own_check", never)
    assert main(words) == 0
    (Path(words[2]) / "own-checks.json").write_text('{"cut')
    assert main(words) == 2
    assert "own-checks.json is damaged" in capsys.readouterr().err
    (places / "a-file").touch()
    assert main([words[0], "--out", str(places / "a-file")]) == 2
    assert "choose another --out" in capsys.readouterr().err


@pytest.mark.usefixtures("fixed_judge")
def test_a_narrower_type_is_told_and_counted_apart(
    places: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    narrow = source(OP, RIGHT).replace("import torch", "import torch\nhalf = torch.float16")
    loop(tmp_path, OP, [source(OP, RIGHT), narrow])
    out = tmp_path / "table"
    assert main([str(tmp_path / "runs"), "--out", str(out), "--so-far"]) == 0
    table = json.loads((out / "table.json").read_text())
    [row] = table["rows"]
    assert row["narrower"]
    assert (row["speedup"], row["in_column"]) == pytest.approx((3.0, 2.0))
    [figures] = table["columns"]
    assert (figures["narrower"], figures["in_column"]["value"]) == (1, pytest.approx(2.0))
    shown = capsys.readouterr().out
    assert "| geomean without narrower types | 2 |" in shown
    assert "TF32 off, both sides; kernels in a narrower type in 1 |" in shown


@pytest.mark.parametrize(
    ("op", "language", "text", "narrow"),
    [
        (f"{OP}_tf32", Language.TRITON, "x = tl.zeros((4,), tl.float16)", True),
        (f"{OP}_tf32", Language.TRITON, "# float16 would do\nx = y.to(tl.float32)", False),
        (f"{OP}_tf32", Language.TRITON, 'def f():\n    """no fp16"""\n    return 1', False),
        (f"{OP}_tf32", Language.TRITON, 'x = asm("cvt.rn.f16.f32 $0, $1;")', True),
        (f"{OP}_tf32", Language.TRITON, 'x = asm("cvt.rna.tf32.f32 $0, $1;")', False),
        (OP, Language.CUDA, "__half x; // float", True),
        (OP, Language.CUDA, "/* bf16 */ float x; // half of it", False),
        (f"{OP}_bf16", Language.CUDA, "__nv_bfloat16 x;", False),
        (f"{OP}_bf16", Language.CUDA, "__nv_fp8_e4m3 x;", True),
    ],
)
def test_what_names_a_narrower_type(op: str, language: Language, text: str, narrow: bool) -> None:
    assert names_narrower(text, op, language) is narrow


def test_the_own_check_runs_a_build_and_only_in_the_sandbox(places: Path, tmp_path: Path) -> None:
    problem = places / "level2" / "3_Norm_Relu.py"
    assert op_of(OP).name == OP
    built = Candidate(op=OP, language=Language.CPP, source=CPP)
    assert own_check(built, problem).accepted
    marker = tmp_path / "marker"
    escaping = source(OP, RIGHT) + f"\nopen({str(marker)!r}, 'w').write('out')\n"
    said = own_check(Candidate(op=OP, language=Language.TORCH, source=escaping), problem)
    assert said.accepted is False
    assert not marker.exists()
    if not torch.cuda.is_available():
        elsewhere = own_check(Candidate(op=OP, language=Language.TRITON, source="x"), problem)
        assert elsewhere.accepted is None
        assert "needs a GPU" in elsewhere.why
    changed = tmp_path / problem.name
    changed.write_text(PROBLEM.replace("rows = 256", "rows = 128"))
    refused = own_check(built, changed)
    assert (refused.accepted, refused.why) == (None, "the problem changed since it was imported")


FAKE = """from types import SimpleNamespace
import torch
from . import utils


def get_tolerance_for_precision(precision):
    return 1e-4


def eval_kernel_against_ref(
    original, custom, num_correct_trials, measure_performance, backend, device, precision
):
    spaces = [{}, {}]
    for text, space in zip((original, custom), spaces):
        exec(text, space)
    spaces[1]["get_init_inputs"] = spaces[0]["get_init_inputs"]
    models = []
    for space, name in zip(spaces, ("Model", "ModelNew")):
        torch.manual_seed(1)
        models.append(space[name](*space["get_init_inputs"]()))
    x = spaces[0]["get_inputs"]()[0]
    with torch.no_grad():
        off = float((models[0](x) - models[1](x)).abs().max())
    return SimpleNamespace(
        compiled=True,
        correctness=off <= get_tolerance_for_precision(precision),
        metadata={"max_difference": [off], "backend": backend},
    )
"""


@pytest.mark.usefixtures("fixed_judge")
def test_kernels_of_one_column_are_written_for_the_others(
    places: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UsageError, match="no runs"):
        write(tmp_path / "nothing", tmp_path / "out")
    tf32 = f"{OP}_tf32"
    (tmp_path / tf32).mkdir()
    form = "import triton\nimport triton.language as tl\n"
    dots = (
        "\n\ndef products(a, b, c):\n"
        "    c = tl.dot(a, b, c, allow_tf32=True)\n    return tl.dot(a, c)\n"
    )
    loop(tmp_path, tf32, [source(tf32, WRONG), form + source(tf32, RIGHT) + dots], Language.TRITON)
    out = tmp_path / "out"
    assert columns_main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "4 verdicts" in capsys.readouterr().out
    jobs = read_plan(out / "columns.toml", {"judge": "env", "ops": "ops", "sources": "here"})
    names = [f"{OP}-module", f"{OP}-kernel", f"{OP}_bf16-module", f"{OP}_bf16-kernel"]
    assert [job.name for job in jobs] == names
    assert f"evaluate {OP} here/{OP}-kernel.py --language triton" in jobs[1].run

    kernel = (out / "sources" / f"{OP}-kernel.py").read_text()
    assert kernel.count("input_precision='ieee'") == 2
    assert "allow_tf32" not in kernel
    assert f"def {OP}(" in kernel
    half = (out / "sources" / f"{OP}_bf16-kernel.py").read_text()
    assert half == (form + source(f"{OP}_bf16", RIGHT) + dots).strip() + "\n"
    settings = JudgeSettings(points=1, pairs=3, calls=20, lives_s=0.0, threads=1)
    results = tmp_path / "results"
    results.mkdir()
    with open_judge(settings) as judge:
        for op in (OP, f"{OP}_bf16"):
            text = (out / "sources" / f"{op}-module.py").read_text()
            module = Candidate(op=op, language=Language.TORCH, source=text)
            found = judge.evaluate(module, lambda *_: None)
            assert found.right, found.failed_checks
            (results / f"{op}-module.json").write_text(found.model_dump_json())
    known = times_of((), read_verdicts(results))[OP]
    assert {name: each.kernel_us for name, each in known.items()} == {"fp32": None, "bf16": None}
    assert all(each.baseline_us > 0 for each in known.values())


def test_factors_of_a_gain_and_its_shares_in_either_order() -> None:
    points, device = ("x=1",), "a GPU"

    def times(baseline_us: float, kernel_us: float | None) -> ColumnTimes:
        return ColumnTimes(baseline_us, kernel_us, points, device)

    known = {
        "a": {"fp32": times(80, 40), "tf32": times(20, 10)},
        "b": {"fp32": times(80, None), "tf32": times(40, 5), "bf16": times(10, None)},
        "c": {"tf32": times(20, 10)},
    }
    shares = {(each.problem, each.precision): each for each in gain_shares(known)}
    assert set(shares) == {("a", "fp32"), ("a", "tf32"), ("b", "tf32")}
    a, b = shares["a", "tf32"], shares["b", "tf32"]
    assert (a.by_precision, a.by_kernel) == (4, 2)
    assert a.gain == pytest.approx(8)
    assert b.gain == pytest.approx(16)
    assert a.precision_pct == pytest.approx(200 / 3)
    assert a.fusion_first_pct == pytest.approx(100 / 3)
    assert b.fusion_pct == pytest.approx(75)
    assert b.fusion_first_pct is None
    [_, of_tf32] = summaries(list(shares.values()))
    assert of_tf32.problems == 2
    assert of_tf32.by_kernel.value == pytest.approx(4)


def test_with_a_checkout_the_answer_is_that_of_its_code_at_two_tolerances(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Candidate(op=OP, language=Language.TORCH, source=source(OP, RIGHT))
    problem = places / "level2" / "3_Norm_Relu.py"
    package = tmp_path / "src" / "kernelbench"
    package.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no eval\.py"):
        package_of(tmp_path)
    (package / "__init__.py").write_text("from . import utils\n")
    # packages that ask models need not be there, and are asked as torch asks every module
    (package / "utils.py").write_text(
        "from litellm import completion\nfrom tqdm import tqdm\nimport inspect, on_the_path\n"
        "inspect.getmodule(inspect.currentframe())\n"
    )
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "on_the_path.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(beside))
    (package / "eval.py").write_text(FAKE)
    if not torch.cuda.is_available():
        said = own_check(right, problem, tmp_path)
        assert (said.accepted, said.by) == (None, "kernelbench")
        assert "needs a GPU" in said.why
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    off = {"weights": ", norm_weight, norm_bias", "end": "relu_().add(OFF).relu"}
    for by, accepted, loose in ((0.0, True, True), (1e-3, False, True), (1e-1, False, False)):
        text = source(OP, off).replace("OFF", str(by))
        said = own_check(Candidate(op=OP, language=Language.TORCH, source=text), problem, tmp_path)
        assert (said.accepted, said.loose, said.by) == (accepted, loose, "kernelbench"), said.why
        assert accepted is (said.why == "")


def row(op: str, speedup: float | None, at: int | None, **more: object) -> ProblemRow:
    known = {
        "run": op,
        "op": op,
        "language": "cuda",
        "strategy": "refine",
        "seed": 1,
        "models": (),
        "ended": "iterations",
        "iterations": 3,
        "first_right": at,
        "outcomes": (),
        "speedup": speedup,
        "low": speedup,
        "high": speedup,
        "baseline": "eager",
        "baseline_us": 8.0,
        "candidate_us": 4.0,
        "tokens": 10,
        "usd": 0.5,
        "judge_s": 1,
        "gpu_s": 1,
        "best_by": [None] * ((at or 4) - 1) + [speedup] * (4 - (at or 4)),
    }
    known |= {"narrower": False, "in_column": speedup}
    return ProblemRow.model_validate({**known, **more})


def test_figures_of_a_column() -> None:
    rows = [
        row("a", 4.0, 1),
        row("b", 1.0, 3),
        row("c", 0.5, 2),
        row("d", None, None),
        row("e", 9.0, 1, ended=None),
    ]
    found = column("fp32", rows)
    assert (found.runs, found.partial) == (4, 1)
    assert [each.value for each in found.right_by] == [0.25, 0.5, 0.75]
    assert found.geomean is not None
    assert found.applied is not None
    assert found.geomean.value == pytest.approx(2 ** (1 / 3))
    assert found.applied.value == pytest.approx(2**0.5)
    assert {name: [each.value for each in by] for name, by in found.fast.items()} == {
        "1": [0.25] * 3,
        "1.2": [0.25] * 3,
    }
    assert [each.value for each in column("fp32", rows, so_far=True).fast["1"]] == [0.4] * 3
    assert found.usd == 0.5
    nothing = column("fp32", rows[-1:])
    assert (nothing.runs, nothing.geomean, nothing.tokens) == (0, None, None)


def test_the_sizes_that_were_timed_are_told_as_shares_of_the_import(places: Path) -> None:
    [*_, whole] = op_of(OP).contract.sweeps[0].values
    assert whole == 64
    words = {
        ("x_0=64",): "the import's",
        ("x_0=16", "x_0=32", "x_0=64"): "1, 1/2, 1/4 of the import's",
        ("x_0=24",): "3/8 of the import's",
        ("y=8",): "y=8",
    }
    assert {at: timed_sizes(row(OP, 2.0, 1, points=at)) for at in words} == words

    alone = ("x_0=64",)
    rows = [row(OP, 2.0, 1, points=alone), row(OP, 2.0, 1, points=alone), row(OP, None, None)]
    assert ours(column("fp32", rows)).sizes == "the import's"
    rows.append(row(OP, 2.0, 1, points=("x_0=16",)))
    assert ours(column("fp32", rows)).sizes == "the import's in 2; 1/4 of the import's in 1"
    assert ours(column("fp32", rows[2:3])).sizes == ""


def test_times_of_other_points_or_devices_are_not_held_against_each_other() -> None:
    plain = row("a", 2.0, 1, points=("x=1",))
    for more, count in (
        ({"points": ("x=1",)}, 2),
        ({"points": ("x=2",)}, 1),
        ({"points": ("x=1",), "device": "other"}, 1),
        ({"points": ("x=1",), "ended": None}, 1),
    ):
        assert len(gain_shares(times_of([plain, row("a_tf32", 2.0, 1, **more)], ()))) == count


def test_the_bootstrap_is_over_problems_and_the_same_each_time() -> None:
    values = [1.0, 1.1, 1.3, 2.0, 2.4, 0.9]
    found = bootstrap_geomean(values)
    assert found == bootstrap_geomean(values)
    assert found.value == pytest.approx(math.prod(values) ** (1 / 6))
    assert found.low is not None
    assert found.high is not None
    assert min(values) < found.low < found.value < found.high < max(values)
    half = 1.96 * statistics.pstdev(map(math.log, values)) / math.sqrt(6)
    assert math.log(found.high / found.low) == pytest.approx(2 * half, rel=0.1)
    assert bootstrap_geomean(values[:4]).low is None


def test_the_interval_of_a_median() -> None:
    assert median_of([1.0, 2.0, 3.0, 4.0, 5.0]).low is None
    six = median_of([6.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert (six.value, six.low, six.high) == (3.5, 1.0, 6.0)
    ten = median_of([float(each) for each in range(1, 11)])
    assert (ten.low, ten.high) == (2.0, 9.0)  # as tables of the sign test have it
