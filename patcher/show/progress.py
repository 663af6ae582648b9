"""The progress of a command: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from patcher.visible import visible

LINE_EVERY_S = 30.0
"""Where there is no terminal, a stage is told when it begins and so often after that."""


@contextmanager
def stage_bar(console: Console, quiet: bool) -> Iterator[StageBar]:
    """One live bar that changes its label from stage to stage."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not _live(console),
    )
    with progress:
        yield StageBar(progress, console, quiet)


def _live(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


class StageBar:
    """Callable with (stage, done, total), as the judge and the A/B report their progress."""

    def __init__(self, progress: Progress, console: Console, quiet: bool) -> None:
        self._progress, self._console, self._quiet = progress, console, quiet
        self._task = progress.add_task("starting", total=None)
        self._stage = ""
        self._lines = not (quiet or _live(console))
        self._told_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """What stands in brackets after a stage is a note, which may change within it."""
        stage = visible(stage)  # names of folders, or the last words of a server
        name = stage.partition(" (")[0]
        begins = name != self._stage
        if begins:
            self._stage = name
            self._progress.reset(self._task)
        if self._lines and (begins or time.monotonic() - self._told_s >= LINE_EVERY_S):
            self._told_s = time.monotonic()
            self.say(Text(f"{stage}: {done} of {total}" if total else stage))
        self._progress.update(self._task, description=stage, completed=done, total=total)

    def say(self, line: str | Text) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(line, highlight=False)
