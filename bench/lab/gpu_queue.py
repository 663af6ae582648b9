"""Run many measurements on the GPUs of one host, each with GPUs and a share of the CPUs of its own,
so that what one compiles disturbs another less: `python -m patcher.bench.lab.gpu_queue PLAN OUT
--set NAME=VALUE...`.

PLAN is TOML, a table a job, tried in the order of the file: `run` (a bash command, in OUT), `gpus`
(default 1), `limit_s`, `after` (jobs that have to have ended), `setup` (a file of the environment
that is sourced first). Words like `{this}` in them are replaced by `--set this=...`, in `run` as
one word of the shell, whatever spaces it has; `{these...}` are several, as they are given. Of each
job OUT/jobs/NAME.log is what it printed and OUT/jobs/NAME.json how it ended; a second call runs
what has not ended with 0. OUT/queue.txt is the state of all.

`--detach` leaves a queue that outlives the shell and all of its process group; `--look SECONDS`
waits for it so long, tells how its jobs stand, and fails at once if it does not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from patcher.bench import write_atomically

POLL_S = 0.5
PROCESS = "queue.pid"
"""The file with the number of the queue's process."""
STARTED_S = 60.0
TOLD = 160
"""Characters of a log's end that `--look` shows."""
GRACE_S = 10.0
"""Seconds that a job has to end after it is asked to."""


@dataclass(frozen=True)
class GpuJob:
    """One measurement."""

    name: str
    run: str
    gpus: int = 1
    limit_s: float = 600
    after: tuple[str, ...] = ()
    setup: str | None = None

    @property
    def command(self) -> str:
        """What bash runs."""
        return f"source {shlex.quote(self.setup)} && {{ {self.run}\n}}" if self.setup else self.run


class PlanError(Exception):
    """A plan that cannot be run, in one sentence."""


def read_plan(path: Path, values: Mapping[str, str], only: Iterable[str] = ()) -> list[GpuJob]:
    """The jobs of a plan, or those that are named, in its order.

    Raises:
        PlanError: a value that was not set, an unknown field or job, or jobs that wait in a circle.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    chosen = set(only)
    if unknown := sorted(chosen - set(tables)):
        raise PlanError(f"{path} has no job {', '.join(unknown)}, but {', '.join(tables)}")

    def filled(text: str, of_shell: bool) -> str:
        def value(found: re.Match[str]) -> str:
            if found[1] not in values:
                raise PlanError(f"{path}: no value for {found[0]}: add --set {found[1]}=...")
            given = values[found[1]]
            return shlex.quote(given) if of_shell and not found[2] else given

        return re.sub(r"\{([a-z_0-9]+)(\.\.\.)?\}", value, text)

    jobs: list[GpuJob] = []
    known = set[str]()
    for name, table in tables.items():
        if missing := set(table.get("after", ())) - known:
            raise PlanError(f"{path}: {name} is after {', '.join(missing)}, not before it")
        known.add(name)
        if chosen and name not in chosen:
            continue
        fields: dict[str, Any] = {
            key: filled(value, key == "run") if isinstance(value, str) else value
            for key, value in table.items()
        }
        fields["after"] = tuple(fields.get("after", ()))
        try:
            jobs.append(GpuJob(name, **fields))
        except TypeError as error:
            raise PlanError(f"{path}: job {name}: {error}") from error
    return jobs


class GpuQueue:
    """Starts what can be started, and writes down how each job ended."""

    def __init__(self, jobs: Sequence[GpuJob], gpus: Sequence[str], out: Path) -> None:
        self.jobs, self.out = list(jobs), out
        self.names = {job.name for job in jobs}
        self.free, self.cpus = list(gpus), shares(gpus, os.sched_getaffinity(0))
        if most := [job.name for job in jobs if job.gpus > len(gpus)]:
            raise PlanError(f"{', '.join(most)} needs more than the {len(gpus)} GPUs of this host")
        self.ended: dict[str, int] = {}
        self.running: dict[str, tuple[subprocess.Popen[bytes], list[str], float, IO[bytes]]] = {}
        (out / "jobs").mkdir(parents=True, exist_ok=True)
        (out / PROCESS).write_text(str(os.getpid()), encoding="ascii")
        for job in jobs:
            if (file := self._file(job.name)).is_file() and (code := _code(file)) == 0:
                self.ended[job.name] = code

    def run(self) -> int:
        """Run all; 1 if one did not end with 0."""
        try:
            while len(self.ended) < len(self.jobs):
                self._collect()
                self._start()
                self._tell()
                time.sleep(POLL_S)
        finally:
            for name in list(self.running):
                self._stop(name)
        self._tell()
        return int(any(self.ended.values()))

    def _start(self) -> None:
        for job in self.jobs:
            if job.name in self.ended or job.name in self.running:
                continue
            if any(name in self.names and name not in self.ended for name in job.after):
                continue
            if len(self.free) < job.gpus:
                return  # what comes later in the plan does not overtake it
            taken, self.free = self.free[: job.gpus], self.free[job.gpus :]
            log = (self.out / "jobs" / f"{job.name}.log").open("wb")
            own = ",".join(str(cpu) for gpu in taken for cpu in self.cpus[gpu])
            process = subprocess.Popen(
                [*(["taskset", "-c", own] if own else []), "bash", "-c", job.command],
                cwd=self.out,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(taken)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.running[job.name] = process, taken, time.monotonic(), log

    def _collect(self) -> None:
        limits = {job.name: job.limit_s for job in self.jobs}
        for name, (process, _, began, _) in list(self.running.items()):
            over = time.monotonic() - began > limits[name]
            if over or process.poll() is not None:
                self._stop(name)

    def _stop(self, name: str) -> None:
        process, taken, began, log = self.running.pop(name)
        late = process.poll() is None
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:  # the whole session, so that no engine is left on the GPU
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                break
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue
        log.close()
        code = 124 if late else process.wait()
        self.ended[name] = code
        self.free = sorted([*self.free, *taken])
        seconds = round(time.monotonic() - began, 1)
        text = json.dumps({"code": code, "seconds": seconds, "gpus": taken})
        self._file(name).write_text(text + "\n", encoding="utf-8")

    def _tell(self) -> None:
        lines = []
        for job in self.jobs:
            if job.name in self.running:
                _, taken, began, _ = self.running[job.name]
                state = f"runs on {','.join(taken)} for {time.monotonic() - began:.0f} s"
            elif job.name in self.ended:
                state = f"ended with {self.ended[job.name]}"
            else:
                state = "waits"
            lines.append(f"{job.name:24s} {state}\n")
        write_atomically(self.out / "queue.txt", "".join(lines))  # it is read meanwhile

    def _file(self, name: str) -> Path:
        return self.out / "jobs" / f"{name}.json"


def _code(file: Path) -> int:
    return int(json.loads(file.read_text(encoding="utf-8"))["code"])


def shares(gpus: Sequence[str], cpus: Iterable[int]) -> dict[str, list[int]]:
    """By GPU, its part of the CPUs: whole cores that are neighbours, since the threads of a core
    share its units, and neighbours caches and memory.
    """
    known = sorted(cpus, key=core_of)
    size = len(known) // len(gpus)
    return {gpu: known[size * place : size * (place + 1)] for place, gpu in enumerate(gpus)}


def core_of(cpu: int) -> tuple[int, int, int]:
    """Socket, core and number of a CPU; zeros for what the kernel does not tell."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        socket, core = (
            int((topology / name).read_text(encoding="ascii"))
            for name in ("physical_package_id", "core_id")
        )
    except OSError:
        return 0, 0, cpu
    return socket, core, cpu


