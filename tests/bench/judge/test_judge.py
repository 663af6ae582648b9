"""The judge on real candidates, each built and run in processes of its own."""

from __future__ import annotations

import itertools
import lzma
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import patcher.bench.judge.timing
from patcher import bench
from patcher.bench import BaselineTime, Candidate, Evaluation, Language, MissingError, Outcome
from patcher.bench.judge import JudgeSettings, evaluate, open_judge, process
from patcher.bench.judge.accuracy import explain_mismatch
from patcher.bench.judge.baseline_errors import repeats, rmse_factor
from patcher.bench.judge.blob import FILL, RED_ZONE, Wanted, layout, read_set, strayed, write_set
from patcher.bench.judge.clockcheck import FEWEST_PAIRS
from patcher.bench.ops.contract import Point

OP = bench.load_op("fused_add_rms_norm")
SOLUTIONS = {info.name: candidate for info, candidate in OP.solutions()}
GOOD = SOLUTIONS["cpu_simd"].source
ENTRY = "const DLDataType dtype = input.dtype();"
SETTINGS = JudgeSettings(baseline="eager", pairs=4, timeout_s=10, threads=1)


Judged = Callable[..., Evaluation]


@pytest.fixture(scope="module")
def judged() -> Iterator[Judged]:
    """One judge for all: what it trusts is started once, as in a run of the agent loop."""
    with open_judge(SETTINGS) as judge:

        def judged(source: str, language: Language = Language.CPP) -> Evaluation:
            candidate = Candidate(op=OP.name, language=language, source=source)
            return judge.evaluate(candidate, lambda *_: None)

        yield judged


def altered(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_a_right_candidate_is_timed_against_a_named_baseline(judged: Judged) -> None:
    evaluation = judged(GOOD)
    assert {"check", "time"} < set(evaluation.phases_s)
    assert sum(evaluation.phases_s.values()) == pytest.approx(evaluation.total_s, abs=0.5)
    assert evaluation.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)
    assert evaluation.baseline == "eager"
    assert [timing.axes["tokens"] for timing in evaluation.timings] == [1, 4, 8, 16, 32, 64, 128]
    names = {check.name for check in evaluation.checks}
    assert names == {
        *("build", "control", "runs", "guards", "values"),
        *("timed outputs", "values after", "determinism", "clocks"),
    }
    for timing in evaluation.timings:
        assert timing.speedup_low <= timing.speedup <= timing.speedup_high
        assert 2 <= timing.pairs <= SETTINGS.pairs
    assert Evaluation.model_validate_json(evaluation.model_dump_json()) == evaluation


@pytest.mark.parametrize(
    ("change", "outcome", "check", "detail"),
    [
        # a wrong epsilon: half a part in 10^5 on these inputs
        (("float(hidden) + epsilon", "float(hidden) + 1e-6f"), "mismatch", "values", "rmse"),
        # the cases come in an order of the moment, and a NaN in the weight may be the first
        (("* load(weight + i)", ""), "mismatch", "values", "rmse|error|exactly|non-finite"),
        # the second output is forgotten
        (("store(r + i, sum);", ""), "mismatch", "values", "residual"),
        # right at the shapes that are timed, wrong at others
        (
            ("const float scale =", "if (hidden != 256) squares *= 1.1f; const float scale ="),
            "mismatch",
            "values",
            "rmse",
        ),
        (
            ("const float scale =", "x[hidden] = T{}; const float scale ="),
            "guard_violation",
            "guards",
            "wrote outside of input",
        ),
        (
            ("const float scale =", "const_cast<W*>(weight)[0] = W{}; const float scale ="),
            "guard_violation",
            "guards",
            "changed weight",
        ),
        ((ENTRY, "*(volatile int*)nullptr = 1; " + ENTRY), "runtime_error", "runs", "SIGSEGV"),
        ((ENTRY, "std::_Exit(0); " + ENTRY), "runtime_error", "runs", "exited with code 0"),
        (
            (ENTRY, 'throw std::runtime_error("no thanks"); ' + ENTRY),
            "runtime_error",
            "runs",
            "no thanks",
        ),
        ((ENTRY, "DLDatTyp dtype = input.dtype();"), "compilation_failure", "build", "failed"),
    ],
    ids=[
        "epsilon",
        "weight",
        "residual",
        "shape-gated",
        "stray-write",
        "weight-write",
        "crash",
        "exit",
        "throw",
        "compile",
    ],
)
def test_a_bad_candidate_has_the_right_outcome(
    judged: Judged, change: tuple[str, str], outcome: str, check: str, detail: str
) -> None:
    evaluation = judged("#include <cstdlib>\n" + altered(*change))
    assert evaluation.outcome == outcome
    [failed] = evaluation.failed_checks
    assert failed.name == check
    assert re.search(detail, failed.detail)
    assert evaluation.geomean_speedup is None


