"""Ways to serve, compared over HTTP: the verdict on planted gains."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import ValidationError
from served_sample import (
    POINTS,
    WORKLOAD,
)

from patcher.ab.served_records import (
    ServedHeader,
    ServedProcess,
    ServedSide,
)
from patcher.ab.served_verdict import judge_served
from patcher.bench.ab.served import (
    ServedPoint,
    ServedRun,
    arm_orders,
)
from patcher.bench.stats.comparison import Arm
from patcher.integrate import Receipt

ID, DIGEST = "double.norm", "0" * 64


def run_at(point: ServedPoint, rate: float, stalled: bool = False) -> ServedRun:
    figures = {"p50": 1e3 / rate, "p95": 1e3 / rate, "p99": 1e3 / rate}
    return ServedRun(
        point=point, requests=8, duration_s=1, input_tokens=8, output_tokens=8,
        output_tokens_per_s=rate, total_tokens_per_s=2 * rate, goodput_per_s=1, ttft_ms=figures,
        tpot_ms=figures, itl_ms=figures, longest_gap_ms=1, stalled=stalled,
    )  # fmt: skip


def judged(
    gains_pct: Sequence[float],
    pairs: int = 3,
    noise_pct: float | Sequence[float] = 0.5,
    stalled: bool = False,
    arguments: Mapping[str, Any] | None = None,
    flags_no_faster: bool = True,
    ran: Mapping[Arm, bool] | None = None,
    receipts: Sequence[Receipt] | None = None,
    patches: Mapping[str, str] | None = None,
    seed: int = 1,
) -> Any:
    """The verdict on planted gains by point, with normal noise of each process at each point, of
    one size or of one for each point."""
    noises = [noise_pct] * len(gains_pct) if isinstance(noise_pct, float | int) else noise_pct
    points = tuple(ServedPoint(trace="fixed", concurrency=2**k) for k in range(len(gains_pct)))
    rng, processes = random.Random(seed), []
    where = {"baseline": False, "patched": True} if ran is None else ran
    for pair, arm in arm_orders(pairs):
        runs = tuple(
            run_at(
                point,
                100
                * math.exp(rng.gauss(0, noise / 100))
                * (1 + (gain / 100 if arm == "patched" else 0)),
                stalled and pair == 0,
            )
            for point, gain, noise in zip(points, gains_pct, noises, strict=True)
        )
        calls = {"kernel": 5} if where[arm] else {}
        own = [Receipt(patch_id=ID, digest=DIGEST, pid=1, calls=calls)]
        if receipts is not None:
            own = list(receipts) if arm == "patched" else []
        processes.append(
            ServedProcess(
                pair=pair,
                arm=arm,
                start_s=1,
                took_s=1,
                warm_ups={},
                runs=runs,
                stalled=(),
                receipts=tuple(own),
            )
        )
    stock = ServedSide(name="stock", version="1", arguments={}, patches={})
    patched = stock.model_copy(
        update={
            "name": "patched",
            "patches": dict(patches or {ID: DIGEST}),
            "arguments": dict(arguments or {}),
        }
    )
    header = ServedHeader(
        fingerprint="f", workload=WORKLOAD, client="double", traces={}, points=points,
        sides=(stock, patched), serve=(), bench=(),
    )  # fmt: skip
    return judge_served(header, processes, 0.5, flags_no_faster)


@pytest.mark.parametrize(
    ("gains", "more", "verdict", "said"),
    [
        ((20, 15, 5, 1), {}, "accept", "above the margin"),
        ((20, 15, 5, 1), {"pairs": 2}, "accept", "over 2 process pairs"),
        ((20, 15, 5, -6), {}, "reject", "8 at a time loses beyond its noise: -6"),
        ((20, 15, 5, -0.3), {}, "accept", "no point loses beyond its noise"),
        ((0.1, 0, -0.1, 0), {"noise_pct": 0.05}, "reject", "below the margin of 0.5 %"),
        ((1, 1, 1, 1), {"noise_pct": 3}, "inconclusive", "holds the margin"),
        ((20,), {"pairs": 1}, "inconclusive", "one process pair does not show"),
        ((20, 15), {"stalled": True}, "inconclusive", "4 runs stalled"),
        ((20, -50), {"stalled": True}, "inconclusive", "4 runs stalled"),
        ((20, 15), {"arguments": {"x": 1}, "flags_no_faster": False}, "inconclusive", "differ"),
        ((20, 15), {"arguments": {"x": 1}}, "accept", "above the margin"),
        ((20,), {"ran": {"baseline": False, "patched": False}}, "reject", "never ran"),
        ((20,), {"ran": {"baseline": True, "patched": True}}, "reject", "ran while stock"),
    ],
)
def test_planted_gains_and_losses_are_judged(
    gains: Sequence[float], more: dict[str, Any], verdict: str, said: str
) -> None:
    found = judged(gains, **more)
    assert (found.verdict, said in " ".join(found.reasons)) == (verdict, True), found.reasons


def test_what_falls_back_under_an_option_is_told_and_what_does_nothing_is_rejected() -> None:
    other = "double.cache"

    def found(norm: dict[str, Any], cache: dict[str, Any]) -> Any:
        whole = [
            Receipt(patch_id=name, digest=DIGEST, pid=1, **more)
            for name, more in ((ID, norm), (other, cache))
        ]
        return judged((20, 15), receipts=whole, patches={ID: DIGEST, other: DIGEST})

    ran, fp8 = {"calls": {"kernel": 5}}, {"fallbacks": {"dtype: float8": 7, "rank": 1}}
    told = found(ran, fp8)
    assert told.verdict == "accept"
    said = told.reasons[-1]
    assert said.endswith(f"24 calls fell back; {other} had no effect: dtype: float8")
    refused = found(ran, {"layers_taken": 0, "layers_refused": {"the cache is of float8": 24}})
    assert refused.reasons[-1].endswith(f"{other} had no effect: the cache is of float8")
    for norm, cache, why in (
        (fp8, fp8, f"{ID} had no effect while patched was measured: dtype: float8"),
        (ran, {}, f"{other} never ran while patched was measured"),
        ({"failure": "no compiler"}, fp8, f"{ID} had no effect .*: no compiler"),
    ):
        wrong = found(norm, cache)
        assert wrong.verdict == "reject"
        assert re.search(why, " ".join(wrong.reasons))


def test_another_bundle_of_the_same_name_is_not_the_patch_that_was_compared() -> None:
    ran = Receipt(patch_id=ID, digest="1" * 64, pid=1, calls={"kernel": 5})
    found = judged((20, 15), receipts=[ran])
    assert found.verdict == "reject"
    assert f"another bundle named {ID} ran while patched was measured" in found.reasons
    idle = Receipt(patch_id=ID, digest="1" * 64, pid=2)
    right = Receipt(patch_id=ID, digest=DIGEST, pid=1, calls={"kernel": 5})
    assert judged((20, 15), receipts=[right, idle]).verdict == "accept"


def test_intervals_cover_what_was_planted_and_the_noise_is_found() -> None:
    found = judged((20, 10, 5, 2, 1, 0), pairs=40, noise_pct=1.0)
    assert found.noise_pct == pytest.approx(math.sqrt(2), rel=0.15)  # of a ratio of two processes
    every = [judged((8, 0), pairs=3, noise_pct=1.0, seed=seed) for seed in range(200)]
    mean = 100 * (math.sqrt(1.08) - 1)
    assert 184 <= sum(one.gain_low_pct < mean < one.gain_high_pct for one in every) <= 196
    covered = sum(one.points[1].gain_low_pct < 0 < one.points[1].gain_high_pct for one in every)
    assert 184 <= covered <= 196
    single = judged((20,), pairs=1)
    assert (single.noise_pct, single.points[0].loses) == (None, False)
    json.loads(single.model_dump_json())  # its interval is finite
    assert single.points[0].said.endswith("%, no interval")


def test_a_quiet_point_is_not_judged_by_the_scatter_of_a_noisy_one() -> None:
    found = judged((40, 40), pairs=4, noise_pct=(0.5, 8.0))
    quiet, noisy = (one.gain_high_pct - one.gain_low_pct for one in found.points)
    assert quiet < 6 < 12 < noisy
    for noise in ((0.5, 8.0), (8.0, 0.5)):
        every = [judged((0, 0), pairs=4, noise_pct=noise, seed=seed) for seed in range(200)]
        for at in (0, 1):
            covered = sum(
                one.points[at].gain_low_pct < 0 < one.points[at].gain_high_pct for one in every
            )
            assert 184 <= covered <= 196
    two = judged((40, 40), pairs=2, noise_pct=(0.5, 8.0)).points
    widths = [math.log1p(one.gain_high_pct / 100) - math.log1p(one.gain_pct / 100) for one in two]
    assert widths[0] == pytest.approx(widths[1])  # one spread for both


@pytest.mark.parametrize(
    "update",
    [
        {"output_tokens_per_s": 0},
        {"output_tokens_per_s": -3},
        {"output_tokens_per_s": None},
        {"tpot_ms": {"p50": 1}},
        {"tpot_ms": {"p50": 0, "p95": 0, "p99": 0}},
        {"duration_s": "inf"},
        {"point": {"trace": "fixed", "concurrency": 1, "rate": 2}, "tpot_ms": {}},
    ],
)
def test_a_file_with_figures_that_cannot_be_is_no_result(update: dict[str, Any]) -> None:
    fields = run_at(POINTS[0], 8).model_dump()
    with pytest.raises(ValidationError):
        ServedRun.model_validate_json(json.dumps(fields | update))
