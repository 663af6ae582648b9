"""Progress where there is no terminal: one line a stage, and one now and then within it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from patcher.show import progress
from patcher.show.progress import LINE_EVERY_S, stage_bar


def test_stages_are_told_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    told = io.StringIO()
    with stage_bar(Console(file=told), quiet=False) as bar:
        bar("start (stock)", 0, 6)
        bar("start (patched)", 1, 6)
        now += LINE_EVERY_S
        bar("start (stock)", 2, 6)
        bar("measure", 0, 0)
    assert told.getvalue().splitlines() == [
        "start (stock): 0 of 6",
        "start (stock): 2 of 6",
        "measure",
    ]


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (False, True)])
def test_a_bar_or_a_quiet_command_prints_no_such_lines(terminal: bool, quiet: bool) -> None:
    told = io.StringIO()
    with stage_bar(Console(file=told, force_terminal=terminal, width=80), quiet) as bar:
        bar("measure", 0, 1)
    assert "measure: 0 of 1" not in told.getvalue()


def test_a_stage_with_brackets_and_escapes_is_shown_as_it_is_written() -> None:
    """Such as the name of a folder, or what a server said last."""
    told = io.StringIO()
    with stage_bar(Console(file=told, force_terminal=True, width=120), quiet=False) as bar:
        bar("kept in /runs/[/b]\x1b]0;x", 0, 1)
    assert "kept in /runs/[/b]<U+001B>]0;x" in told.getvalue()
