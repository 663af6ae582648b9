"""Compare two ways to serve a model, as users see them: an engine alone, under a client of others.

Each side's server is a fresh process, started in ABBA order, alone on the device. It is warmed up,
then a client drives it over HTTP at each point. Where an engine compiles when it starts, a server
that is not measured does so before the side's first one on a host (`patcher.ab.first_starts`).
Every process that was measured is a file in a folder, so that the same command goes on after a
stop, or with more pairs. On several GPUs at a time it shares the pairs out. A client that starts
the engine itself is driven by `patcher.ab.offline`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from patcher.ab.bench_client import BenchClient
from patcher.ab.first_starts import compile_at_once, compile_side
from patcher.ab.launcher import refuse_other_engines
from patcher.ab.offline import OfflineTaking
from patcher.ab.receipt_counts import calls_between
from patcher.ab.served_folder import ServedFolder, machine_of
from patcher.ab.served_records import (
    ServedJob,
    ServedProcess,
    ServedResult,
    SideSetup,
    header_of,
    refuse_many_points,
)
from patcher.ab.served_verdict import judge_served
from patcher.ab.server import (
    DYING_S,
    WARM_UP_TOKENS,
    EngineServer,
    WarmUp,
    free_port,
    warm_up,
)
from patcher.ab.taking import RECEIPTS_S, SideTaking
from patcher.ab.verdict import refuse_one_point_twice
from patcher.bench import PatcherError, parse_json, problem
from patcher.bench.ab.engine_config import overriding
from patcher.bench.ab.phases import ABPhase, ABProgress
from patcher.bench.ab.served import (
    ServedPoint,
    ServedRun,
    ServingTrace,
    StalledRun,
    refuse_other_traffic,
    requests_of,
    run_of,
)
from patcher.bench.ab.window_clocks import block_clocks
from patcher.bench.engines import compiles
from patcher.bench.engines.serving import filled, request_line
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe
from patcher.bench.stats.comparison import Arm
from patcher.integrate import Patch, engine_wants
from patcher.places import require_layers

WAIT_S = 2.0
"""Seconds until who waits for the pairs of others looks again."""
TRIES = 3
"""Most runs at a point of a process; one that stalled is taken again, in either arm."""
FIRST_RUN = 500
"""Seeds of a pair's runs begin here, those of warm-ups at 0; a pair has a thousand."""
ARMS: tuple[Arm, Arm] = ("baseline", "patched")


