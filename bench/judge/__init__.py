"""Is a candidate right, and is it faster? `evaluate` builds it, runs it in another process and
says so.

Three processes: the build (compilers only), the runner (the candidate, no expected values), and
the judge, which never loads the candidate and reads plain bytes and JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patcher.bench.judge.evaluation import Evaluation
from patcher.bench.judge.tripwires import TripwirePolicy
from patcher.bench.ops.candidate import Candidate

if TYPE_CHECKING:
    from patcher.bench.judge.judge import Judge

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


@dataclass(frozen=True)
class JudgeSettings:
    device: str | None = None
    """`cpu` or `cuda`; None: a C++ candidate on the CPU, else CUDA where there is one."""
    sweep: str | None = None
    points: int | None = None
    """At most so many of the sweep's points are timed, evenly spread, the last among them."""
    baseline: str | None = None
    """Compare with this one instead of the strongest that runs; `honest`: with the one whose error
    is the yardstick."""
    pairs: int = 12
    """Pairs of timed blocks a point at most, after one that is thrown away."""
    precision_pct: float = 1.0
    """Pairs stop once the interval is this narrow on each side."""
    calls: int = 1000
    """Checked calls of a candidate that passes, at least: some cheats are right for a while. Of
    an op with large inputs fewer, see `patcher.bench.judge.planning`."""
    lives_s: float = 3.0
    """Likewise, how long its process is called."""
    timeout_s: float = 30.0
    """The longest one command to the candidate's process may take."""
    load_timeout_s: float = 180.0
    """Likewise for loading and the first calls (just-in-time compilers)."""
    memory_bytes: int = 16 << 30
    """Of host memory, for all processes of the candidate."""
    threads: int | None = None
    """CPU threads of both arms, each pinned to as many CPUs; None: one, where they run on a CPU."""
    tripwires: bool = True
    """Whether the source is looked at; behaviour decides either way."""
    policy: TripwirePolicy = field(default_factory=TripwirePolicy)
    """What the user bans, requires and ignores in a source."""
    sanitize: bool = False
    """CUDA: whether what passed everything else must pass compute-sanitizer too."""


def evaluate(
    candidate: Candidate, settings: JudgeSettings | None = None, progress: Progress | None = None
) -> Evaluation:
    """Judge one candidate. A crash, a hang or an exit of it is an outcome, not an exception.

    Raises:
        UsageError: unknown op, sweep or baseline.
        MissingError: no compiler or no device for its language here, or the GPU stopped answering.
        VerificationError: the op's checks do not discriminate: nothing can be said.
    """
    with open_judge(settings) as judge:
        return judge.evaluate(candidate, progress or _silent)


def open_judge(settings: JudgeSettings | None = None) -> AbstractContextManager[Judge]:
    """A judge for many candidates: what is trusted is started once."""
    # imported late: it brings torch, and many commands judge nothing
    from patcher.bench.judge.judge import Judge

    return Judge(settings or JudgeSettings())


def _silent(_stage: str, _done: int, _total: int) -> None:
    return


__all__ = ["JudgeSettings", "Progress", "TripwirePolicy", "evaluate", "open_judge"]
