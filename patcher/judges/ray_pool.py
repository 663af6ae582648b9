"""The pool of workers in a Ray cluster that `--judge ray` shares with everybody there.

The pool is a detached actor, one for each kind of device. Two lanes lead to each worker: while one
job is judged, the next is compiled by a task on a CPU of the same node. Ray places and restarts.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from patcher.bench import Record, UsageError
from patcher.judges.jobs import JobResult, Refusal, WorkerMachine
from patcher.judges.ray_worker import PoolJob, PoolOutcome, RayWorker, Told, build_job
from patcher.judges.worker import MOST_ATTEMPTS

NAMESPACE = "patcher"
MOST_JOBS = 512
"""Jobs that a pool holds without a verdict; whoever has more keeps them until there is room."""
MOST_VERDICTS = 4096
"""Verdicts that a pool remembers, the newest; a job among them is not judged again."""
LEASE_S = 120.0
"""A job that nobody has asked for in so long is dropped before it is begun."""
IDLE_S = 600.0
"""Without a job for so long, a pool gives its GPUs back to the cluster."""
RECONCILE_S = 3.0
RETRY_S = 60.0
"""After so long a node is tried again on which no worker started."""


class PoolReply(Record):
    """What a pool knows of the jobs that it was asked for."""

    done: dict[str, PoolOutcome]
    unknown: tuple[str, ...]
    """Never handed over, or forgotten since."""
    stage: str
    """Of one of the jobs, with its progress."""
    step: int
    steps: int
    waiting: int
    """Jobs of everybody that no worker has yet."""
    ready: int
    """Workers that can judge, of `workers`."""
    workers: int
    judged: int
    """Jobs that were judged since the pool began."""
    problem: str
    """Why there will be no verdict, if so."""


@dataclass
class _Asked:
    """A job without a verdict."""

    job: PoolJob
    clients: dict[str, float] = field(default_factory=dict)
    """Who asks, and when last."""
    stage: tuple[str, int, int] = ("waiting", 0, 1)
    begun: bool = False
    deaths: int = 0

    @property
    def wanted(self) -> bool:
        return any(time.monotonic() - asked < LEASE_S for asked in self.clients.values())


@dataclass
class _Place:
    """A worker and where it is."""

    node: str
    cpus: float
    actor: Any
    ready: asyncio.Future[Told]
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    lanes: list[asyncio.Task[None]] = field(default_factory=list)


class JudgePool:
    """The workers of one kind of device and the jobs for them: an asynchronous actor.

    Args:
        kind: `cpu`, or a GPU as Ray's `accelerator_type` names it.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._asked: dict[str, _Asked] = {}
        self._done: OrderedDict[str, PoolOutcome] = OrderedDict()
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._places: list[_Place] = []
        self._broken: dict[str, tuple[float, str]] = {}
        self._heard = time.monotonic()
        self._judged_count = 0
        self._keeper: asyncio.Task[None] | None = None

    async def submit(self, client: str, jobs: Sequence[PoolJob]) -> bool:
        """Take jobs over, as many as there is room for; those that are known are not doubled.
        Whether there is room for more."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        self._heard = time.monotonic()
        for job in jobs:
            if job.digest in self._done or len(self._asked) >= MOST_JOBS:
                continue
            if job.digest not in self._asked:
                self._asked[job.digest] = _Asked(job)
                self._queue.put_nowait(job.digest)
            self._asked[job.digest].clients[client] = time.monotonic()
        return len(self._asked) < MOST_JOBS

    async def poll(self, client: str, digests: Sequence[str]) -> PoolReply:
        """What became of these jobs. To ask is to want them still."""
        self._heard = time.monotonic()
        unknown = [one for one in digests if one not in self._asked and one not in self._done]
        mine = [self._asked[one] for one in digests if one in self._asked]
        for asked in mine:
            asked.clients[client] = self._heard
        done = {one: self._done[one] for one in digests if one in self._done}
        for digest, outcome in done.items():
            if outcome.kind != "result":
                del self._done[digest]  # whoever asks again has it tried again
        stage = max((asked.stage for asked in mine if asked.begun), default=("waiting", 0, 1))
        ready = sum(place.ready.done() for place in self._places)
        reasons = {why for _, why in self._broken.values()}
        if broken := "" if self._places else "; ".join(sorted(reasons)):
            self._broken.clear()  # it is told once: the next command finds what was repaired
        return PoolReply(
            done=done,
            unknown=tuple(unknown),
            stage=stage[0],
            step=stage[1],
            steps=stage[2],
            waiting=sum(not asked.begun for asked in self._asked.values()),
            ready=ready,
            workers=len(self._places),
            judged=self._judged_count,
            problem=broken,
        )

    async def forget(self, client: str) -> None:
        """Nobody there waits any more. What is being judged ends, and its verdict is kept."""
        for asked in self._asked.values():
            asked.clients.pop(client, None)

    async def progress(self, digest: str, stage: str, done: int, total: int) -> None:
        """How far the worker with this job is."""
        if digest in self._asked:
            self._asked[digest].stage = (stage, done, total)

    async def machine(self) -> str | None:
        """What the first worker that is ready judges on; None: none is yet."""
        await self.submit("", ())
        found = [p.ready for p in self._places if p.ready.done() and not p.ready.exception()]
        return found[0].result()[0] if found else None

    async def _keep(self) -> None:
        """Workers where the cluster has room for them, none where a node has gone."""
        while True:
            try:
                self._reconcile()
            except Exception:  # the head does not answer for a while
                traceback.print_exc()
            await asyncio.sleep(RECONCILE_S)

    def _reconcile(self) -> None:
        now = time.monotonic()
        idle = not self._asked and now - self._heard > IDLE_S
        nodes = {} if idle else _nodes()
        for place in [each for each in self._places if each.node not in nodes]:
            self._remove(place)
        for node, (since, _) in list(self._broken.items()):
            if now - since > RETRY_S:
                del self._broken[node]
        for node, resources in nodes.items():
            have = sum(place.node == node for place in self._places)
            if node not in self._broken:
                for _ in range(have, workers_of(self._kind, resources)):
                    self._add(node, resources.get("CPU", 0))

    def _add(self, node: str, cpus: float) -> None:
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        on_gpu = self._kind != "cpu"
        actor = (
            ray.remote(RayWorker)
            .options(
                num_cpus=1,
                num_gpus=int(on_gpu),
                accelerator_type=self._kind if on_gpu else None,
                scheduling_strategy=here,
                max_restarts=-1,
                max_task_retries=0,  # the pool gives the job to whichever worker is free
            )
            .remote(ray.get_runtime_context().current_actor)
        )
        place = _Place(node, cpus, actor, _told(actor))
        place.lanes = [asyncio.create_task(self._lane(place)) for _ in range(2)]
        self._places.append(place)

    def _remove(self, place: _Place) -> None:
        if place in self._places:
            self._places.remove(place)
            for lane in place.lanes:
                lane.cancel()
            place.ready.cancel()
            ray.kill(place.actor)

    async def _lane(self, place: _Place) -> None:
        while True:
            try:
                machine, _ = await asyncio.shield(place.ready)
            except RayError as error:
                if place.node in _nodes():
                    told = str(error).strip().splitlines()[-1]
                    self._broken[place.node] = (time.monotonic(), told)
                self._remove(place)
                return
            asked = self._asked.get(await self._queue.get())
            if asked is None:
                continue
            if not asked.wanted:
                del self._asked[asked.job.digest]
                continue
            asked.begun = True
            try:
                await self._judged(place, asked)
            except (RayActorError, OutOfMemoryError):
                place.ready = _told(place.actor)  # Ray starts it again
                self._died(asked, machine)
            except asyncio.CancelledError:  # its node has gone
                self._again(asked)
                raise
            except Exception as error:  # the worker's own defect: the jobs behind it are served
                self._finish(asked, PoolOutcome(kind="failed", text=str(error).strip()[-1000:]))

    async def _judged(self, place: _Place, asked: _Asked) -> None:
        asked.stage = ("build", 0, 1)
        _, capability = await asyncio.shield(place.ready)
        build = ray.remote(build_job).options(
            num_cpus=min(1, max(0, place.cpus - 1)),
            max_retries=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
        )
        with suppress(RayError):  # the worker builds again what was not built, and says why
            await build.remote(asked.job, capability)
        async with place.busy:
            await asyncio.shield(place.ready)
            outcome: PoolOutcome = await place.actor.judge.remote(asked.job)
        self._finish(asked, outcome)

    def _died(self, asked: _Asked, machine: str) -> None:
        asked.deaths += 1
        if asked.deaths < MOST_ATTEMPTS:
            self._again(asked)
            return
        refusal = UsageError(
            f"it ended {asked.deaths} workers that judged it", "look at the worker's machine"
        )
        result = JobResult(
            job=asked.job.digest,
            refusal=Refusal.model_validate(refusal.as_dict()),
            machine=WorkerMachine.model_validate_json(machine),
        )
        text = result.files()["result.json"]
        self._finish(asked, PoolOutcome(kind="result", text=text))

    def _again(self, asked: _Asked) -> None:
        asked.begun, asked.stage = False, ("waiting", 0, 1)
        self._queue.put_nowait(asked.job.digest)

    def _finish(self, asked: _Asked, outcome: PoolOutcome) -> None:
        del self._asked[asked.job.digest]
        self._judged_count += 1
        self._done[asked.job.digest] = outcome
        while len(self._done) > MOST_VERDICTS:
            self._done.popitem(last=False)


def workers_of(kind: str, resources: Mapping[str, float]) -> int:
    """Workers that a node has room for: one a GPU, or one on its CPUs, which the judge pins."""
    if kind == "cpu":
        return int(resources.get("CPU", 0) >= 1)
    return int(resources.get("GPU", 0)) if f"accelerator_type:{kind}" in resources else 0


def _told(actor: Any) -> asyncio.Future[Told]:
    told: asyncio.Future[Told] = asyncio.ensure_future(
        actor.machine.options(max_task_retries=-1).remote()
    )
    return told


def _nodes() -> dict[str, dict[str, float]]:
    """Resources of the nodes that are alive, by id."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