def test_a_machine_too_busy_to_time_is_said_where_a_ratio_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = "blocks of the baseline, all alike, take from 1 to 9 us a call"
    monkeypatch.setattr(patcher.bench.judge.timing, "unsteady", lambda _: busy)
    monkeypatch.setattr(patcher.bench.judge.timing, "PAUSE_S", {"cpu": 0.0})
    candidate = Candidate(op=OP.name, language=Language.CPP, source=GOOD)
    quick = replace(SETTINGS, points=1, calls=40, lives_s=0.0)
    found = evaluate(candidate, replace(quick, pairs=FEWEST_PAIRS - 1))
    assert found.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)
    with pytest.raises(MissingError, match=f"too busy to time .*: {busy}"):
        evaluate(candidate, replace(quick, pairs=FEWEST_PAIRS))


@pytest.mark.parametrize("believed", ["never", "sometimes", "mostly"])
def test_most_measurements_of_a_point_decide(
    believed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "0.1 us a call is below what this machine can do"
    said = {
        "never": itertools.repeat(problem),
        "sometimes": itertools.cycle([problem, None]),
        "mostly": itertools.chain([problem], itertools.repeat(None)),
    }[believed]
    measured: list[str | None] = []

    def measure(*_: object) -> str | None:
        measured.append(next(said))
        return measured[-1]

    monkeypatch.setattr(patcher.bench.judge.timing, "below_floor", measure)
    monkeypatch.setattr(patcher.bench.judge.timing, "drowned", lambda *_: None)
    candidate = Candidate(op=OP.name, language=Language.CPP, source=GOOD)
    found = evaluate(candidate, replace(SETTINGS, points=1, calls=40, lives_s=0.0, pairs=4))
    if believed == "mostly":
        assert found.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)
        assert len(measured) == 3
    else:
        assert found.outcome is Outcome.GUARD_VIOLATION
        assert [check.name for check in found.failed_checks] == ["clocks"]
        assert len(measured) == (3 if believed == "never" else 5)


def test_times_below_the_floor_within_the_noise_are_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing = patcher.bench.judge.timing
    monkeypatch.setattr(timing, "PAUSE_S", {"cpu": 0.0})
    monkeypatch.setattr(timing, "below_floor", lambda *_: "0.001 us a call")
    monkeypatch.setattr(timing, "drowned", lambda *_: "empty commands differ")
    candidate = Candidate(op=OP.name, language=Language.CPP, source=GOOD)
    few = replace(SETTINGS, points=1, calls=40, lives_s=0.0, pairs=FEWEST_PAIRS)
    with pytest.raises(bench.BusyError, match=r"too busy to time .*: empty commands differ"):
        evaluate(candidate, few)


def test_a_hanging_candidate_is_killed() -> None:
    source = altered(ENTRY, "volatile int go = 1; while (go) {} " + ENTRY)
    candidate = Candidate(op=OP.name, language=Language.CPP, source=source)
    evaluation = evaluate(candidate, JudgeSettings(timeout_s=2, threads=1))
    assert evaluation.outcome is Outcome.RUNTIME_ERROR
    assert "hangs (killed)" in evaluation.failed_checks[0].detail


