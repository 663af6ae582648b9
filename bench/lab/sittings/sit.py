"""Serve the open jobs of an exchange folder within a limit of time: a `patcher worker DIR --once` a
GPU, watched.

A job that takes longer than --job-s is put off (moved to DIR/put-off) and the others go on; after
--limit-s all workers are ended. What was judged until then lies in DIR/results. Without jobs a
worker tells what its machine is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from patcher.bench.lab.gpu_queue import shares
from patcher.visible import one_line

POLL_S, GRACE_S = 0.25, 8.0
LATE_S = 240.0
"""Limit of a job that was put off before: the judge itself gives a first call 180 s."""
FRUITLESS = 2
"""Workers that may end on a GPU, one after the other, without a verdict."""
ANOTHER_MACHINE = 9


def machine_words() -> str:
    """What `require_same_device` compares, as far as it can change between sittings."""
    packages = []
    for name in ("torch", "triton"):
        try:
            packages.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            packages.append(f"no {name}")
    cards = asked_of_gpus("name,driver_version")
    return f"{cards[0] if cards else 'no GPU'}; {', '.join(packages)}"


def asked_of_gpus(fields: str) -> list[str]:
    """A line a GPU; none where nvidia-smi is not there."""
    words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def arrange(jobs: Path, late: set[str]) -> None:
    """A worker takes the oldest first, and keeps its judge open while settings stay the same: let
    those with equal settings be side by side, and last those that were put off before."""

    def place(folder: Path) -> tuple[bool, str, str]:
        try:
            job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
            settings = json.dumps(job["settings"], sort_keys=True)
        except (OSError, ValueError, TypeError, KeyError):
            settings = ""  # the worker says what is wrong with it
        return folder.name in late, settings, folder.name

    now = time.time() - 100_000
    for at, folder in enumerate(sorted(jobs.glob("[!.]*"), key=place)):
        os.utime(folder, (now + at, now + at))


class Sitting:
    """Workers, one a GPU, and what they are at."""

    def __init__(
        self,
        exchange: Path,
        log: Path,
        gpus: Sequence[str],
        limit_s: float,
        job_s: float,
        late: set[str],
    ) -> None:
        self.exchange, self.log, self.job_s, self.late = exchange, log, job_s, late
        self.began = time.monotonic()
        self.until = self.began + limit_s
        self.workers: dict[str, subprocess.Popen[bytes] | None] = dict.fromkeys(gpus)
        self.cpus = shares(gpus, os.sched_getaffinity(0)) if len(gpus) > 1 else {}
        self.fruitless = dict.fromkeys(gpus, 0)
        self.had = dict.fromkeys(gpus, 0)
        self.seen: dict[str, float] = {}
        """By job: when a worker was first seen at it."""
        self.put_off: list[str] = []

    def open_jobs(self) -> list[str]:
        return [
            each.name
            for each in sorted((self.exchange / "jobs").glob("[!.]*"))
            if not (self.exchange / "results" / each.name / "manifest.json").is_file()
        ]

    def run(self) -> None:
        """Until no job is left, or the time is over."""
        first = True
        try:
            while time.monotonic() < self.until:
                left = self.open_jobs()
                for gpu, worker in self.workers.items():
                    if worker is not None and worker.poll() is None:
                        self._watch(gpu, worker)
                        continue
                    if worker is not None:
                        fruit = len(left) < self.had[gpu]
                        self.fruitless[gpu] = 0 if fruit else self.fruitless[gpu] + 1
                    going = (left or first) and self.fruitless[gpu] < FRUITLESS
                    self.had[gpu] = len(left)
                    self.workers[gpu] = self._start(gpu) if going else None
                first = False
                if all(worker is None for worker in self.workers.values()):
                    self._tell_fruitless()
                    return
                time.sleep(POLL_S)
            print(f"out of time after {time.monotonic() - self.began:.0f} s", flush=True)
        finally:
            for worker in self.workers.values():
                if worker is not None:
                    stop(worker)

    def _tell_fruitless(self) -> None:
        """Why nobody is at work although jobs are left: who holds the host must know it there."""
        for gpu in (gpu for gpu, times in self.fruitless.items() if times >= FRUITLESS):
            file = self.log_of(gpu)
            said = one_line(file.read_text(encoding="utf-8", errors="replace")[-2000:], 2000)
            print(f"{file.name}: {FRUITLESS} workers ended without a verdict: ...{said[-300:]}")

    def log_of(self, gpu: str) -> Path:
        """What the workers of a GPU say."""
        return self.log / f"worker-{gpu or 'none'}.log"

    def command(self, gpu: str) -> Sequence[str]:
        """The worker of a GPU, with CPUs of its own."""
        own = ",".join(map(str, self.cpus.get(gpu, ())))
        worker = (sys.executable, "-P", "-m", "patcher", "worker", str(self.exchange), "--once")
        return [*(["taskset", "-c", own] if own else []), *worker]

    def _start(self, gpu: str) -> subprocess.Popen[bytes]:
        with self.log_of(gpu).open("ab") as log:
            return subprocess.Popen(
                self.command(gpu),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _watch(self, gpu: str, worker: subprocess.Popen[bytes]) -> None:
        """Put off the job that a worker takes too long for."""
        for lock in (self.exchange / "claims").glob("*.lock"):
            if str(worker.pid) not in lock.read_text(encoding="ascii").split():
                continue
            name, now = lock.stem, time.monotonic()
            took = now - self.seen.setdefault(name, now)
            if took > (max(self.job_s, LATE_S) if name in self.late else self.job_s):
                print(f"{name}: put off after {took:.0f} s", flush=True)
                stop(worker)
                target = self.exchange / "put-off"
                target.mkdir(exist_ok=True)
                (self.exchange / "jobs" / name).rename(target / name)
                self.put_off.append(name)
                self.had[gpu] += 1  # so that it is not counted as fruitless
            return

    def lines(self) -> Iterator[str]:
        """What became of each job."""
        for file in sorted((self.exchange / "results").glob("[!.]*/result.json")):
            yield f"{file.parent.name}: {told(json.loads(file.read_text(encoding='utf-8')))}"
        yield from (f"{name}: put off" for name in self.put_off)
        yield from (f"{name}: not judged" for name in self.open_jobs())
        yield f"judging took {time.monotonic() - self.began:.0f} s"


def told(result: dict[str, object]) -> str:
    """A result of a worker in one line."""
    verdict, refusal = result.get("evaluation"), result.get("refusal")
    if not isinstance(verdict, dict):
        return f"refused: {refusal.get('message') if isinstance(refusal, dict) else refusal}"
    words = [str(verdict["outcome"])]
    if speedup := verdict.get("geomean_speedup"):
        words.append(f"{speedup:.3f} x {verdict.get('baseline')}")
    failed = [each for each in verdict.get("checks", ()) if not each["passed"]]
    words += [f"{each['name']}: {each['detail'][:160]}" for each in failed[:1]]
    return f"{' '.join(words)} ({verdict.get('total_s') or 0:.1f} s)"


def stop(worker: subprocess.Popen[bytes]) -> None:
    """Ctrl-C first, which gives the job in hand free; then its whole session."""
    if worker.poll() is None:
        worker.send_signal(signal.SIGINT)
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            print(f"worker {worker.pid} is killed", flush=True)
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    worker.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sitting.sh")
    parser.add_argument("exchange", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--limit-s", type=float, default=400, help="for all jobs together")
    parser.add_argument("--job-s", type=float, default=120, help="for one")
    parser.add_argument("--gpus", help="their numbers, with commas; default: all")
    parser.add_argument("--any-machine", action="store_true", help="also if it is another one")
    given = parser.parse_args(arguments)
    # where it was ignored, workers would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given.log.mkdir(parents=True, exist_ok=True)
    (given.exchange / "jobs").mkdir(parents=True, exist_ok=True)
    machine, expected = machine_words(), given.exchange / "expected.txt"
    (given.log / "machine.txt").write_text(f"{machine}\n", encoding="utf-8")
    before = expected.read_text(encoding="utf-8").strip() if expected.is_file() else machine
    if before != machine:
        print(f"this is another machine ({machine}) than that of verdicts before ({before})")
        if not given.any_machine:
            return ANOTHER_MACHINE
    late_file = given.exchange / "late.txt"
    late = set(late_file.read_text(encoding="utf-8").split()) if late_file.is_file() else set()
    arrange(given.exchange / "jobs", late)
    gpus = given.gpus.split(",") if given.gpus else asked_of_gpus("index") or [""]
    sitting = Sitting(given.exchange, given.log, gpus, given.limit_s, given.job_s, late)
    sitting.run()
    text = "\n".join(sitting.lines()) + "\n"
    (given.log / "verdicts.txt").write_text(text, encoding="utf-8")
    print(text, end="", flush=True)
    return 1 if sitting.open_jobs() or sitting.put_off else 0


if __name__ == "__main__":
    sys.exit(main())
