"""The demo resumes its run once where the machine is too busy to time a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patcher.bench import BusyError, UsageError
from patcher.commands import run as commands

BUSY = BusyError("this machine is too busy to time tokens=1", "stop other programs")


class Executions:
    """Stands for `execute_run`: takes what happens to each execution from a list."""

    def __init__(self, *ends: int | Exception) -> None:
        self.ends = list(ends)
        self.runs: list[Any] = []

    def __call__(self, run: Any, output: Any) -> int:
        with run:  # as the real one: the run's lock is taken and given back
            self.runs.append(run.id)
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


def executions(monkeypatch: pytest.MonkeyPatch, folder: Path, *ends: int | Exception) -> Executions:
    made = Executions(*ends)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(commands, "execute_run", made)
    return made


@pytest.mark.parametrize("as_json", [False, True])
def test_a_busy_machine_is_given_a_second_try(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = executions(monkeypatch, tmp_path, BUSY, 0)
    assert commands.demo(as_json=as_json) == 0
    first, second = made.runs
    assert first == second


def test_there_is_no_third(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = executions(monkeypatch, tmp_path, BUSY, BUSY)
    with pytest.raises(BusyError):
        commands.demo(as_json=True)
    assert len(made.runs) == 2


def test_another_error_ends_it_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = executions(monkeypatch, tmp_path, UsageError("no", "yes"))
    with pytest.raises(UsageError):
        commands.demo(as_json=True)
    assert len(made.runs) == 1
