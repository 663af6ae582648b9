"""What measures one process of a side, whatever client drives the engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from patcher.ab.served_records import ServedHeader, ServedJob, ServedProcess, SideSetup
from patcher.ab.server import Installation, server_environment
from patcher.bench import UsageError
from patcher.bench.ab.phases import ABPhase, ABProgress
from patcher.bench.engines.served_prompts import ServedPrompts
from patcher.bench.engines.serving import ServingClient
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import device_memory_held
from patcher.bench.stats.comparison import Arm

RECEIPTS_S = 1.5
"""Seconds until receipts hold all calls: they are written once a second."""
MOST_HELD = 2 << 30
"""Bytes of the GPU's memory that may be in use before an engine starts."""
FREED_S = 30.0


class SideTaking(ABC):
    """Measures one process of a side after the other."""

    def __init__(
        self,
        job: ServedJob,
        header: ServedHeader,
        side: SideSetup,
        installed: Installation,
        clocks: ClockMonitor,
        progress: ABProgress,
    ) -> None:
        self.job, self.header, self.side, self.installed = job, header, side, installed
        self.client: ServingClient = job.serving
        self.clocks, self._progress = clocks, progress
        self.prompts = ServedPrompts(job.workload)
        self._done = 0

    @abstractmethod
    def process(self, number: int, arm: Arm, index: int, python: str) -> ServedProcess:
        """Start the engine, measure at each point, and end it.

        Args:
            number: of the pair.
            index: number of processes that were taken before.
            python: the interpreter of a client that drives both sides.
        """

    @abstractmethod
    def compile(
        self, arm: Arm, index: int, python: str, beside: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Start the engine and end it, so that none that is measured compiles.

        Args:
            beside: arguments with which it leaves room for another engine, which is there; None: it
                is alone.
        """

    def _environment(self, folder: Path) -> dict[str, str]:
        """The environment of the side's engine, with its patches and receipts in that folder."""
        found = server_environment(
            self.client, self.side.python, self.installed.plugin, folder / "plugin"
        )
        found |= self.client.random_environment if self.job.random else {}
        return found | self.side.environment(folder)

    def await_free_device(self) -> None:
        """Check that the engine will be alone; an ended one may take seconds to free its memory."""
        if self.job.workload.device != "cuda":
            return
        deadline = time.monotonic() + FREED_S
        while (held := device_memory_held()) is not None and held > MOST_HELD:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"other programs hold {held / 2**30:.1f} GiB of the GPU's memory",
                    "end them: an engine is measured alone",
                )
            time.sleep(1)

    def tell(self, said: str) -> None:
        """Say something while an engine loads."""
        self._tell(ABPhase.LOAD, said)

    def _tell(self, phase: ABPhase, said: str) -> None:
        self._progress(phase, said, self._done, 2 * self.job.process_pairs)
