"""Can these times be true? The runner's own clock against the judge's, calls alone against calls
among others, and the machine's floor.

The candidate shares its process with the clock that times it, so what that clock says is held
against what cannot be forged: when the judge had the reply, which carries a fingerprint of outputs
that exist by then. Each test compares the candidate with the trusted baseline under the same
protocol, so what the protocol itself costs cancels. Of the candidate the lower quartile counts: a
forged clock shows in every block, a busy machine in some. What the baseline's own blocks differ by
is excused, and where that is so much that a forged clock would be excused with it, they tell
nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from patcher.bench.judge.tools import library_of
from patcher.bench.stats.intervals import half_width

HIDDEN = 0.15
"""Share of the baseline's time that the two clocks may differ by."""
ALONE = 0.5
"""Share of the baseline's call by which a call alone may cost more than one among others, beyond
what it costs the baseline more."""
NOISE_US = 25.0
SPREADS = 4.0
NOISY = math.log(2)
"""The widest 95 % interval, on each side, of the logarithm of the baseline's time."""
BLIND = 0.5
"""The largest share of the baseline's time that noise may excuse: with no limit, four judges on one
core believed a clock at a fifth of its speed in most verdicts (`results/selftest`)."""
SPAN_EXCESS = 0.1
SPAN_NOISE_NS = 20_000.0
"""By how much work on the GPU may outlast the events around it."""

OWN = "its own"

Span = tuple[str, int, int]
"""Name, begin and end in nanoseconds."""


@dataclass(frozen=True)
class TimedBlock:
    """Times of one block."""

    times_us: list[float]
    """By the runner: one a call, or one for the mean of a graph's calls."""
    calls: int
    wall_us: float
    """From the judge's command to its reply."""

    @property
    def figure(self) -> float:
        return statistics.median(self.times_us)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.times_us)

    @property
    def hidden_us(self) -> float:
        """Time that the judge saw pass and the runner does not account for."""
        return self.wall_us - self.mean * self.calls


def suspicious(
    ours: Sequence[TimedBlock],
    theirs: Sequence[TimedBlock],
    ours_alone: Sequence[TimedBlock],
    theirs_alone: Sequence[TimedBlock],
    floor_us: float,
) -> str | None:
    """What cannot be true of the candidate's times, or None."""
    claimed = statistics.median(block.figure for block in ours)
    baseline = statistics.median(block.figure for block in theirs)
    if claimed < floor_us:
        return f"{claimed:.3g} us a call is below what this machine can do, {floor_us:.3g} us"
    whole, noise = _whole_us(theirs), _excused_us(theirs)
    excess = _quartile([block.hidden_us for block in ours])
    excess -= statistics.median(block.hidden_us for block in theirs)
    if excess > HIDDEN * whole + noise + NOISE_US:
        return (
            f"the judge's clock saw {excess:.3g} us a block that the reported times leave out "
            f"(the baseline's blocks take {whole:.3g} us)"
        )
    uneven = _quartile([block.mean - block.figure for block in ours])
    uneven -= statistics.median(block.mean - block.figure for block in theirs)
    if (
        uneven
        > ALONE * baseline + SPREADS * _spread([b.mean - b.figure for b in theirs]) + NOISE_US / 5
    ):
        return f"some calls take much longer than the median: {uneven:.3g} us a call on average"
    alone = [block.figure for block in ours_alone]
    others = [block.figure for block in theirs_alone]
    if alone and others:
        more = _quartile(alone) - claimed
        usual_more = max(statistics.median(others) - baseline, 0.0)
        if more > ALONE * baseline + 2 * usual_more + SPREADS * _spread(others) + NOISE_US / 5:
            return (
                f"a call by itself takes {_quartile(alone):.3g} us, one among others "
                f"{claimed:.3g} us: work is shared between calls"
            )
    return None


def unsteady(theirs: Sequence[TimedBlock]) -> str | None:
    """Whether the baseline waited for other programs, so that a ratio to it says nothing: in words,
    or None. Of the baseline alone, since a candidate must not be able to end its own trial.
    """
    half = half_width([math.log(block.figure) for block in theirs])
    if half <= NOISY:
        return None
    low, high = (pick(block.figure for block in theirs) for pick in (min, max))
    return f"blocks of the baseline, all alike, take from {low:.3g} to {high:.3g} us a call"


def blind(theirs: Sequence[TimedBlock]) -> str | None:
    """Whether the judge's clock, over blocks of the baseline, is so unsteady that a forged clock
    would hide in its noise, in words, or None. Of the baseline alone, too.
    """
    whole, noise = _whole_us(theirs), _excused_us(theirs)
    if noise <= BLIND * whole + NOISE_US:
        return None
    return (
        f"the judge's clock is unsteady by {noise:.3g} us over blocks of the baseline, all alike, "
        f"that take {whole:.3g} us"
    )


def overran(spans: Sequence[Span], events_ns: float) -> str | None:
    """What ran on any stream, by CUPTI, against the events around the same launch: what is wrong,
    or None."""
    seen = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
    if seen <= (1 + SPAN_EXCESS) * events_ns + SPAN_NOISE_NS:
        return None
    return (
        f"CUPTI saw work on the GPU for {seen / 1e3:.3g} us over all streams, the events around it "
        f"say {events_ns / 1e3:.3g} us"
    )


@dataclass(frozen=True)
class Traced:
    """Whose kernels ran, as CUPTI saw one launch."""

    said: str
    libraries: dict[str, float]
    """Percent of the time on the GPU, by library."""


def traced(spans: Sequence[Span], calls: int, where: str) -> Traced:
    """The candidate's own kernels and libraries', by GPU time."""
    busy: Counter[str] = Counter()
    for name, begin, end in spans:
        busy[library_of(name) or OWN] += end - begin
    percent = {name: 100 * ns / busy.total() for name, ns in busy.most_common()}
    parts = ", ".join(f"{name} {share:.0f} %" for name, share in percent.items())
    said = f"by CUPTI at {where}: {len(spans)} kernels and copies in {calls} calls: {parts}"
    return Traced(said, {name: share for name, share in percent.items() if name != OWN})


def _whole_us(theirs: Sequence[TimedBlock]) -> float:
    """What a block of the baseline takes."""
    return statistics.median(block.figure * block.calls for block in theirs)


def _excused_us(theirs: Sequence[TimedBlock]) -> float:
    """By how much the judge's clock may see more of a block than is usual, for its noise."""
    return SPREADS * _spread([block.hidden_us for block in theirs])


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _spread(values: Sequence[float]) -> float:
    """Median distance from the median."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
