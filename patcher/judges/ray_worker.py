"""What runs on the nodes of a Ray cluster for `--judge ray`: workers, and builds beside them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import ray

from patcher.bench import Record
from patcher.bench.toolchains.native import CAPABILITY
from patcher.judges.jobs import read_result
from patcher.judges.seal import seal
from patcher.judges.worker import Worker, WorkerSummary, build_ahead

REPORT_S = 0.5
Told = tuple[str, tuple[int, int] | None]
"""A worker's `WorkerMachine` as JSON, and the compute capability of its GPU."""


class PoolJob(Record):
    """A job on its way: the name of its folder, and its files but the manifest."""

    name: str
    digest: str
    files: dict[str, str]


class PoolOutcome(Record):
    """What became of a job."""

    kind: Literal["result", "left", "busy", "failed"]
    """A `result`, or as `WorkerSummary.outcome`."""
    text: str
    """The result as JSON, or why there is none."""


class RayWorker:
    """`patcher worker` as an actor: one job at a time, on the GPU that Ray gave it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        _own_environment()
        self._digest, self._told = "", 0.0
        self._summaries: list[WorkerSummary] = []
        self._root = Path(tempfile.mkdtemp(prefix="patcher-ray-"))
        self._worker = self._opened()

    def _opened(self) -> Worker:
        return Worker(self._root, self._report, self._summaries.append).__enter__()

    def machine(self) -> Told:
        """What it judges on, and the GPU's compute capability."""
        import torch

        gpu = torch.cuda.is_available()
        capability = torch.cuda.get_device_capability() if gpu else None
        return self._worker.machine.model_dump_json(), capability

    def judge(self, job: PoolJob) -> PoolOutcome:
        """The outcome of one job."""
        self._digest = job.digest
        self._summaries.clear()
        seal(self._root / "jobs" / job.name, job.files)
        try:
            self._worker.serve()
            result = read_result(self._root / "results" / job.name)
        finally:
            for kind in ("jobs", "results"):
                shutil.rmtree(self._root / kind / job.name, ignore_errors=True)
        if result is not None:
            return PoolOutcome(kind="result", text=result.files()["result.json"])
        [summary] = self._summaries
        self._worker.__exit__()
        self._worker = self._opened()  # it would not take the job again
        if summary.outcome == "busy":
            return PoolOutcome(kind="busy", text=summary.detail)
        return PoolOutcome(
            kind="left" if summary.outcome == "left" else "failed", text=summary.detail
        )

    def _report(self, stage: str, done: int, total: int) -> None:
        if (now := time.monotonic()) - self._told > REPORT_S:
            self._told = now
            self._pool.progress.remote(self._digest, stage, done, total)


def build_job(job: PoolJob, capability: tuple[int, int] | None) -> None:
    """Compile a candidate into the node's cache, where the worker finds it."""
    _own_environment()
    if capability is not None:
        os.environ[CAPABILITY] = f"{capability[0]}.{capability[1]}"
    with tempfile.TemporaryDirectory(prefix="patcher-build-") as root:
        folder = Path(root) / job.name
        seal(folder, job.files)
        build_ahead(folder)


def _own_environment() -> None:
    """What Ray set for a process, as it is where there is no Ray."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # who was given no GPU leaves them alone
