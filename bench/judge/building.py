"""The first part of a verdict, before anything of the candidate runs: its entry, what its source is
noticed for, its build. For languages that nothing here runs it is the whole verdict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from patcher.bench.errors import UsageError
from patcher.bench.judge import JudgeSettings, Progress
from patcher.bench.judge.evaluation import Evaluation, Outcome
from patcher.bench.judge.trial import TrialState
from patcher.bench.judge.tripwires import Tripwires, look
from patcher.bench.ops.candidate import Candidate
from patcher.bench.ops.op import Op
from patcher.bench.toolchains import Built, build, toolchain

NOTHING_RAN = "compiled only: it was neither run nor timed, and nothing is known of its values"


@dataclass(frozen=True)
class StartedTrial:
    built: Built
    seen: Tripwires


def begin(
    state: TrialState, op: Op, settings: JudgeSettings, report: Progress
) -> StartedTrial | Evaluation:
    """What was built, or the verdict where it ends here.

    Raises:
        MissingError: the language cannot be built here; the hint says what to install.
    """
    candidate = state.candidate
    if not re.search(rf"\b{re.escape(op.name)}\b", candidate.source):
        state.check("entry", False, f"the source defines no {op.name}")
        return state.verdict(
            Outcome.GENERATION_FAILURE, f"the source must define {op.contract.signature()}"
        )
    seen = look(candidate, settings.tripwires, settings.policy)
    state.tripwires = seen.said()
    if seen.refused:
        state.check("tripwires", False, "; ".join(seen.refused))
        return state.verdict(Outcome.GUARD_VIOLATION)
    toolchain(candidate.language).demand()
    report("build", 0, 1)
    state.build = built = build(candidate, op.contract)
    if not built.ok:
        state.check("build", False, f"{built.command} failed")
        return state.verdict(Outcome.COMPILATION_FAILURE, built.log)
    took = "cached" if built.cached else f"{built.seconds:.1f} s"
    state.check("build", True, f"{built.command} ({took})")
    return StartedTrial(built, seen)


def compile_check(
    candidate: Candidate, op: Op, settings: JudgeSettings, report: Progress
) -> Evaluation:
    """The verdict on a candidate that can only be compiled here: `COMPILED` at best.

    Raises:
        UsageError: something was asked for that only a kernel that runs can have.
        MissingError: its compiler is not here.
    """
    language = candidate.language
    asked = {
        "--device": settings.device,
        "--sweep": settings.sweep,
        "--baseline": settings.baseline,
        "--sanitize": settings.sanitize,
    }
    if given := [option for option, value in asked.items() if value]:
        raise UsageError(
            f"{given[0]} is for a kernel that runs here; a {language} kernel is only compiled",
            f"drop {' and '.join(given)}",
        )
    state = TrialState(candidate, "cpu")  # where the compiler runs
    begun = begin(state, op, settings, report)
    if isinstance(begun, Evaluation):
        return begun
    report("build", 1, 1)
    return state.verdict(Outcome.COMPILED, NOTHING_RAN)
