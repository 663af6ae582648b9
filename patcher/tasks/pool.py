"""Worker processes for jobs that may crash or never end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from pydantic import BaseModel

from patcher.bench.sandbox.die_with_parent import die_with_parent

JobFunction = Callable[..., BaseModel]


class JobFailed(Exception):
    """A job's end without a result that is no defect: its text is `WorkerReply.why`."""


def serve_jobs(load: Callable[[], Mapping[str, JobFunction]]) -> None:
    """What a worker does: say `ready`, then answer each JSON line on stdin with one on stdout.

    Args:
        load: imports what is needed and gives the jobs by name.
    """
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a job prints is no result
    jobs = load()
    results.write("ready\n")
    results.flush()
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        try:
            found: dict[str, Any] = {
                "result": jobs[job["job"]](**job["given"]).model_dump(mode="json")
            }
        except JobFailed as reason:
            found = {"failed": str(reason)}
        except Exception:
            found = {"unexpected": traceback.format_exc()}
        results.write(json.dumps(found) + "\n")
        results.flush()


class WorkerReply(NamedTuple):
    """What became of a job."""

    result: dict[str, Any] | None
    why: str = ""
    """Where there is no result: `timed out`, `crashed`, or the error's text."""


class WorkerPool:
    """Runs each job in one of several processes, which live on from job to job.

    A process that crashes, or needs longer than the time limit, is replaced; its job is over. An
    exception that no job expects is raised by the job's future.
    """

    def __init__(
        self, workers: int, timeout_s: float, module: str = "patcher.tasks.worker"
    ) -> None:
        """Set up the pool; processes start with their first job.

        Args:
            workers: number of processes.
            timeout_s: time limit of a job in seconds.
            module: says a line when it is ready, then answers each JSON line on stdin with one.
        """
        self._timeout_s = timeout_s
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker(module) for _ in range(workers)]
        for worker in self._all:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers)

    def submit(self, job: str, **given: Any) -> Future[WorkerReply]:
        """Queue a job of `patcher.tasks.worker` by its name."""
        return self._threads.submit(self._run, json.dumps({"job": job, "given": given}))

    def _run(self, line: str) -> WorkerReply:
        worker = self._idle.get()
        try:
            return worker.run(line, self._timeout_s)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.stop()
        self._threads.shutdown()
        for worker in self._all:
            worker.close()


class _Worker:
    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (until the pool is left)

    def run(self, line: str, timeout_s: float) -> WorkerReply:
        process = self._started()
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
            told = process.stdout.readline()
        except BrokenPipeError:
            told = ""
        finally:
            timer.cancel()
        if not told:
            _kill(process)
            self._process = None
            return WorkerReply(None, "timed out" if late.is_set() else "crashed")
        found = json.loads(told)
        if "unexpected" in found:
            raise RuntimeError(f"a worker failed:\n{found['unexpected']}")
        return WorkerReply(found.get("result"), found.get("failed", ""))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            # inductor's own processes would outlive a killed worker
            environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            self._process = subprocess.Popen(
                die_with_parent(sys.executable, "-P", "-m", self._module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env=environment,
                start_new_session=True,
            )
            if self._stopped:
                _kill(self._process)
            assert self._process.stdout is not None
            if not self._process.stdout.readline() and not self._stopped:  # imports take their time
                self._log.seek(0)
                said = self._log.read().decode(errors="replace").strip()
                raise RuntimeError(f"a worker does not start:\n{said[-2000:]}")
        return self._process

    def stop(self) -> None:
        self._stopped = True
        if self._process is not None:
            _kill(self._process)

    def close(self) -> None:
        self._log.close()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and what it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it has just died by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