def gpus_here() -> list[str]:
    """The numbers of the GPUs that may be used.

    Raises:
        PlanError: there is none.
    """
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen.split(",")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise PlanError(f"no GPU: nvidia-smi did not run ({error})") from error
    return listed.stdout.split()


def detach(out: Path, words: Sequence[str]) -> int:
    """Start a queue in a session of its own, and wait until it begins; 1 if it ends before."""
    out.mkdir(parents=True, exist_ok=True)
    (out / PROCESS).unlink(missing_ok=True)
    with (out / "queue.log").open("wb") as log:
        queue = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + STARTED_S
    while not (out / PROCESS).exists():
        if queue.poll() is not None or time.monotonic() > deadline:
            print((out / "queue.log").read_text(encoding="utf-8"), file=sys.stderr)
            return queue.poll() or 1
        time.sleep(POLL_S / 10)
    return 0


def look(out: Path, seconds: float) -> int:
    """Wait for a queue, and tell how its jobs stand; 1 if it neither runs nor has ended."""
    deadline = time.monotonic() + seconds
    while (runs := _runs(out)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    state = out / "queue.txt"
    told = state.read_text(encoding="utf-8") if state.exists() else "no queue has begun here\n"
    print(told, end="")
    for log in sorted((out / "jobs").glob("*.log")):
        end = log.read_bytes()[-TOLD:].decode("utf-8", "replace")
        print(f"-- {log.stem}: {' '.join(end.split())}")
    if runs or all(" ended with " in line for line in told.splitlines()):
        return 0
    print("error: the queue does not run", file=sys.stderr)
    return 1


def _runs(out: Path) -> bool:
    try:
        pid = int((out / PROCESS).read_text(encoding="ascii"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    return b"gpu_queue" in command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="patcher.bench.lab.gpu_queue")
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="jobs, with commas")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--detach", action="store_true", help="leave it running in the background")
    parser.add_argument("--look", type=float, metavar="SECONDS", help="wait for a queue, and tell")
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(words)
    if given.look is not None:
        return look(given.out, given.look)
    # what was started ends with it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        values = dict(each.split("=", 1) for each in given.set)
        jobs = read_plan(given.plan, values, given.only.split(",") if given.only else ())
        if given.detach:
            return detach(given.out.resolve(), [word for word in words if word != "--detach"])
        return GpuQueue(jobs, gpus_here(), given.out.resolve()).run()
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