def test_compiler_messages_name_no_folder_of_this_machine(judged: Judged) -> None:
    evaluation = judged(altered(ENTRY, "int x = nowhere;" + ENTRY))
    assert "nowhere" in evaluation.log
    assert "/tmp" not in evaluation.log
    assert "fused_add_rms_norm.cpp:" in evaluation.log


def test_a_candidate_sees_no_key(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-honeytoken-1")
    source = """
import os
def fused_add_rms_norm(input, residual, weight, epsilon):
    raise RuntimeError(f"{sorted(os.environ)} {os.environ.get('HOME')}")
"""
    evaluation = judged(source, Language.TORCH)
    assert evaluation.outcome is Outcome.RUNTIME_ERROR
    assert "PATH" in evaluation.log
    assert "ANTHROPIC" not in evaluation.model_dump_json()
    assert "honeytoken" not in evaluation.model_dump_json()


def test_a_torch_candidate_runs_on_the_cpu(judged: Judged) -> None:
    source = """
import torch
def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    hidden = residual.float()
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(weight * (hidden * scale))
"""
    assert judged(source, Language.TORCH).outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)


def test_a_reply_written_to_the_channel_by_the_candidate_is_no_verdict(judged: Judged) -> None:
    source = """
import os
def fused_add_rms_norm(input, residual, weight, epsilon):
    for fd in range(3, 64):
        try:
            os.write(fd, b"forged\\n")
        except OSError:
            continue
"""
    evaluation = judged(source, Language.TORCH)
    assert evaluation.outcome is Outcome.GUARD_VIOLATION
    assert evaluation.failed_checks[0].name == "channel"
    assert "not JSON" in evaluation.failed_checks[0].detail


def test_a_source_without_the_entry_is_a_generation_failure(judged: Judged) -> None:
    evaluation = judged("int main() { return 0; }")
    assert evaluation.outcome is Outcome.GENERATION_FAILURE


@pytest.mark.slow
def test_a_torch_style_signature_is_bound_too(judged: Judged) -> None:
    source = """
#include <torch/extension.h>
void fused_add_rms_norm(torch::Tensor input, torch::Tensor residual, torch::Tensor weight,
                        double epsilon) {
  residual.add_(input);
  auto hidden = residual.to(torch::kFloat32);
  auto scale = torch::rsqrt(hidden.pow(2).mean(-1, true) + epsilon);
  input.copy_(weight * (hidden * scale));
}
"""
    assert judged(source).outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)


def test_gpu_languages_without_a_gpu_say_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(bench.MissingError) as caught:
        evaluate(SOLUTIONS["triton_row"], SETTINGS)
    assert "CUDA device" in caught.value.message


@pytest.mark.parametrize("name", ["cuda_row", "triton_row"])
def test_gpu_solutions_are_right_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert evaluate(SOLUTIONS[name], JudgeSettings(pairs=4)).outcome is Outcome.CORRECT


def test_unknown_baseline_names_what_there_is() -> None:
    with pytest.raises(bench.UsageError, match="no baseline 'fastest'"):
        evaluate(SOLUTIONS["cpu_simd"], JudgeSettings(baseline="fastest"))


