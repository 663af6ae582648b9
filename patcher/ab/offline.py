"""Measure by an engine's own offline benchmark, which starts the engine in its own process.

Each point is a process, and so a start of the engine: such a command takes one load. It warms up by
itself, and says when the engine has started; calls of patches count from then on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from patcher.ab.engine_command import EngineCommand
from patcher.ab.receipt_counts import calls_between
from patcher.ab.served_records import ServedProcess
from patcher.ab.server import START_S
from patcher.ab.taking import RECEIPTS_S, SideTaking
from patcher.bench import PatcherError, parse_json, problem
from patcher.bench.ab.offline import offline_run
from patcher.bench.ab.phases import ABPhase
from patcher.bench.ab.served import ServedPoint, ServedRun
from patcher.bench.ab.window_clocks import block_clocks
from patcher.bench.engines.serving import OfflineBench
from patcher.bench.machine.clocks import ClockMonitor, ClockSample
from patcher.bench.stats.comparison import Arm
from patcher.integrate import Receipt

RUN_S = 1800.0
"""Time limit in seconds for the warm-up and the benchmark, after the start."""
POLL_S = 0.25
"""Seconds between two looks at the process and the clocks."""
LOG = "bench.log"
RESULT = "result.json"


class _Measured(NamedTuple):
    """One process of the benchmark."""

    run: ServedRun
    start_s: float
    receipts: tuple[Receipt, ...]


class OfflineTaking(SideTaking):
    """Measures a side by a process of the benchmark for each point."""

    def process(self, number: int, arm: Arm, index: int, python: str) -> ServedProcess:
        """Run the benchmark at each point; `python` is not used, since the engine is the side's."""
        self._done = index
        begin = time.monotonic()
        taken = [self._take(arm, point) for point in self.job.points]
        return ServedProcess(
            pair=number,
            arm=arm,
            start_s=sum(one.start_s for one in taken),
            took_s=time.monotonic() - begin,
            warm_ups={},
            runs=tuple(one.run for one in taken),
            stalled=(),
            receipts=calls_between((), [each for one in taken for each in one.receipts]),
        )

    def compile(
        self, arm: Arm, index: int, python: str, beside: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Run it briefly at the largest point."""
        self._done = index
        largest = max(self.job.points, key=lambda point: point.concurrency)
        self._take(arm, largest, "which only compiles", self._load.brief, beside)

    @property
    def _load(self) -> OfflineBench:
        assert self.client.offline is not None  # else another class measures
        return self.client.offline

    def _take(
        self,
        arm: Arm,
        point: ServedPoint,
        note: str = "",
        more: Sequence[str] = (),
        beside: Mapping[str, JsonValue] | None = None,
    ) -> _Measured:
        """Run the benchmark at a point.

        Args:
            more: arguments that come last, and so count.
            beside: as in `compile`.

        Raises:
            UsageError: the device is not free.
            PatcherError: it failed, took too long, or wrote no result that can be read.
        """
        with tempfile.TemporaryDirectory(prefix="patcher-offline-") as scratch:
            folder = Path(scratch)
            said = f"starting the engine, {arm}{note and ', ' + note}: {point.label}"
            self._tell(ABPhase.LOAD, said)
            if beside is None:
                self.await_free_device()
            values = self.job.values(self.prompts)
            values |= {"folder": folder, "result": RESULT, "concurrency": point.concurrency}
            side = self.side.beside(beside or {})
            command = [*self.job.offline_command(side, values), *more]
            # else what it prints is in its log only when it ends
            environment = {**self._environment(folder), "PYTHONUNBUFFERED": "1"}
            title = f"{self.job.client} of the {arm}"
            begin = time.monotonic()
            with EngineCommand(title, command, environment, folder, LOG) as bench:
                self._await_start(bench, folder / LOG)
                start_s = time.monotonic() - begin
                self._tell(ABPhase.PAIRS, f"{point.label}{note and ', ' + note}")
                before, samples = _await_end(bench, self.clocks)
                receipts = calls_between(before, bench.receipts())
            clocks = block_clocks(samples)
            run = self._read(folder / RESULT, point).model_copy(
                update={name: clocks[name] for name in ("sm_clock_mhz", "throttle_reasons")}
            )
            return _Measured(run, start_s, receipts)

    def _await_start(self, bench: EngineCommand, log: Path) -> None:
        """Wait until it says that its engine has started."""
        deadline, begins = time.monotonic() + START_S, self._load.begins
        while begins.encode() not in log.read_bytes():
            if bench.ended_well() and begins.encode() not in log.read_bytes():
                raise bench.failed(f"ended and never printed {begins!r}")
            if time.monotonic() > deadline:
                raise bench.failed(f"did not start its engine in {START_S:.0f} s")
            time.sleep(POLL_S)

    def _read(self, result: Path, point: ServedPoint) -> ServedRun:
        try:
            found = parse_json(result.read_text(encoding="utf-8"))
            return offline_run(self._load.result, point, self.header.traces[point.trace], found)
        except (OSError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            said = f"{type(error).__name__}: {problem(error)}"
            raise PatcherError(
                f"{self.job.client} wrote no result that can be read: {said}"
            ) from error


def _await_end(
    bench: EngineCommand, clocks: ClockMonitor
) -> tuple[Sequence[Receipt], list[ClockSample]]:
    """Wait until it ends: the receipts of its start, and the clocks since then.

    A benchmark that ends before receipts hold the calls of the start has none of it: all of its
    calls count.
    """
    begin, samples = time.monotonic(), list[ClockSample]()
    before: Sequence[Receipt] | None = None
    while not bench.ended_well():
        since = time.monotonic() - begin
        if before is None and since >= RECEIPTS_S:
            before = bench.receipts()
        if since > RUN_S:
            raise bench.failed(f"took longer than {RUN_S:.0f} s")
        samples.append(clocks.sample())
        time.sleep(POLL_S)
    return before or (), samples
