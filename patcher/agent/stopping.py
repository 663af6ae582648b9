"""When the loop leaves an op: rules in code, not in a prompt (as AutoKernel's orchestrator has
them), the end as the journal has it, and the candidate that is left."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import AliasChoices, Field

from patcher.attempts import LoopResult, Stopped
from patcher.attempts.history import IterationResult, standing
from patcher.bench import Candidate, Outcome, Record, VerificationError
from patcher.models.ceilings import RAISED
from patcher.runs.run import Run

MAX_FUNCTIONAL_FAILURES = 5
"""Functional rounds in a row that may fail before the loop gives the op up."""


class StopRules(Record):
    """When more micro gain is not worth its price."""

    sol_pct: float = Field(default=90, gt=0, validation_alias=AliasChoices("sol_pct", "light_pct"))
    """Share of the speed of light, geometric mean over the timed points, from which on at most the
    rest could be gained."""
    patience: int = Field(default=5, ge=1, validation_alias=AliasChoices("patience", "reverts"))
    """Optimization rounds in a row without a gain."""
    share_pct: float | None = Field(default=None, ge=0, le=100)
    """The op's share of the served model's time, by its profile; None: not known."""
    margin_pct: float = Field(default=0.5, ge=0)
    """End-to-end gain that counts."""


def reason_to_stop(tried: Sequence[IterationResult], rules: StopRules) -> Stopped | None:
    """Why to stop now, if so."""
    if any(one.evaluation and one.evaluation.outcome is Outcome.COMPILED for one in tried):
        return Stopped(reason="compiled", detail="it compiles, and nothing here can say more of it")
    now = standing(tried)
    if now.failures >= MAX_FUNCTIONAL_FAILURES:
        detail = f"{now.failures} rounds in a row gave nothing that is right"
        return Stopped(reason="functional_failures", detail=detail)
    if now.best is None or now.best.evaluation is None:
        return None
    best = now.best.evaluation
    light = best.sol_share
    if light is not None and 100 * light >= rules.sol_pct:
        detail = (
            f"iteration {now.best.iteration} is at {100 * light:.0f} % of the speed of light "
            f"(rule: {rules.sol_pct:g} %)"
        )
        return Stopped(reason="speed_of_light", detail=detail)
    if rules.share_pct is not None and best.geomean_speedup is not None:
        left = left_pct(rules.share_pct / 100, best.geomean_speedup, light or 0.0)
        if left < rules.margin_pct:
            detail = (
                f"the op was {rules.share_pct:.2g} % of the time and is {best.geomean_speedup:.3g} "
                f"times as fast: whatever comes could add at most {left:.2f} % end to end "
                f"(margin: {rules.margin_pct:g} %)"
            )
            return Stopped(reason="end_to_end_ceiling", detail=detail)
    if now.reverts >= rules.patience:
        detail = f"{now.reverts} optimization rounds in a row brought no gain"
        return Stopped(reason="reverts", detail=detail)
    return None


def left_pct(share: float, speedup: float, light: float) -> float:
    """End-to-end gain in percent that is still possible, by Amdahl's law.

    Args:
        share: of the time before any patch, 0 to 1.
        speedup: of the best kernel so far.
        light: its share of the speed of light, which a better kernel cannot pass; 0 if unknown.
    """
    now = 1 - share + share / speedup
    least = 1 - share + share / speedup * light
    return 100 * (now / least - 1) if least > 0 else float("inf")


def stop_steps(run: Run, op_name: str) -> list[str]:
    """The steps in which the loop on this op ended, in order."""
    pattern = re.compile(rf"{re.escape(op_name)}/stopped(-\d+)?")
    return [name for name in run.state.results if pattern.fullmatch(name)]


def recorded_stop(run: Run, op_name: str, *, final: bool = False) -> Stopped | None:
    """The end, if the loop does not go on. `final`: what comes after it has begun."""
    names = stop_steps(run, op_name)
    if not names:
        return None
    last = run.load(names[-1], Stopped)
    if last.reason != "budget" or final:
        return last
    seen = False
    for event in run.events:
        if event.kind == "result" and event.step == names[-1]:
            seen = True
        elif seen and event.kind == "note" and event.step == RAISED:
            return None
    return last


def best_candidate(run: Run, result: LoopResult) -> Candidate | None:
    """The best candidate of a finished loop, from its file in the run.

    Raises:
        VerificationError: the file is missing or was changed.
    """
    if result.best_file is None:
        return None
    hint = "restore the run from a copy, or start a new one"
    try:
        # Bytes: reading as text would change line ends, and so the digest.
        source = (run.path / result.best_file).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{result.best_file} cannot be read", hint) from error
    candidate = Candidate(op=result.op, language=result.language, source=source)
    if candidate.digest != result.best_digest:
        raise VerificationError(f"{result.best_file} was changed after it was judged", hint)
    return candidate
