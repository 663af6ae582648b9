"""A command that holds an engine: started in a folder, ended with its children, with receipts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

from patcher.bench import PatcherError
from patcher.bench.engines.child_errors import ended
from patcher.bench.sandbox import Excerpt
from patcher.bench.sandbox.die_with_parent import die_with_parent
from patcher.integrate import Receipt, read_receipts
from patcher.runs.stopping import GROUPS

END_S = 30.0
"""Time limit in seconds for a process to end after it was asked to; then it is killed."""
_LOG_LIMIT = 4 << 20
"""Bytes of its output that are kept where it fails."""


class EngineCommand:
    """A running command. Leaving the context ends it and all its children."""

    _running: ClassVar[set[EngineCommand]] = set()

    def __init__(
        self,
        title: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: str,
    ) -> None:
        """Start it.

        Args:
            title: what errors call it.
            folder: where its log and receipts lie; it runs there.
            log: name of the file of its output.
        """
        self._title = title
        self._log, self._receipts = folder / log, folder / "receipts"
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                die_with_parent(*command),
                cwd=folder,
                env={**environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.add(self)
        GROUPS.add(self._process.pid)

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check(self, grace_s: float = 0) -> None:
        """Check that it still runs.

        Args:
            grace_s: how long to wait for its end; a server that dies first drops its connections.

        Raises:
            PatcherError: it ended; the error has the end of its log.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._refuse_end()

    def ended_well(self) -> bool:
        """Whether it ended by itself, without an error.

        Raises:
            PatcherError: it ended with one; the error has the end of its log.
        """
        if self._process.poll() == 0:
            return True
        self._refuse_end()
        return False

    def _refuse_end(self) -> None:
        code = self._process.returncode
        if code is not None:
            how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            raise self.failed(f"ended ({how})")

    def close(self) -> None:
        """End it with its children, so that the device is free; idempotent."""
        if self not in self._running:
            return
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)  # workers write receipts and free memory
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._running.discard(self)
            GROUPS.discard(self._process.pid)

    @classmethod
    def close_all(cls) -> None:
        """End all that run, whichever thread started them and waits for them."""
        for command in tuple(cls._running):
            command.close()

    def receipts(self) -> list[Receipt]:
        """Receipts of its processes until about a second ago."""
        return read_receipts(self._receipts)

    def failed(self, how: str) -> PatcherError:
        """An error with the end of its log."""
        return ended(f"{self._title} {how}", bytes(Excerpt.of_file(self._log, _LOG_LIMIT)))