def compare_served(
    job: ServedJob, sides: tuple[SideSetup, SideSetup], keep: Path, progress: ABProgress
) -> ServedResult:
    """Measure what is missing, and decide.

    Args:
        sides: the baseline, and what may replace it.
        keep: a folder for the folders of comparisons; each is of one job.

    Raises:
        UsageError: an option does not fit, the port is in use, the device is not free, or an
            earlier result is of another comparison.
        MissingError: an engine or a client is not installed.
        VerificationError: a patch was changed, or a file of the folder is damaged.
        PatcherError: a server or a client failed; the error has the end of its log.
    """
    refuse_many_points(job.points)
    header, installed = header_of(job, sides)
    folder = ServedFolder(keep / header.folder_name, header, job.process_pairs)
    folder.declare(job.margin_pct)
    adopted = sum(map(folder.adopt, job.earlier))
    given = sum(len({process.pair for process in one.processes}) for one in job.earlier)
    counts = f"; {adopted} of {given} earlier pairs count" if job.earlier else ""
    said = f"each process is kept in {folder.path}{counts}"
    progress(ABPhase.READY, said, 0, 2 * job.process_pairs)
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:
        machine = machine_of(clocks.gpu)
        takings = [
            taking_class(job)(job, header, side, one, clocks, progress)
            for side, one in zip(sides, installed, strict=True)
        ]
        while missing := folder.missing():
            if not any(_take_pair(folder, number, machine, takings) for number in missing):
                pairs = ", ".join(map(str, missing))
                said = f"another process measures pair {pairs}"
                progress(ABPhase.READY, said, folder.taken, 2 * job.process_pairs)
                time.sleep(WAIT_S)
        described = clocks.description
    processes = folder.processes()
    return ServedResult(
        header=header,
        processes=processes,
        comparison=judge_served(header, processes, job.margin_pct, job.flags_no_faster),
        clocks=described,
        environment=describe(job.workload.device, job.workload.threads, described),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def taking_class(job: ServedJob) -> type[SideTaking]:
    """What measures a process of the job's client."""
    return Taking if job.serving.offline is None else OfflineTaking


def _take_pair(
    folder: ServedFolder, number: int, machine: str, takings: Sequence[SideTaking]
) -> bool:
    """Measure what is missing of a pair; whether no other process has it.

    Args:
        takings: of the arms, the baseline first.
    """
    python = takings[0].side.python  # one client measures both sides
    with folder.claimed(number, machine) as mine:
        if mine and compiles(takings[0].job.workload.engine):
            both = dict(zip(ARMS, takings, strict=True))
            if (failed := compile_at_once(folder, both, python)) is not None:
                takings[0].tell(f"both sides do not start at once, so one by one: {failed}")
        for arm in folder.order(number) if mine else ():
            if folder.has(number, arm):
                continue
            taking = takings[ARMS.index(arm)]
            if compiles(taking.job.workload.engine):
                compile_side(folder, arm, taking, python)
            taken = taking.process(number, arm, folder.taken, python)
            folder.keep(taken.model_copy(update={"machine": machine}))
    return mine


def with_patches(
    job: ServedJob, stock: SideSetup, patches: Sequence[Patch]
) -> tuple[ServedJob, SideSetup]:
    """The job, and the side with these patches and the arguments that they require.

    Raises:
        UsageError: a patch is for another engine, or two have the same patch point.
        VerificationError: a patch was changed, or does not match this environment.
    """
    refuse_other_engines(job.workload, patches)
    refuse_one_point_twice(patches)
    for patch in patches:
        patch.verify_target()
    require_layers(job.workload, patches)
    points = [patch.manifest.target.point for patch in patches]
    own = overriding(engine_wants(job.workload.engine, points), stock.arguments)
    arguments = {**stock.arguments, **own}
    tried = job.tuning is not None and job.tuning.no_faster(arguments)
    job = replace(job, flags_no_faster=not own or tried)
    return job, SideSetup("patched", arguments, tuple(patches))


class _Running(NamedTuple):
    """Two processes that were started, and what commands are filled with."""

    client: BenchClient
    server: EngineServer
    values: dict[str, Any]


class Taking(SideTaking):
    """Measures one server of a side."""

    def process(self, number: int, arm: Arm, index: int, python: str) -> ServedProcess:
        """Start the server, warm it up, drive it at each point, and end it.

        Args:
            number: of the pair.
            index: number of processes that were taken before.
            python: the client's interpreter.
        """
        self._done = index
        begin = time.monotonic()
        with self._serving(arm, python) as at:
            warm = self._warm_up(at.server, number)
            time.sleep(RECEIPTS_S)
            before = at.server.receipts()
            runs, stalled = self._runs(at, number, warm)
            time.sleep(RECEIPTS_S)
            receipts = calls_between(before, at.server.receipts())
            at.server.check()
        return ServedProcess(
            pair=number,
            arm=arm,
            start_s=at.server.start_s,
            took_s=time.monotonic() - begin,
            warm_ups=warm,
            runs=tuple(runs),
            stalled=tuple(stalled),
            receipts=receipts,
        )

    def compile(
        self, arm: Arm, index: int, python: str, beside: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Start the server, warm it up and end it, so that none that is measured compiles."""
        self._done = index
        with self._serving(arm, python, "which only compiles", beside) as at:
            self._warm_up(at.server, 0)

    @contextmanager
    def _serving(
        self,
        arm: Arm,
        python: str,
        note: str = "",
        beside: Mapping[str, JsonValue] | None = None,
    ) -> Iterator[_Running]:
        with tempfile.TemporaryDirectory(prefix="patcher-served-") as scratch:
            folder = Path(scratch)
            self._tell(ABPhase.LOAD, f"starting the server, {arm}{note and ', ' + note}")
            if beside is None:
                self.await_free_device()
            port = self.job.port or free_port()
            environment = self._environment(folder)
            values = {**self.job.values(self.prompts), "port": port, "folder": folder}
            command = self.job.serve_command(self.side.beside(beside or {}), values)
            with (
                BenchClient(self.client, self.job.client, python, folder) as client,
                EngineServer(arm, command, environment, folder, port, self.client.health) as server,
            ):
                yield _Running(client, server, values)

    def _warm_up(self, server: EngineServer, number: int) -> dict[str, WarmUp]:
        found: dict[str, WarmUp] = {}
        seed = 1000 * (number + 1)
        for name in self.header.traces:
            self._tell(ABPhase.READY, f"warming up: {name}")
            trace = self.header.traces[name]

            def send(users: int, trace: ServingTrace = trace) -> float:
                nonlocal seed
                seed += 1
                bodies = [
                    {
                        "model": self.prompts.model,
                        "prompt": self.prompts.text(request.prompt),
                        "max_tokens": 4 + index * 7 % (WARM_UP_TOKENS - 3),
                        "temperature": 0,
                        "ignore_eos": True,
                    }
                    for index, request in enumerate(
                        requests_of(trace, 2 * users, self.prompts.vocabulary, seed)
                    )
                ]
                return server.burst("/v1/completions", bodies, users)

            users = max(one.concurrency for one in self.job.points if one.trace == name)
            found[name] = warm_up(send, users)
        return found

    def _runs(
        self, at: _Running, number: int, warm: Mapping[str, WarmUp]
    ) -> tuple[list[ServedRun], list[StalledRun]]:
        """A run at each point; one that stalled is taken again."""
        runs: list[ServedRun] = []
        stalled: list[StalledRun] = []
        for index, point in enumerate(self.job.points):
            limit_ms = warm[point.trace].limit_ms(point.concurrency)
            for attempt in range(TRIES):
                self._tell(ABPhase.PAIRS, point.label)
                # prompts of one number are the same in both arms, and new to a server's cache
                seed = 1000 * (number + 1) + FIRST_RUN + 10 * index + attempt
                run = self._run(at, point, seed)
                # at a rate, requests may queue
                gap_ms = run.longest_gap_ms if point.rate is None else 0.0
                assert gap_ms is not None  # a client of a server times requests
                if gap_ms <= limit_ms or attempt == TRIES - 1:
                    runs.append(run.model_copy(update={"stalled": gap_ms > limit_ms}))
                    break
                stalled.append(StalledRun(point=point, longest_gap_ms=gap_ms, limit_ms=limit_ms))
        return runs, stalled

    def _run(self, at: _Running, point: ServedPoint, seed: int) -> ServedRun:
        """Let the client send the requests of a seed."""
        trace, folder = self.header.traces[point.trace], Path(at.values["folder"])
        count = trace.requests(point.concurrency, point.rate)
        file, result = folder / "requests.jsonl", folder / "result.json"
        result.unlink(missing_ok=True)
        asked = requests_of(trace, count, self.prompts.vocabulary, seed)
        with file.open("w", encoding="utf-8") as lines:
            for request in asked:
                prompt = self.prompts.text(request.prompt)
                answer = ""
                if "{answer}" in self.client.request:
                    answer = self.prompts.answer(request.output_len)
                line = request_line(self.client.request, prompt, answer, request.output_len)
                lines.write(line + "\n")
        command = filled(
            self.client.bench + (self.client.rate if point.rate is not None else ()),
            {
                **at.values,
                "requests": file,
                "count": count,
                "concurrency": point.concurrency if point.rate is None else count,
                "rate": point.rate,
                "run": seed,
                "result": result.name,
            },
        )
        arrive_s = 0.0 if point.rate is None else count / point.rate
        samples = at.client.run(command, at.server, self.clocks, arrive_s)
        try:
            found = parse_json(result.read_text(encoding="utf-8").splitlines()[-1])
            run = run_of(point, trace, found)
            refuse_other_traffic(run, asked)
        except PatcherError as error:  # requests failed: the server knows why
            at.server.check(DYING_S)
            raise at.server.failed(f"served badly: {error.message}") from error
        except (OSError, IndexError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            said = f"{type(error).__name__}: {problem(error)}"
            raise PatcherError(
                f"{self.job.client} wrote no result that can be read: {said}"
            ) from error
        clocks = block_clocks(samples)
        return run.model_copy(
            update={name: clocks[name] for name in ("sm_clock_mhz", "throttle_reasons")}
        )
