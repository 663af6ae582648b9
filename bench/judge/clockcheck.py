"""Blocks of timed calls: what a measurement says, and whether its times are plausible.

They are held against calls by themselves, the machine's floor and the judge's clock.

On a CPU the times are the judge's own, and on CUDA those of calls that were carried into a process
of the judge's. Otherwise the candidate shares its process with the events that time it. Its times
are then checked against something it cannot forge: when the judge received the reply, which carries
a fingerprint of the outputs. Each check compares the candidate with the trusted baseline under the
same protocol, so the protocol's own cost cancels. The candidate's lower quartile counts: a forged
clock shows in every block, a busy machine only in some. The spread of the baseline's blocks is
allowed as noise, and so is what a host may take longer for one process than for another.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from patcher.bench.judge.tools import library_of
from patcher.bench.machine.clocks import TOLERANCE
from patcher.bench.stats.hodges_lehmann import Interval, hodges_lehmann

HIDDEN = 0.15
"""Largest difference between the two clocks, as a share of the baseline's block time."""
ALONE = 0.5
"""Largest extra cost of a single call, as a share of the baseline's call, beyond the baseline's own
extra cost."""
COLDER = 0.25
"""CPU: share of what the baseline's call loses to cold caches by which the candidate's may lose
more, as where other programs run between the calls."""
NOISE_US = 25.0
"""Absolute noise of a clock that is always allowed, in microseconds."""
HOST_US = 100.0
"""CUDA: what the host may take longer for a block of one process than for one of another, in
microseconds; 38 to 77 were seen of honest kernels, 130 once, on a host with four GPUs at work."""
SPREADS = 4.0
"""Number of median absolute deviations of the baseline that are allowed as noise."""
SPAN_EXCESS = 0.1
"""Share of the events' time by which the work on the GPU may exceed it."""
SPAN_NOISE_NS = 20_000.0
"""Absolute excess that is always allowed, in nanoseconds."""

FEWEST_PAIRS = 6
"""With fewer pairs, Student's quantile makes any machine look busy."""
OWN = "its own"

Span = tuple[str, int, int]
"""Name of a kernel or copy, and its begin and end in nanoseconds."""


@dataclass(frozen=True)
class TimedBlock:
    """Times of one block."""

    times_us: list[float]
    """Times in microseconds: one per call, or the mean over the block's calls."""
    calls: int
    """Number of calls."""
    wall_us: float
    """Microseconds between the judge's command and the reply."""
    waited_us: float = 0.0
    """Of the baseline on several CPUs: microseconds in which a thread that worked was ready to run,
    and something else ran."""

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


def below_floor(ours: Sequence[TimedBlock], floor_us: float) -> str | None:
    """Check that the candidate's calls are no shorter than this machine can make them.

    Returns:
        The problem, or None.
    """
    claimed = statistics.median(block.figure for block in ours)
    if claimed >= floor_us:
        return None
    return f"{claimed:.3g} us a call is below what this machine can do, {floor_us:.3g} us"


def suspicious(
    ours: Sequence[TimedBlock],
    theirs: Sequence[TimedBlock],
    ours_alone: Sequence[TimedBlock],
    theirs_alone: Sequence[TimedBlock],
) -> str | None:
    """Check on CUDA whether calls of the candidate pay for others.

    Args:
        ours: blocks of the candidate.
        theirs: blocks of the baseline.
        ours_alone: the candidate's blocks of a single call.
        theirs_alone: the baseline's blocks of a single call.

    Returns:
        What is implausible, or None.
    """
    claimed = statistics.median(block.figure for block in ours)
    baseline = statistics.median(block.figure for block in theirs)
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


def left_out(ours: Sequence[TimedBlock], theirs: Sequence[TimedBlock]) -> str | None:
    """CUDA: check whether the candidate's clock leaves out what the judge's saw, in every block.

    Returns:
        The problem, or None.
    """
    whole = _whole_us(theirs)
    excess = _quartile([block.hidden_us for block in ours])
    excess -= statistics.median(block.hidden_us for block in theirs)
    if excess <= HIDDEN * whole + _excused_us(theirs) + HOST_US:
        return None
    return (
        f"the judge's clock saw {excess:.3g} us a block that the reported times leave out (the "
        f"baseline's blocks take {whole:.3g} us)"
    )


