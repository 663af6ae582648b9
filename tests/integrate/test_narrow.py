"""Where a patch of several verdicts is called: those of `linear` on an H100."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patcher import bench
from patcher.bench import Evaluation, content
from patcher.integrate.activation import call_guards
from patcher.integrate.guards import AxisBounds, CallGuards
from patcher.integrate.manifest import PatchGuards
from patcher.integrate.narrow import judged_shapes, worth_calling

CONTRACT = bench.load_op("linear").contract
RESULTS = Path(bench.__file__).resolve().parent / "results/h100-kernels"
SWEEPS = ("bf16", "qkv", "router")
O_PROJ = {"inner": 4096, "outer": 2880}
QKV = {"inner": 2880, "outer": 5120}
ROUTER = {"inner": 2880, "outer": 32}


def evaluation(sweep: str) -> Evaluation:
    path = RESULTS / f"linear-cuda_tuned.{sweep}.json.xz"
    return Evaluation.model_validate_json(content(path))


def guards(*sweeps: str) -> CallGuards:
    verdicts = [evaluation(sweep) for sweep in sweeps]
    axes = worth_calling(CONTRACT, verdicts)
    return call_guards(
        CONTRACT,
        PatchGuards(
            device="cpu",
            dtypes=tuple(CONTRACT.dtype_choices()),
            axes=axes,
            shapes=judged_shapes(CONTRACT, verdicts, axes),
            graph_safe=True,
        ),
    )


def refusal(made: CallGuards, tokens: int, inner: int, outer: int) -> str | None:
    sizes = (tokens, inner), (outer, inner), (outer,), (tokens, outer)
    return made.refusal(tuple(torch.empty(size, dtype=torch.bfloat16) for size in sizes))


@pytest.mark.parametrize(
    ("shape", "most"),
    [(O_PROJ, 32), (QKV, 16), (ROUTER, 64), ({"inner": 2880, "outer": 2880}, 16)],
)
def test_each_shape_by_its_own_verdict_and_others_by_all(shape: dict[str, int], most: int) -> None:
    made = guards(*SWEEPS)
    for tokens in (1, 16, 32, 64):
        found = refusal(made, tokens, **shape)
        assert found == (None if tokens <= most else f"tokens above {most}")


def test_what_the_op_asks_for_counts_everywhere() -> None:
    made = guards(*SWEEPS)
    most = CONTRACT.guards.axes["tokens"].maximum
    assert most is not None
    assert refusal(made, most + 1, **ROUTER) == f"tokens above {most}"


def test_a_single_verdict_needs_no_shapes() -> None:
    for sweep in SWEEPS:
        assert guards(sweep).shapes == ()


def test_a_shape_at_which_the_kernel_is_slower_everywhere_is_left_to_the_others() -> None:
    slow = evaluation("router")
    timings = tuple(
        one.model_copy(update={"speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6})
        for one in slow.timings
    )
    verdicts = [evaluation("qkv"), slow.model_copy(update={"timings": timings})]
    assert judged_shapes(CONTRACT, verdicts, worth_calling(CONTRACT, verdicts)) == ()


def test_constants_are_not_refused_for_good_by_an_axis_that_depends_on_the_shape() -> None:
    made = replace(
        guards("qkv"),
        axes={"outer": AxisBounds(maximum=100)},
        shapes=(({"inner": 2880}, "outer", AxisBounds(maximum=200)),),
    )
    weight = torch.empty(150, 2880, dtype=torch.bfloat16)
    assert made.refusal_for_good({"weight": weight}) is None
    assert refusal(made, 1, 2880, 150) is None
    assert refusal(made, 1, 2880, 201) == "outer above 200"
    assert refusal(made, 1, 64, 150) == "outer above 100"


ATTENTION = bench.load_op("decode_attention").contract


def over_a_cache(sweep: str, slower_from: int) -> Evaluation:
    """A verdict of attention on such a sweep, slower than the baseline from that many tokens on."""
    known, found = evaluation("qkv"), bench.sweep_named(ATTENTION, sweep)
    assert found is not None
    timings = tuple(
        known.timings[0].model_copy(
            update={
                "axes": point.axes,
                "speedup_high": 1.5 if point.axes["tokens"] < slower_from else 0.9,
            }
        )
        for point in found.points()
    )
    return known.model_copy(update={"op": ATTENTION.name, "sweep": sweep, "timings": timings})


def test_how_wide_a_table_is_tells_no_shapes_of_a_cache_apart() -> None:
    verdicts = [over_a_cache("bf16", 16), over_a_cache("bf16-window", 64)]
    [windowed] = judged_shapes(ATTENTION, verdicts, worth_calling(ATTENTION, verdicts))
    assert (windowed.axis, windowed.guard.maximum) == ("tokens", 32)
    assert windowed.sizes["windowed"] == 1
    assert windowed.sizes["block_size"] == 16
    assert not {"pages", "blocks", "tokens"} & windowed.sizes.keys()


@pytest.mark.parametrize("reverse", [False, True])
def test_verdicts_at_two_lengths_narrow_both(reverse: bool) -> None:
    longer = over_a_cache("bf16@blocks=16384,pages=256", 16)
    verdicts = [over_a_cache("bf16", 65), longer, over_a_cache("bf16-window", 8)]
    verdicts = verdicts[::-1] if reverse else verdicts
    axes = worth_calling(ATTENTION, verdicts)
    assert axes["tokens"].maximum == 4
    [found] = judged_shapes(ATTENTION, verdicts, axes)
    assert (found.sizes["windowed"], found.guard.maximum) == (0, 8)
