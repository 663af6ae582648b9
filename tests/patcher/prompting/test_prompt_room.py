"""What a prompt carries, and what is cut when its room is short."""

from __future__ import annotations

import math

import pytest
from tried_sample import OP, SHAPES, judged

from patcher.attempts import Attempt, Diagnosis, KnownKernel, Recommendation
from patcher.bench import Evaluation, KernelCounters, Language, Outcome, load_op, load_ops
from patcher.bench.judge.evaluation import Counter
from patcher.models import Usage
from patcher.prompting.extract import blocks
from patcher.prompting.op_source import baseline_source
from patcher.prompting.rendering import Prompts
from patcher.prompting.room import CHARACTERS_PER_TOKEN, PARTS

SOURCE = f"void {OP}() {{ {SHAPES[0]} }}"
CPU = load_op(OP).sweep("cpu")


def prompts(tokens: int = 24_000, language: Language = Language.CPP, **more: object) -> Prompts:
    return Prompts(load_op(OP), language, "one device", CPU, tokens=tokens, **more)  # type: ignore[arg-type]


def attempt(iteration: int, speedup: float | None = None) -> Attempt:
    return Attempt(
        iteration=iteration,
        phase="optimisation",
        digest="0",
        outcome=Outcome.MISMATCH if speedup is None else Outcome.CORRECT,
        geomean_speedup=speedup,
        detail="values: wrong by a lot | at tokens=8",
        usage=Usage(),
        model="m",
        reply_source="recorded",
        recommendation=Recommendation(bottleneck="latency", change=f"try {iteration}"),
    )


def rich(language: Language = Language.CPP) -> Evaluation:
    """With everything that a judge on a GPU may say."""
    counter = Counter(value=87.5, unit="%", metric="sm__warps_active.avg.pct")
    kernel = KernelCounters(
        kernel="add|norm<8>",
        library=None,
        grid="(8,1,1)",
        block="(256,1,1)",
        launches=3,
        duration_us=4.25,
        values={"occupancy_pct": counter},
    )
    found = judged(2.0, sol_pct=50)
    timing = found.timings[0].model_copy(
        update={
            "candidate_cold_us": 7.75,
            "baseline_cold_us": 9.25,
            "candidate_eager_us": 11.5,
            "baseline_eager_us": 13.5,
        }
    )
    return found.model_copy(update={"timings": (timing,), "counters": (kernel,)})


def test_the_analyst_reads_all_that_was_measured() -> None:
    text = prompts().analyse(SOURCE, rich(), [attempt(0, 1.5), attempt(1)], pictures=1)
    for part in (
        "| 50 % | 7.75 | 9.25 | 11.50 | 13.50 |",
        "no kernel can score more than 4.00",
        "achieved occupancy | % | 87.5 |",
        "add/norm<8>",
        "# The baseline `eager`",
        "torch.rsqrt(variance + epsilon)",
        "values: wrong by a lot / at tokens=8",
        "The pictures show the profile",
        SOURCE,
    ):
        assert part in text
    assert "Left out" not in text


def test_columns_of_what_was_not_measured_are_left_out() -> None:
    text = prompts().analyse(SOURCE, judged(2.0), [])
    for part in ("of light", "cold", "eager us", "Hardware counters", "Tried so far", "pictures"):
        assert part not in text


def test_a_diagnosis_goes_into_the_repair() -> None:
    failed = judged(Outcome.MISMATCH)
    diagnosis = Diagnosis(critical_issue="no mask", why_it_matters="reads over", minimal_fix="mask")
    text = prompts().repair(SOURCE, failed, None, diagnosis=diagnosis)
    assert "Critical issue: no mask\nWhy it matters: reads over\nMinimal fix: mask" in text
    assert "a log of the failure" in text
    assert "a log of the failure" in prompts().diagnose(SOURCE, failed)


def test_what_works_elsewhere_is_translated() -> None:
    other = KnownKernel(
        name="cuda_row", language=Language.CUDA, summary="a row a block", source="KERNEL"
    )
    text = prompts(language=Language.TRITON, known_kernels=[other]).generate(None)
    assert "`cuda_row`, written in cuda: a row a block\n```cuda\nKERNEL\n```" in text
    assert "Translate what works" in text
    assert "Translate" not in prompts().generate(None)