def hidden_paid(ours: Sequence[TimedBlock], theirs: Sequence[TimedBlock]) -> list[TimedBlock]:
    """CUDA: the candidate's blocks, with what the judge's clock saw and their times leave out.

    Its blocks differ in what they leave out, and so do the baseline's. What they differ by more
    than those is paid, on average; nothing where noise may be the reason. So a clock that is true
    in some blocks gains nothing in the others. What all leave out alike is the host's up to
    `HOST_US`.
    """
    least, usual = (_second([block.hidden_us for block in arm]) for arm in (ours, theirs))
    more = [
        mine.hidden_us - least - (other.hidden_us - usual)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    found = hodges_lehmann(more)
    paid = statistics.fmean(more) if found.low > 0 else 0.0
    paid += max(least - usual - HOST_US, 0.0)
    if paid <= 0:
        return list(ours)
    return [
        TimedBlock(
            [time + paid / block.calls for time in block.times_us], block.calls, block.wall_us
        )
        for block in ours
    ]


def shared_us(
    ours: Sequence[TimedBlock],
    theirs: Sequence[TimedBlock],
    ours_alone: Sequence[TimedBlock],
    theirs_alone: Sequence[TimedBlock],
) -> float:
    """Microseconds by which a call of the candidate by itself takes longer than one among others,
    beyond what the baseline's does; 0 where noise may be the reason.

    A call that does the work of others is so paid for at the price of each by itself. Blocks of a
    single call come in pairs of both arms.
    """
    claimed = statistics.median(block.figure for block in ours)
    baseline = statistics.median(block.figure for block in theirs)
    more = []
    for mine, other in zip(ours_alone, theirs_alone, strict=True):
        colder = max(other.figure - baseline, 0.0)
        usual = max(claimed + colder, claimed * other.figure / baseline) + COLDER * colder
        more.append(mine.figure - usual)
    found = hodges_lehmann(more)
    return found.middle if found.low > 0 else 0.0


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


def _second(values: Sequence[float]) -> float:
    """The least but one, since the least may be an accident."""
    return sorted(values)[min(1, len(values) - 1)]


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _spread(values: Sequence[float]) -> float:
    """Median absolute deviation."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


@dataclass
class Precision:
    """When to stop measuring a point."""

    fewest_pairs: int = FEWEST_PAIRS
    """Fewest pairs of blocks."""
    most_pairs: int = 24
    """Most pairs of blocks."""
    half_width: float = 0.01
    """Half-width of the log-ratio's 95 % interval at which to stop."""
    budget_s: float = 20.0
    """Time budget in seconds."""

    @property
    def tells(self) -> bool:
        """Whether the ratio matters; otherwise only the outputs of timed calls are checked."""
        return self.most_pairs >= FEWEST_PAIRS


@dataclass(frozen=True)
class Measured:
    """One measurement of a point."""

    ours: list[TimedBlock]
    """Blocks of the candidate."""
    theirs: list[TimedBlock]
    """Blocks of the baseline."""
    dropped: int
    """Number of pairs that were dropped."""
    problem: str | None
    """What is implausible of the candidate's times."""
    disturbance: str | None
    """Why other programs make it unusable."""

    @property
    def ratio(self) -> float:
        """The candidate's time over the baseline's."""
        return math.exp(-of_pairs(self.ours, self.theirs).middle)


def of_pairs(ours: Sequence[TimedBlock], theirs: Sequence[TimedBlock]) -> Interval:
    """Hodges-Lehmann estimate of the logarithm of the speedup, with its interval."""
    return hodges_lehmann(
        [math.log(b.figure / a.figure) for a, b in zip(ours, theirs, strict=True)]
    )


def are_steady(clocks: list[int | None]) -> list[bool]:
    """For each pair, whether it neither throttled nor drifted. `clocks` holds the SM clock in MHz,
    0 if unknown, None if the pair throttled.
    """
    seen = [clock for clock in clocks if clock]
    if not seen:
        return [clock is not None for clock in clocks]
    middle = statistics.median(seen)
    return [clock is not None and abs(clock - middle) <= TOLERANCE * middle for clock in clocks]
