"""How a loop ended, by its journal. An end by a spent budget stands until the run is given more."""

from __future__ import annotations

import re

from patcher.attempts import Stopped
from patcher.models.ceilings import RAISED
from patcher.runs.run import Run


def stops(run: Run, op_name: str) -> list[str]:
    """The steps in which the loop on this op ended, in order."""
    pattern = re.compile(rf"{re.escape(op_name)}/stopped(-\d+)?")
    return [name for name in run.state.results if pattern.fullmatch(name)]


def ended(run: Run, op_name: str, *, final: bool = False) -> Stopped | None:
    """The end, if the loop does not go on. `final`: what comes after it has begun."""
    names = stops(run, op_name)
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
