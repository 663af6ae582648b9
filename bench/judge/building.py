"""Checks before the candidate runs: its entry function, tripwires and the build.

For languages that this machine cannot run, these are the whole evaluation.
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
    """A candidate that was built and can be run."""

    built: Built
    """The build."""
    seen: Tripwires
    """Tripwire hits of the source."""


def begin(
    state: TrialState, op: Op, settings: JudgeSettings, report: Progress
) -> StartedTrial | Evaluation:
    """Check and build a candidate.

    Returns:
        The build and the tripwire hits, or the evaluation if the candidate failed.

    Raises:
        MissingError: this machine cannot build the language; the hint says what to install.
    """
    candidate = state.candidate
    if not re.search(rf"\b{re.escape(op.name)}\b", candidate.source):
        state.check("entry", False, f"the source defines no {op.name}")
        return state.verdict(
            Outcome.GENERATION_FAILURE, f"the source must define {op.contract.signature()}"
        )
    seen = look(candidate, settings.tripwires, settings.policy)
    state.tripwires = seen.as_text()
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
    """Evaluate a candidate that this machine can compile but not run: `COMPILED` at best.

    Raises:
        UsageError: an option is set that only applies to a kernel that runs.
        MissingError: the compiler is not installed.
    """
    language = candidate.language
    options = {
        "--device": settings.device,
        "--sweep": settings.sweep,
        "--baseline": settings.baseline,
        "--sanitize": settings.sanitize,
    }
    if given := [option for option, value in options.items() if value]:
        raise UsageError(
            f"{given[0]} is for a kernel that runs; a {language} kernel can only be compiled",
            f"drop {' and '.join(given)}",
        )
    state = TrialState(candidate, "cpu")  # the compiler runs on the CPU
    start = begin(state, op, settings, report)
    if isinstance(start, Evaluation):
        return start
    report("build", 1, 1)
    return state.verdict(Outcome.COMPILED, NOTHING_RAN)
