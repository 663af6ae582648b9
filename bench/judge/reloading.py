"""A candidate that is loaded again does the same.

A process holds state that no call is given: modules that a library imports at its first launch,
what other kernels left. A kernel in Python that asks for it when it is loaded takes one way in a
fresh process and another one in an engine. So it is checked as it is loaded into a fresh process,
then loaded once more where everything has run, and must give the same bits; what is timed is the
second one. Found so: a kernel that used TMA descriptors only where Triton had imported them, and
was wrong there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from patcher.bench.judge.cases import Case
from patcher.bench.judge.evaluation import Outcome
from patcher.bench.judge.trial import Trial, Wrong
from patcher.bench.toolchains import Built

CHECK = "loaded again"
CASES = 4
"""Correctness cases at which it must give the same bits, besides the smallest and the largest
swept point."""
LIKELY = (
    "what it does must not depend on what the process loaded or ran before, such as a module that "
    "Triton imports at its first launch"
)


def load_again(trial: Trial, built: Built, cases: Sequence[Case], declared: bool) -> None:
    """Load the build once more; the calls that follow are of this one. A library is not loaded
    twice by a process, and is left.

    Args:
        cases: correctness cases, of which some are repeated.
        declared: whether the source declares itself nondeterministic.

    Raises:
        Wrong: it cannot be loaded again, or equal inputs give other bits.
    """
    if built.binding != "python":
        return
    loose = declared and not trial.op.contract.guards.deterministic
    points, draw = trial.sweep.points(), trial.draw
    swept = (points[0], points[-1]) if len(points) > 1 else points
    tried = [Case(point, "normal", draw.seed(), trial.op.served_scalars) for point in swept]
    tried += draw.random.sample(cases, min(CASES, len(cases)))
    before = [_digest(trial, case) for case in tried]
    trial.load_build(CHECK)
    trial.begin = time.monotonic()
    for case, digest in zip(tried, before, strict=True):
        if _digest(trial, case) != digest and not loose:
            detail = f"equal inputs gave other bits at {case.label()}: {LIKELY}"
            raise Wrong(Outcome.MISMATCH, CHECK, detail)
    said = "called" if loose else "equal bits"
    trial.state.check(CHECK, True, f"{said} at {len(tried)} cases")


def _digest(trial: Trial, case: Case) -> bytes:
    block = trial.called(trial.made([case])).blocks[0]
    return hashlib.blake2b(block.cpu().numpy().data).digest()
