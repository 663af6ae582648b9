"""A client of others, which drives a server with one command line after another."""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from patcher.ab import bench_loop
from patcher.ab.server import DYING_S, EngineServer, side_environment
from patcher.bench import PatcherError
from patcher.bench.engines.child_errors import child_failed
from patcher.bench.engines.serving import ServingClient
from patcher.bench.machine.clocks import ClockMonitor, ClockSample
from patcher.bench.sandbox import Excerpt
from patcher.bench.sandbox.die_with_parent import die_with_parent

RUN_S = 900.0
"""Time limit in seconds of a run, besides the time in which requests arrive."""
SLACK = 1.5
"""Random arrivals may take longer than their rate says."""
POLL_S = 0.25
"""Seconds between two looks at the client, the server and the clocks."""


class BenchClient:
    """A client's process; it imports while the server loads, and once for all runs."""

    def __init__(self, client: ServingClient, name: str, python: str, folder: Path) -> None:
        self._name = name
        self._log = folder / "client.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                die_with_parent(python, bench_loop.__file__, client.imports),
                cwd=folder,
                env=side_environment(python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def run(
        self,
        words: Sequence[str],
        server: EngineServer,
        clocks: ClockMonitor,
        arrive_s: float = 0.0,
    ) -> list[ClockSample]:
        """Run a module with arguments until it ends; returns the clocks meanwhile.

        Args:
            arrive_s: seconds in which requests arrive, if they do not wait for answers.

        Raises:
            PatcherError: the client failed, or the server ended.
        """
        stdin: Any = self._process.stdin
        stdout: IO[bytes] | None = self._process.stdout
        assert stdout is not None
        limit_s = RUN_S + SLACK * arrive_s
        deadline, samples = time.monotonic() + limit_s, list[ClockSample]()
        try:
            stdin.write(json.dumps(words).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it ended: its reply says so
        while not select.select([stdout], [], [], POLL_S)[0]:
            server.check()
            if time.monotonic() > deadline:
                raise PatcherError(f"{self._name} took longer than {limit_s:.0f} s")
            samples.append(clocks.sample())
        code = int(stdout.readline() or self._process.wait() or 1)
        if code != 0:
            server.check(DYING_S)
            raise child_failed(self._name, code, bytes(Excerpt.of_file(self._log)))
        return samples
