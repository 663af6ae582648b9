"""Evaluate candidates: `evaluate` builds one, runs it in another process, and checks and times it.

There are three processes: the build (compilers only), the runner (the candidate, without expected
values), and the judge, which never loads the candidate and reads only plain bytes and JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from patcher.bench.judge.evaluation import Evaluation
from patcher.bench.judge.tripwires import TripwirePolicy
from patcher.bench.ops.candidate import Candidate

if TYPE_CHECKING:
    from patcher.bench.judge.judge import Judge

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


class Stopwatch:
    """Adds up the seconds of stages; each lasts until the next one begins."""

    def __init__(self, first: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start in a stage.

        Args:
            clock: returns seconds.
        """
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._stage, self._since = first, clock()

    def turn(self, stage: str) -> None:
        """Begin a stage, which may have been there before."""
        now = self._clock()
        self._spent[self._stage] = self._spent.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def taken_s(self) -> dict[str, float]:
        """Seconds until now, in the order in which stages first ended."""
        self.turn(self._stage)
        return dict(self._spent)


@dataclass(frozen=True)
class JudgeSettings:
    """How a candidate is checked and timed."""

    device: str | None = None
    """`cpu` or `cuda`. None: the CPU for a C++ candidate, else CUDA if it is available."""
    sweep: str | None = None
    """Name of the contract's sweep to time; None: the device's default sweep."""
    points: int | None = None
    """Largest number of sweep points to time, evenly spread and including the last; None: all."""
    baseline: str | None = None
    """Baseline to compare with. None: the strongest one that runs. `honest`: the accuracy baseline,
    whose error sets the tolerance."""
    pairs: int = 12
    """Largest number of pairs of timed blocks per point, after one warm-up pair."""
    precision_pct: float = 1.0
    """Half-width of the interval, in percent, at which timing of a point stops."""
    calls: int = 1000
    """Smallest number of checked calls of a candidate that passes, since some cheats only fail
    later. Fewer for an op with large inputs, see `patcher.bench.judge.planning`."""
    lives_s: float = 3.0
    """Shortest time in seconds over which a passing candidate's process is called."""
    timeout_s: float = 30.0
    """Time limit in seconds of one command to the candidate's process."""
    load_timeout_s: float = 180.0
    """Time limit in seconds of loading and of the first calls, which just-in-time compilers slow
    down."""
    memory_bytes: int = 16 << 30
    """Limit on host memory in bytes of all processes of the candidate together."""
    threads: int | None = None
    """CPU threads of both arms, each pinned to as many CPUs; None: one if they run on a CPU."""
    tripwires: bool = True
    """Whether tripwires search the source. The verdict depends on behaviour in either case."""
    policy: TripwirePolicy = field(default_factory=TripwirePolicy)
    """Patterns that the user bans, requires or ignores in a source."""
    device_code: bool = True
    """CUDA: whether calls that can be carried over are timed and checked in a process that holds
    none of the candidate's host code."""
    sanitize: bool = False
    """CUDA: whether a candidate that passed all other checks must also pass compute-sanitizer."""
    recorded: Path | None = None
    """Calls that an engine was seen to make, which a candidate must get right too; see
    `patcher.bench.judge.engine_cases`."""


def evaluate(
    candidate: Candidate, settings: JudgeSettings | None = None, progress: Progress | None = None
) -> Evaluation:
    """Evaluate one candidate: build it, check its outputs, and time it against a baseline.

    A crash, a hang or an exit of the candidate is an outcome, not an exception.

    Args:
        candidate: the source, its language and its op.
        settings: how to check and time it; None: the defaults.
        progress: called with (stage, done, total); None: no progress is reported.

    Returns:
        The outcome with all checks and timings.

    Raises:
        UsageError: the op, sweep or baseline is unknown.
        MissingError: this machine has no compiler or device for the candidate's language, or the
            GPU stopped answering.
        VerificationError: the op's checks accept a wrong kernel, so no verdict is possible.
    """
    with open_judge(settings) as judge:
        return judge.evaluate(candidate, progress or _silent)


def open_judge(settings: JudgeSettings | None = None) -> AbstractContextManager[Judge]:
    """Open a judge for many candidates, which starts the trusted processes once.

    Args:
        settings: how to check and time candidates; None: the defaults.
    """
    # imported late: it imports torch, which most commands do not need
    from patcher.bench.judge.judge import Judge

    return Judge(settings or JudgeSettings())


def _silent(_stage: str, _done: int, _total: int) -> None:
    return


__all__ = ["JudgeSettings", "Progress", "Stopwatch", "TripwirePolicy", "evaluate", "open_judge"]