def test_who_left_no_memory_of_a_gpu_is_told_apart(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    sizes = iter([(1, 16), (10, 16), (1, 16), (4, 16)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(sizes))
    monkeypatch.setattr(patcher.bench.judge.judge, "CANARY_PAUSE_S", 0)
    monkeypatch.setattr(patcher.bench.judge.trial.Trial, "correct", full)
    assert "held 56% of the GPU" in judged(GOOD).failed_checks[0].detail
    with pytest.raises(MissingError, match="only 25% of the GPU"):
        judged(GOOD)


def test_red_zones_and_gaps_between_rows_tell() -> None:
    padded = Wanted(name="a", dtype="float32", shape=(3, 5), strides=(13, 1))
    shifted = Wanted(name="b", dtype="bfloat16", shape=(7,), shift=1)
    plan = layout([padded, shifted])
    block = torch.zeros(plan.set_bytes, dtype=torch.uint8)
    values = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16()}
    write_set(plan, block, values)
    back = read_set(plan, block, values)
    assert all(torch.equal(values[name], back[name]) for name in values)
    assert strayed(plan, block[None]) == []
    for slot, at in ((plan.slots[1], 14), (plan.slots[1], -1), (plan.slots[0], 5 * 4)):
        touched = block.clone()
        touched[slot.begin + at] = FILL - 1
        assert strayed(plan, touched[None]) == [slot.name]
    assert plan.slots[0].offset + RED_ZONE == plan.slots[0].begin


def test_what_is_only_written_comes_as_poison() -> None:
    plan = layout([Wanted(name="out", dtype="float16", shape=(4,))])
    block = torch.zeros(plan.set_bytes, dtype=torch.uint8)
    write_set(plan, block, {})
    assert read_set(plan, block, ["out"])["out"].isnan().all()


def test_non_finite_values_are_never_right() -> None:
    reference = torch.ones(100, dtype=torch.float64)
    honest = reference.float()
    for value in (float("nan"), float("inf")):
        broken = honest.clone()
        broken[7] = value
        assert explain_mismatch(broken, honest, reference, 100) is not None


def test_the_sampling_margin_shrinks_with_elements() -> None:
    assert rmse_factor(64) > rmse_factor(2880) > rmse_factor(10**6) > 1.05


@pytest.mark.parametrize("seed", range(8))
def test_errors_that_repeat_are_held_to_how_few_they_are(seed: int) -> None:
    """Weights of ones give each row one sum, here near 4096, where float32's spacing changes. What
    a group norm makes of it is the roundings of the bias, alike in all rows, and of each mean."""
    rng = torch.Generator().manual_seed(seed)
    sums = 4096 + 26 * torch.randn(256, 1, generator=rng, dtype=torch.float64)
    bias = ((torch.rand(1024, generator=rng, dtype=torch.float64) - 0.5) / 50).float()

    def normed(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        off = x - mean
        return off * torch.rsqrt(off.square().mean(-1, keepdim=True) + 1e-5)

    def groups(x: torch.Tensor) -> torch.Tensor:
        return x.view(256, 64, 16)

    exact = groups(sums + bias.double())
    reference = normed(exact, exact.mean(-1, keepdim=True)).view(256, 1024)
    stored = sums.float() + bias
    honest = torch.nn.functional.group_norm(stored, 64)
    x = groups(stored)
    pairs = x
    while pairs.shape[-1] > 1:
        pairs = pairs[..., ::2] + pairs[..., 1::2]
    for mean in (pairs / 16, (x / 16).sum(-1, keepdim=True), x.mean(-1, keepdim=True)):
        right = normed(x, mean).view(256, 1024)
        assert explain_mismatch(right, honest, reference, 8192) is None
    coarse = groups((sums.float() + bias).half().float())
    wrong = normed(coarse, coarse.mean(-1, keepdim=True)).view(256, 1024)
    assert explain_mismatch(wrong, honest, reference, 8192) is not None


def test_independent_errors_repeat_nowhere() -> None:
    rng = torch.Generator().manual_seed(0)
    for shape in ((64, 64), (1000,), (8, 2880), (3, 128, 512)):
        for _ in range(50):
            assert repeats(torch.randn(shape, generator=rng, dtype=torch.float64)) == 1.0
    rows = torch.randn(1, 1024, generator=rng, dtype=torch.float64).expand(512, 1024)
    assert repeats(rows) == pytest.approx(512)
    assert repeats(torch.zeros(8, 8, dtype=torch.float64)) == 1.0


def test_one_rounding_that_falls_the_other_way_is_no_mismatch() -> None:
    """320 float16 values; a sum in another order leaves one of them on the other side of a tie."""
    exact = torch.linspace(1.0, 2.0, 320, dtype=torch.float64) + 2.0**-12
    honest = exact.to(torch.float16)
    value = honest.clone()
    value[200] += torch.finfo(torch.float16).eps
    assert explain_mismatch(value, honest, exact, reduction=64) is None
    value[200] += 2 * torch.finfo(torch.float16).eps
    problem = explain_mismatch(value, honest, exact, reduction=64)
    assert problem is not None
    assert "99.9th percentile" in problem or "largest" in problem or "rmse" in problem


def test_what_compiles_keeps_its_products_apart_or_shares_them(tmp_path: Path) -> None:
    """A baseline is compiled once on a machine; a candidate finds what it compiled itself."""
    tools = ("TRITON", "TORCHINDUCTOR", "TVM_FFI")
    own, shared = (process.caches(tmp_path / "run", trusted) for trusted in (False, True))
    for name in (f"{tool}_CACHE_DIR" for tool in tools):
        assert Path(own[name]).is_relative_to(tmp_path / "run")
        assert not Path(shared[name]).is_relative_to(tmp_path / "run")
    assert own["HOME"] == shared["HOME"] == str(tmp_path / "run")


def test_baselines_of_before_are_read_from_text() -> None:
    """Old evaluations hold a time or a reason as one string; what is written now reads the same."""
    said = {"eager": "21.4 us", "flashinfer": "not here: no GPU", "odd": "failed: x us"}
    found = Evaluation.model_validate(
        {"op": "op", "language": "cpp", "digest": "0", "outcome": "mismatch", "baselines": said}
    )
    assert found.baselines["eager"].time_us == 21.4
    assert found.missing_baselines == ("flashinfer", "odd")
    assert {name: str(one) for name, one in found.baselines.items()} == said
    assert Evaluation.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ValueError, match="a time, or a reason"):
        BaselineTime()


def test_every_evaluation_of_the_results_is_still_read() -> None:
    files = sorted((Path(__file__).parents[3] / "bench/results/kernels").glob("*_tuned*.json.xz"))
    assert files
    for file in files:
        found = Evaluation.model_validate_json(lzma.decompress(file.read_bytes()))
        assert found.baseline is None or found.baselines[found.baseline].time_us is not None


def test_a_sum_in_a_row_is_right_where_large_terms_cancel() -> None:
    """Few elements of short sums; PyTorch's own sum errs by less, lower precisions by far more."""
    op = bench.load_op("linear")
    axes = {"tokens": 2, "inner": 24, "outer": 8, "biased": 0}
    point = Point(axes=axes, dtypes={"T": "float32"})
    wrong = {"coarse": 0, "in a row": 0}
    for seed in range(100):
        values = op.inputs.make(point, torch.Generator().manual_seed(seed), "cancellation")
        x, weight = values["x"], values["weight"]
        exact = x.double() @ weight.double().T
        row = torch.zeros(2, 8)
        for k in range(24):
            row = row + x[:, k : k + 1] * weight[:, k]
        coarse = x.bfloat16().float() @ weight.T
        for name, value in (("in a row", row), ("coarse", coarse)):
            wrong[name] += explain_mismatch(value, x @ weight.T, exact, 24) is not None
    assert wrong == {"coarse": 100, "in a row": 0}


def test_sums_in_tf32_are_held_to_the_error_of_sums_in_tf32() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 256, generator=generator) for n in (8, 64))
    exact = x.double() @ weight.double().T

    def cut(bits: int) -> torch.Tensor:
        """The product with so many bits of each operand's fraction."""
        left, right = ((t.view(torch.int32) >> (23 - bits) << (23 - bits)) for t in (x, weight))
        return left.view(torch.float32) @ right.view(torch.float32).T

    tf32 = cut(10)
    assert explain_mismatch(tf32, tf32, exact, 256) is None
    assert explain_mismatch(cut(8), tf32, exact, 256) is not None
