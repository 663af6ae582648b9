"""A candidate that is loaded again is right, too.

A process holds state that no call is given: modules that a library imports at its first launch,
what other kernels left. A kernel in Python that asks for it when it is loaded takes one way in a
fresh process and another one in an engine. So it is checked as it is loaded into a fresh process,
then loaded once more where everything has run, and what is timed is the second one. It may give
other bits, as kernels do that choose among variants by timings of their own, and is right where it
gives the same bits; elsewhere its values are checked. Found so: a kernel that used TMA descriptors
only where Triton had imported them, and was wrong there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from patcher.bench.judge import Progress
from patcher.bench.judge.cases import Case
from patcher.bench.judge.evaluation import Outcome
from patcher.bench.judge.trial import Trial, Wrong

CHECK = "loaded again"
LIKELY = (
    "as first loaded into a fresh process it was right there. What it does must not depend on what "
    "the process loaded or ran before, such as a module that Triton imports at its first launch"
)
ONCE = (
    "it was right as first loaded into a fresh process, and must load and run after that too. What "
    "works once in a process (names registered, files and folders made, settings that cannot be "
    "set again) is there already, and so is memory that something outside of its module holds"
)


def load_again(trial: Trial, cases: Sequence[Case], report: Progress) -> None:
    """Load the build once more; the calls that follow are of this one. A library is not loaded
    twice by a process, and is left.

    Args:
        cases: all cases at which the first one was right, in their order.
        report: called with (stage, done, total).

    Raises:
        Wrong: it cannot be loaded or called again, or is wrong then.
    """
    if trial.told["binding"] != "python":
        return
    right = tuple(trial.bits)
    try:
        trial.load_build(CHECK)
        trial.begin = time.monotonic()
        differ = 0
        for index, (case, bits) in enumerate(zip(cases, right, strict=True)):
            report("check", index, len(cases))
            differ += trial.one(case, CHECK, bits)
        report("check", len(cases), len(cases))
    except Wrong as wrong:
        if wrong.outcome is Outcome.GUARD_VIOLATION:
            raise
        why = LIKELY if wrong.outcome is Outcome.MISMATCH else ONCE
        raise Wrong(wrong.outcome, CHECK, f"{wrong.detail}: {why}", wrong.log) from wrong
    said = f"equal bits at {len(cases)} cases"
    if differ:
        said = f"right at {len(cases)} cases, with other bits at {differ}"
    trial.state.check(CHECK, True, said)