def test_a_kernel_of_the_same_language_is_to_be_beaten() -> None:
    known = KnownKernel(name="cuda_row", language=Language.CUDA, source="KERNEL")
    text = prompts(language=Language.CUDA, known_kernels=[known]).generate(None)
    assert "# A kernel that works\n`cuda_row`, written in cuda\n```cuda\nKERNEL\n```" in text
    assert "faster than the kernel above: keep what makes" in text
    assert "ranslate" not in text
    other = KnownKernel(name="row", language=Language.TRITON, source="OTHER")
    both = prompts(language=Language.CUDA, known_kernels=[known, other]).generate(None)
    assert "Translate what works" in both


def test_another_design_is_asked_for_by_what_is_known() -> None:
    text = prompts().generate(None, draw=4, unlike=[(attempt(3, 1.25), f"{SOURCE} {SHAPES[1]}")])
    assert "- iteration 3: 1.250; atomics, block barrier, shared memory" in text
    assert "by a design that differs" in text
    assert "answer 5 of several" in text


def test_two_kernels_are_combined() -> None:
    text = prompts().combine([(SOURCE, judged(2.0)), ("OTHER", judged(1.5))], [], None)
    assert "# Kernel 1" in text
    assert "# Kernel 2\n```cpp\nOTHER\n```" in text
    assert "speedup is 1.500" in text


@pytest.mark.parametrize("over", [0, 10, 700, 2500, 6000, 50_000])
def test_a_prompt_keeps_to_its_room_and_says_what_was_cut(over: int) -> None:
    history = [attempt(n, 1.5) for n in range(60)]
    extra = "# Notes\n" + "a note\n" * 500
    whole = prompts().optimize(SOURCE, rich(), None, history, None, extra=extra)
    room = max(len(whole) - over, 200)
    made = prompts(math.ceil(room / CHARACTERS_PER_TOKEN))
    text = made.optimize(SOURCE, rich(), None, history, None, extra=extra)
    assert SOURCE in text
    assert "| tokens=8 hidden=256 | 5.00 | 10.00 |" in text
    assert text.count("# Your task") == 1
    assert blocks(text)[-1].closed
    assert ("Left out for want of room: " in text) is (over > 0)
    if over == 50_000:  # what is never cut takes what it takes
        for name in ("baseline", "history", "counters", "extra"):
            assert f"{PARTS[name]} (whole: " in text
    else:
        assert len(text) <= made.room
        assert "a note" in text  # goes last of these
    if over > 0:
        assert PARTS["baseline"] in text.split("Left out")[1]


def test_of_a_long_history_the_latest_stay() -> None:
    history = [attempt(n, 1.5) for n in range(200)]
    text = prompts(3500).optimize(SOURCE, judged(2.0), None, history, None)
    assert "| iteration | outcome |" in text
    assert "| 199 | correct" in text
    assert "| 0 | correct" not in text
    assert "earlier attempts (in part: " in text


def test_a_quoted_part_that_is_cut_is_closed() -> None:
    other = KnownKernel(name="long", language=Language.CUDA, source="int x = 1;\n" * 2000)
    text = prompts(5000, known_kernels=[other]).generate(None)
    assert "kernels that work elsewhere (in part: " in text
    found = blocks(text)
    assert all(block.closed for block in found)
    assert any(block.source.startswith("int x = 1;\nint x = 1;") for block in found)
    assert "# Your task" not in "".join(block.source for block in found)


@pytest.mark.parametrize("name", sorted(load_ops()))
def test_every_baseline_has_a_source(name: str) -> None:
    op = load_op(name)
    for baseline in op.baselines:
        source = baseline_source(op, baseline)
        assert source
        compile(source, baseline, "exec")
    assert baseline_source(op, "nobody's") is None


def test_a_contract_s_strides_and_what_the_reference_calls_are_said() -> None:
    op = load_op("rope_kv_update")
    text = Prompts(op, Language.TRITON, "a GPU", op.sweep("cuda", "bf16")).generate(None)
    key = next(line for line in text.splitlines() if line.startswith("- `key`"))
    slots = next(line for line in text.splitlines() if line.startswith("- `slots`"))
    assert "stride between its rows" in key
    assert "stride" not in slots
    cache = next(line for line in text.splitlines() if line.startswith("- `key_cache`"))
    assert "take the strides of the others from the tensor" in cache
    assert "others may write it meanwhile" in cache
    assert "def _computed(" in text
    assert "def control(" not in text
    assert "multiple of 1 " not in text
