"""A run's figures come from one machine: resumed on another, or after an update of its driver or
its compilers, it is refused, or what was measured is measured again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from patcher.bench import VerificationError
from patcher.bench.machine.environment import facts
from patcher.runs.journal import START_OVER
from patcher.runs.run import Run


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs, each as `driver: 570.1 before, 580.2 now`."""
    names = dict.fromkeys([*before, *now])
    missing = "not there"
    return [
        f"{name}: {before.get(name, missing)} before, {now.get(name, missing)} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def same_machine(
    run: Run, device_kind: str, kept: Iterable[type[BaseModel]], changed: bool = False
) -> list[str]:
    """Hold this machine against the one that the run's figures come from; returns what changed.

    Args:
        device_kind: `cpu` or `cuda`: on what the run measures.
        kept: the records that do not depend on the machine.
        changed: the user knows. Then all that was judged and measured counts no more and is done
            again here; replies stay.

    Raises:
        VerificationError: the machine is another, and `changed` was not said.
    """
    now = facts(device_kind)
    before = run.state.machine or run.config.machine
    found = changes(before, now) if before else []
    if not found:
        return []
    if not changed:
        raise VerificationError(
            f"run {run.id} measured on another machine, or before an update: {'; '.join(found)}",
            "resume it there, or judge and measure all of it here: "
            f"patcher resume {run.id} --machine-changed",
        )
    _start_over(run, now, kept)
    return found


def judge_anew(run: Run, kept: Iterable[type[BaseModel]]) -> bool:
    """Where a judge elsewhere is another machine now, which nothing here can see: all that was
    judged counts no more. Returns whether there was a verdict.

    Args:
        kept: the records that do not depend on the machine.
    """
    found = any(name.endswith("/evaluate") for name in run.state.results)
    if found:
        _start_over(run, dict(run.state.machine or run.config.machine or {}), kept)
    return found


def judging_id(run: Run) -> str:
    """Who asks a judge elsewhere: the run, or what it became when it started over, so that its
    jobs are judged once each time."""
    times = sum(note.step == START_OVER for note in run.state.notes)
    return f"{run.id}.{times}" if times else run.id


def _start_over(run: Run, machine: dict[str, str], kept: Iterable[type[BaseModel]]) -> None:
    # derived from verdicts that count no more; written again as the loop goes through
    for file in run.path.glob("ops/*/*/attempt.json"):
        file.unlink()
    run.start_over(machine, kept)
