"""Plausibility checks of reported times, against the judge's clock, single calls and the floor.

The candidate shares its process with the clock that times it. Its times are therefore checked
against something it cannot forge: when the judge received the reply, which carries a fingerprint of
the outputs. Each check compares the candidate with the trusted baseline under the same protocol, so
the protocol's own cost cancels. The candidate's lower quartile counts: a forged clock shows in
every block, a busy machine only in some. The spread of the baseline's blocks is allowed as noise.
If it is so large that a forged clock could hide in it, the blocks prove nothing.
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
"""Largest difference between the two clocks, as a share of the baseline's block time."""
ALONE = 0.5
"""Largest extra cost of a single call, as a share of the baseline's call, beyond the baseline's own
extra cost."""
NOISE_US = 25.0
"""Absolute noise of the judge's clock that is always allowed, in microseconds."""
SPREADS = 4.0
"""Number of median absolute deviations of the baseline that are allowed as noise."""
NOISY = math.log(2)
"""Largest half-width of the 95 % interval of the logarithm of the baseline's time."""
BLIND = 0.5
"""Largest share of the baseline's time that is allowed as noise. Without a limit, four judges on
one core accepted a clock at a fifth of its speed in most verdicts (`results/selftest`)."""
SPAN_EXCESS = 0.1
"""Share of the events' time by which the work on the GPU may exceed it."""
SPAN_NOISE_NS = 20_000.0
"""Absolute excess that is always allowed, in nanoseconds."""

CPU_EXCESS = 0.05
"""Share by which the CPU time of a pinned process may exceed that of its CPUs."""
CPU_NOISE_S = 0.001
"""Excess that is always allowed, in seconds over all blocks of a point."""

OWN = "its own"

Span = tuple[str, int, int]
"""Name of a kernel or copy, and its begin and end in nanoseconds."""


@dataclass(frozen=True)
class CpuUse:
    """What the threads of a process used of its CPUs."""

    used_s: float
    """CPU time in seconds, over all threads and by the kernel's count."""
    span_s: float
    """Seconds in which they used it, by the judge's clock."""


@dataclass(frozen=True)
class TimedBlock:
    """Times of one block."""

    times_us: list[float]
    """Times by the runner in microseconds: one per call, or the mean over a graph's calls."""
    calls: int
    """Number of calls."""
    wall_us: float
    """Microseconds between the judge's command and the reply."""
    cpu: CpuUse | None = None
    """CPU time of all threads meanwhile; None: unknown."""

    @property
    def figure(self) -> float:
        """Median time of a call in microseconds."""
        return statistics.median(self.times_us)

    @property
    def mean(self) -> float:
        """Mean time of a call in microseconds."""
        return statistics.fmean(self.times_us)

    @property
    def hidden_us(self) -> float:
        """Microseconds by the judge's clock that the reported times do not account for."""
        return self.wall_us - self.mean * self.calls


def suspicious(
    ours: Sequence[TimedBlock],
    theirs: Sequence[TimedBlock],
    ours_alone: Sequence[TimedBlock],
    theirs_alone: Sequence[TimedBlock],
    floor_us: float,
) -> str | None:
    """Check the plausibility of the candidate's times.

    Args:
        ours: blocks of the candidate.
        theirs: blocks of the baseline.
        ours_alone: the candidate's blocks of a single call.
        theirs_alone: the baseline's blocks of a single call.
        floor_us: shortest possible time of a call, in microseconds.

    Returns:
        What is implausible, or None.
    """
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


def overworked(ours: Sequence[TimedBlock], cpus: int) -> str | None:
    """Compare the CPU time of the candidate's threads with what its CPUs have.

    A thread that moves to another CPU for the calls, and back before anyone looks, shows here.

    Args:
        ours: blocks of the candidate.
        cpus: number of CPUs that it is pinned to.

    Returns:
        The problem, or None.
    """
    uses = [block.cpu for block in ours if block.cpu is not None]
    used, span = sum(use.used_s for use in uses), sum(use.span_s for use in uses)
    if used <= (1 + CPU_EXCESS) * cpus * span + CPU_NOISE_S:
        return None
    return (
        f"its threads took {1e3 * used:.3g} ms of CPU time in {1e3 * span:.3g} ms, on {cpus} "
        f"CPU{'s' if cpus > 1 else ''}"
    )


def unsteady(theirs: Sequence[TimedBlock]) -> str | None:
    """Check whether other programs disturbed the baseline so much that a ratio means nothing.

    Only the baseline counts, so that a candidate cannot end its own trial.

    Returns:
        The problem, or None.
    """
    half = half_width([math.log(block.figure) for block in theirs])
    if half <= NOISY:
        return None
    low, high = (pick(block.figure for block in theirs) for pick in (min, max))
    return f"blocks of the baseline, all alike, take from {low:.3g} to {high:.3g} us a call"


def blind(theirs: Sequence[TimedBlock]) -> str | None:
    """Check whether the judge's clock is so noisy that a forged clock could hide in the noise.

    Only the baseline counts here, too.

    Returns:
        The problem, or None.
    """
    whole, noise = _whole_us(theirs), _excused_us(theirs)
    if noise <= BLIND * whole + NOISE_US:
        return None
    return (
        f"the judge's clock is unsteady by {noise:.3g} us over blocks of the baseline, all alike, "
        f"that take {whole:.3g} us"
    )


def overran(spans: Sequence[Span], events_ns: float) -> str | None:
    """Compare CUPTI's spans on all streams with the time between the events around the launch.

    Returns:
        The problem, or None.
    """
    seen = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
    if seen <= (1 + SPAN_EXCESS) * events_ns + SPAN_NOISE_NS:
        return None
    return (
        f"CUPTI saw work on the GPU for {seen / 1e3:.3g} us over all streams, the events around it "
        f"say {events_ns / 1e3:.3g} us"
    )


@dataclass(frozen=True)
class Traced:
    """Libraries whose kernels ran in one launch, according to CUPTI."""

    said: str
    """Summary as one line of text."""
    libraries: dict[str, float]
    """Percent of GPU time by library."""


def traced(spans: Sequence[Span], calls: int, where: str) -> Traced:
    """Divide the GPU time between the candidate's own kernels and those of libraries."""
    busy: Counter[str] = Counter()
    for name, begin, end in spans:
        busy[library_of(name) or OWN] += end - begin
    percent = {name: 100 * ns / busy.total() for name, ns in busy.most_common()}
    parts = ", ".join(f"{name} {share:.0f} %" for name, share in percent.items())
    said = f"by CUPTI at {where}: {len(spans)} kernels and copies in {calls} calls: {parts}"
    return Traced(said, {name: share for name, share in percent.items() if name != OWN})


def _whole_us(theirs: Sequence[TimedBlock]) -> float:
    """Median time of a block of the baseline, in microseconds."""
    return statistics.median(block.figure * block.calls for block in theirs)


def _excused_us(theirs: Sequence[TimedBlock]) -> float:
    """Noise of the judge's clock over a block that is allowed, in microseconds."""
    return SPREADS * _spread([block.hidden_us for block in theirs])


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _spread(values: Sequence[float]) -> float:
    """Median absolute deviation."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
