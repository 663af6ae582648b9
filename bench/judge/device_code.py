"""A candidate's captured calls in a process of the judge's, which holds no host code of it.

The candidate's process describes its captured calls as plain data: machine code, parameters, order
and memory (`bench/runner/handover.py`). A second process builds graphs from it at the same
addresses, and the judge times and checks these. No code of the candidate can act between the
command and the reply there: whatever was handed over must compute the right values from inputs that
it has not seen. The machine code comes from the candidate, so this process is confined as well.
"""

from __future__ import annotations

import math
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

from patcher.bench.errors import BusyError, MissingError
from patcher.bench.judge.evaluation import Grade
from patcher.bench.judge.memory_file import CAPACITY
from patcher.bench.judge.process import START_S, Runner
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sets import CallSets
from patcher.bench.judge.zygote import Limits, RunnerFailure, Zygote
from patcher.bench.ops.contract import Point

BUSY_FACTOR = 3.0
"""How much longer than usual a copy takes on a GPU that others use, which it has in slices."""
WAITS_S = (0.0, 0.01, 0.1, 1.0)
"""Seconds before each look at whether the GPU is idle."""
_REASON_LIMIT = 300


class DeviceCode:
    """Carries captured calls over, point by point. A context manager.

    Args:
        zygote: forks the process.
        limits: limits of the process.
        candidate: the candidate's process.
        idle_us: microseconds of a copy in a process that has the GPU to itself.
    """

    def __init__(
        self, zygote: Zygote, limits: Limits, candidate: Runner, idle_us: float = math.inf
    ) -> None:
        self._zygote, self._limits, self._candidate = zygote, limits, candidate
        self._idle_us = idle_us
        self._runner: Runner | None = None
        self._starting: Future[None] | None = None
        self.carried = False
        """Whether the calls that were captured last are here."""
        self.complete = False
        """Whether its process says that nothing was left out."""
        self._points = 0
        self._reasons: list[str] = []

    def __enter__(self) -> Self:
        self._begin()  # it takes seconds, in which the candidate is loaded
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    @property
    def runner(self) -> Runner:
        """The process that holds the calls.

        Raises:
            MissingError: this machine cannot start it.
        """
        if self._runner is None:
            self._begin()
        assert self._runner is not None
        if self._starting is not None:
            self._starting.result()
        return self._runner

    def _begin(self) -> None:
        self._runner = Runner(self._zygote, self._limits, trusted=False)
        thread = ThreadPoolExecutor(1)
        self._starting = thread.submit(_start, self._runner)
        thread.shutdown(wait=False)

    @property
    def grade(self) -> Grade:
        """How the calls were timed and checked."""
        return Grade.OWN_PROCESS if self._reasons or not self._points else Grade.DEVICE_CODE

    @property
    def reason(self) -> str:
        """Why not all were carried; empty if they were."""
        return "; ".join(self._reasons)[:_REASON_LIMIT]

    @property
    def said(self) -> str:
        """The grade in words."""
        if self.grade is Grade.DEVICE_CODE:
            return "timed and checked in a process that holds none of its host code"
        return f"judged in {self.grade}, which is a lower grade: {self.reason}"

    def take(self, sets: CallSets, stock: RandomPool, point: Point, timeout_s: float) -> bool:
        """Carry the calls over that the candidate's process captured last.

        Args:
            sets: the calls' buffer sets; their values do not matter.
            stock: what large tensors are mixed from.
            point: their point, for a reason why it cannot be done.
            timeout_s: time limit in seconds of each command.

        Returns:
            Whether they are here.

        Raises:
            RunnerFailure: the candidate's process ended.
        """
        self.carried = False
        self._points += 1
        try:
            told = self._candidate.command("handover", timeout_s)
        except RunnerFailure as failure:
            if failure.fatal:
                raise
            return self.refuse(point, failure.message)
        if "reason" in told:
            return self.refuse(point, str(told["reason"]))
        try:
            self.complete = not told["notes"]
            document, buffers = _places(told["document"]), _places(told["sets"])
            if sum(document) > CAPACITY:
                raise ValueError("it takes too many bytes")
            stock.lend(self.runner)
            self.runner.send(self._candidate.handed(sum(document)))
            self.runner.command(
                "adopt",
                timeout_s,
                document=document,
                buffers=buffers,
                plan=sets.plan.model_dump(),
                sets=len(sets.cases),
            )
        except (RunnerFailure, MissingError, KeyError, TypeError, ValueError) as error:
            text = error.message if isinstance(error, RunnerFailure) else str(error)
            return self.refuse(point, f"what it handed over cannot be built again: {text}")
        self.carried = True
        return True

    def refuse(self, point: Point, reason: str) -> bool:
        """Judge the calls in the candidate's own process, and say why. Returns False."""
        self.carried = False
        self._close()  # a failed kernel leaves a process that cannot go on
        reason = reason[:_REASON_LIMIT].encode("utf-8", "replace").decode()
        if all(not each.endswith(reason) for each in self._reasons):
            self._reasons.append(f"{point.label()}: {reason}")
        return False

    def left_behind(self, baseline: Runner) -> str | None:
        """What a candidate did that keeps the GPU busy while its process is stopped, if it does.

        Raises:
            BusyError: another program keeps it busy.
        """
        if self._is_idle(baseline):
            return None
        self._candidate.kill()
        if self._is_idle(baseline):
            return "left work on the GPU that ran on while the baseline was to be timed"
        raise BusyError(
            "another program uses this GPU", "stop it, or judge on another machine (--judge)"
        )

    def _is_idle(self, baseline: Runner) -> bool:
        """Whether copies take no longer than on an idle GPU, now or soon."""
        for wait_s in WAITS_S:
            time.sleep(wait_s)
            times = baseline.command("idle")["times_ns"]
            if statistics.median(times) / 1e3 <= BUSY_FACTOR * self._idle_us:
                return True
        return False

    def _close(self) -> None:
        if self._runner is not None:
            if self._starting is not None:
                wait([self._starting])
            self._runner.close()
            self._runner = self._starting = None


def _start(runner: Runner) -> None:
    """Start the process, and import there what a profile imports, which takes seconds as well."""
    runner.start()
    runner.command("profiler", START_S)


def _places(value: Any) -> list[int]:
    """Two integers of an untrusted reply.

    Raises:
        TypeError, ValueError: it is something else.
    """
    offset, size = value
    if not (type(offset) is int and type(size) is int and offset >= 0 and size > 0):
        raise ValueError("its reply names no place")
    return [offset, size]
