"""Ctrl-C, SIGTERM and a closed terminal stop a command alike: it unwinds, ends what it started, and
leaves a run that can be resumed. Exit code 130. Imports nothing slow: it must be there first."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_CODE = 130
GROUPS: set[int] = set()
"""Process groups that end with this process: the kernel ends only their first ones with it."""
PATIENCE_S = 1.0
"""A terminal and a wrapper may both pass on one Ctrl-C: this soon, another signal is the same."""


class Stopping:
    """While it is entered, the first signal raises KeyboardInterrupt; who sends another one will
    not wait for the unwinding: the process is gone at once, and its children with it (`GROUPS`,
    and `patcher.bench.sandbox.die_with_parent`).

    Attributes:
        asked: whether a signal has come.
    """

    def __init__(self) -> None:
        self.asked = False
        self._first_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            # what `nohup` or a shell's `&` has switched off stays off
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._told)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _told(self, _number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._first_s = True, time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - self._first_s > PATIENCE_S:
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")  # a live table hides the cursor
            for group in tuple(GROUPS):
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            os._exit(EXIT_CODE)
