"""A judge on a Ray cluster: jobs go to the pool that everybody there shares (`ray_pool.py`)."""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from patcher.bench import (
    BusyError,
    Candidate,
    Evaluation,
    MissingError,
    PatcherError,
    UsageError,
    VerificationError,
)
from patcher.bench.judge import JudgeSettings, Progress
from patcher.judges import ray_address
from patcher.judges.jobs import JobFolder, JobResult, WorkerMachine
from patcher.judges.remote import RemoteJudge, UnreachableError, verdict

if TYPE_CHECKING:
    from patcher.judges.ray_pool import PoolReply
    from patcher.judges.ray_worker import PoolJob, PoolOutcome

POLL_S = 0.5
ANSWER_S = 300.0
"""Longest that a pool may take to answer: it may have to start first."""
FORGET_S = 5.0
"""Longest that a judge waits, when it ends, for the pool to hear that nobody asks any more."""
PROBE_S = 5.0
"""A pool that is silent for so long makes us look whether the cluster's head is there."""
HEAD_S = 30.0
"""A head that is gone for so long has ended: ray ends our process where it is away for 60 s."""
_RECONNECT_S = "3600"
"""The same 60 s, for a head that is away while the pool still answers."""
_OURS = "patcher-judging"
"""The namespace of a process that joined the cluster for its judges alone."""
_AT_ONCE = 32
_SAME = "install the same patcher, Python and ray on every node"
_AGAIN = "restart the Ray cluster to have it judged again"


class RayJudge(RemoteJudge):
    """`ray[:ADDRESS][@GPU]`: ADDRESS as `ray.init` takes it, GPU as Ray's `accelerator_type`."""

    def __init__(
        self,
        place: str,
        settings: JudgeSettings,
        request_id: str,
        counters: bool = False,
        report: Progress = lambda *_: None,
    ) -> None:
        super().__init__(place, settings, request_id, counters, report)
        self._cluster = Cluster(place)
        self._version = importlib.metadata.version("patcher")
        self._client = secrets.token_hex(8)
        self._open: dict[str, tuple[Any, PoolJob]] = {}
        self._done: dict[str, PoolOutcome] = {}

    def __exit__(self, *exc: object) -> None:
        for pool in [] if self._cluster.ended else self._pools():
            with suppress(MissingError):  # what nobody asks for is not begun after a while anyway
                self._cluster.answer(pool.forget.remote(self._client), FORGET_S)

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self._ask(candidate, None)
        self._poll()

    def submit(self, candidate: Candidate, settings: JudgeSettings | None = None) -> JobFolder:
        known = len(self._open)
        posted = self._ask(candidate, settings)
        if len(self._open) > known:
            pool, job = self._open[posted.digest]
            self._hand_over(pool, [job])
        return posted

    def gather(self, jobs: Sequence[JobFolder]) -> list[Evaluation]:
        """The verdicts, waited for."""
        while missing := [job for job in jobs if job.digest not in self._done]:
            replies = self._poll()
            for reply in replies:
                told = f"{reply.ready} of {reply.workers} Ray workers, {reply.waiting} jobs waiting"
                self.report(f"{reply.stage} ({told})", reply.step, reply.steps)
            if any(job.digest not in self._done for job in missing):
                time.sleep(POLL_S)
        return [self._taken(job) for job in jobs]

    def _ask(self, candidate: Candidate, settings: JudgeSettings | None) -> JobFolder:
        from patcher.judges.ray_worker import PoolJob

        posted = self.job(candidate, settings)
        if posted.digest not in self._done and posted.digest not in self._open:
            chosen = (settings or self.settings).device or candidate.language.traits.device
            on_cpu = candidate.language.compile_only or (chosen or self._cluster.usual) == "cpu"
            pool = self._cluster.pool("cpu" if on_cpu else "cuda")
            files = posted.job.files(candidate)
            job = PoolJob(name=posted.name, digest=posted.digest, files=files)
            self._open[posted.digest] = (pool, job)
        return posted

    def _pools(self) -> list[Any]:
        return list({id(pool): pool for pool, _ in self._open.values()}.values())

    def _poll(self) -> list[PoolReply]:
        """Ask for what is open, and hand over what is unknown: it is new, there was no room yet, or
        the pool was started again."""
        replies = []
        for pool in self._pools():
            mine = {digest: job for digest, (at, job) in self._open.items() if at is pool}
            reply: PoolReply = self._cluster.answer(pool.poll.remote(self._client, list(mine)))
            if reply.problem:
                raise UnreachableError(f"no Ray worker starts: {reply.problem}", _SAME)
            self._done.update(reply.done)
            for digest in reply.done:
                del self._open[digest]
            self._hand_over(pool, [mine[digest] for digest in reply.unknown])
            replies.append(reply)
        return replies

    def _hand_over(self, pool: Any, jobs: Sequence[PoolJob]) -> None:
        """As many as the pool has room for."""
        for first in range(0, len(jobs), _AT_ONCE):
            some = jobs[first : first + _AT_ONCE]
            if not self._cluster.answer(pool.submit.remote(self._client, some)):
                break

    def _taken(self, posted: JobFolder) -> Evaluation:
        outcome = self._done[posted.digest]
        if outcome.kind == "result":
            result = JobResult.model_validate_json(outcome.text)
            if result.machine.patcher != self._version:
                raise VerificationError(
                    f"a Ray worker that judged {posted.name} runs patcher {result.machine.patcher},"
                    f" not {self._version} as here",
                    f"{_SAME}; {_AGAIN}",
                )
            return verdict(result, posted, _AGAIN)
        del self._done[posted.digest]
        if outcome.kind == "busy":
            raise BusyError(f"a Ray worker could not time {posted.name}: {outcome.text}")
        if outcome.kind == "left":
            raise MissingError(
                f"a Ray worker lacks what {posted.name} needs: {outcome.text}", "repair its node"
            )
        raise PatcherError(f"{posted.name}: {outcome.text}", "its traceback is in the worker's log")

    @classmethod
    def usual_kind(cls, place: str) -> Literal["cpu", "cuda"]:
        return Cluster(place).usual

    @classmethod
    def hardware(cls, place: str, kind: Literal["cpu", "cuda"]) -> str:
        cluster = Cluster(place)
        pool = cluster.pool(kind)
        while (told := cluster.answer(pool.machine.remote())) is None:
            reply = cluster.answer(pool.poll.remote("", []))
            if reply.problem:
                raise UnreachableError(f"no Ray worker starts: {reply.problem}", _SAME)
            time.sleep(POLL_S)
        return WorkerMachine.model_validate_json(told).words[kind]


class Cluster:
    """The Ray cluster at `[ADDRESS][@GPU]`; without an address, `RAY_ADDRESS` or this machine's.

    Raises:
        MissingError: ray is not installed, or nothing answers there.
    """

    def __init__(self, place: str) -> None:
        try:
            import ray
        except ImportError as error:
            from patcher.extras import missing_package

            raise missing_package(error, "ray") from error
        named, _, self._gpu = place.partition("@")
        self._ray: Any = ray
        self._known: dict[str, Any] = {}
        if ray.is_initialized():  # by whoever calls us, or by us before
            ray_address.require_joined(named, ray.get_runtime_context().gcs_address)
        else:
            self._join(ray_address.answering(named, ray))
        self._head = ray.get_runtime_context().gcs_address
        self._seen = time.monotonic()
        self.ended = False

    def _join(self, address: str) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", _RECONNECT_S)
        try:
            with _own_signals():
                self._ray.init(
                    address=address,
                    namespace=_OURS,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
        except (OSError, ImportError, RuntimeError, ValueError) as error:
            raise MissingError(
                f"cannot join a Ray cluster at {ray_address.name(address)}: {_first(error)}",
                f"{_SAME}; if it asks for a token, set RAY_AUTH_MODE=token",
            ) from error
        with suppress(AttributeError):  # it would print errors of nodes and of others on stdout
            worker = self._ray._private.worker.global_worker
            worker.threads_stopped.set()
            worker.gcs_error_subscriber.close()

    def pool(self, kind: Literal["cpu", "cuda"]) -> Any:
        """The actor that has the jobs for a kind of device; it is started if there is none.

        Raises:
            MissingError: the cluster has no such GPU, or no CPU.
            UsageError: it has GPUs of several kinds.
        """
        if kind not in self._known:
            from patcher.judges.ray_pool import NAMESPACE, JudgePool

            if kind == "cpu" and not self._has_cpu():
                raise MissingError(
                    "no node of the Ray cluster has a CPU for work",
                    "add one that has: ray start --address=HOST:PORT --num-cpus=N",
                )
            place = "cpu" if kind == "cpu" else self._gpu_kind()
            self._known[kind] = (
                self._ray.remote(JudgePool)
                .options(
                    name=f"judges-{place}",
                    namespace=NAMESPACE,
                    get_if_exists=True,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=-1,
                    max_task_retries=-1,
                )
                .remote(place)
            )
        return self._known[kind]

    @property
    def usual(self) -> Literal["cpu", "cuda"]:
        """A GPU, if one was named or is there."""
        return "cuda" if self._gpu or self._kinds() else "cpu"

    def _has_cpu(self) -> bool:
        nodes = self._ray.nodes()
        return any(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in nodes)

    def _kinds(self) -> list[str]:
        """The cluster's kinds of GPU, as Ray's `accelerator_type` names them."""
        prefix = "accelerator_type:"
        resources = self._ray.cluster_resources()
        return sorted(name[len(prefix) :] for name in resources if name.startswith(prefix))

    def _gpu_kind(self) -> str:
        kinds = self._kinds()
        if self._gpu and self._gpu not in kinds:
            raise MissingError(
                f"the Ray cluster has no {self._gpu} GPU",
                f"name one that it has ({', '.join(kinds) or 'none'}), or add a node with one: "
                "ray start --address=HOST:PORT",
            )
        if not kinds:
            raise MissingError(
                "the Ray cluster has no GPU", "add a node with one: ray start --address=HOST:PORT"
            )
        if not self._gpu and len(kinds) > 1:
            raise UsageError(
                f"the Ray cluster has GPUs of several kinds: {', '.join(kinds)}",
                f"name one, as in --judge ray@{kinds[0]}",
            )
        return self._gpu or kinds[0]

    def answer(self, reference: Any, within_s: float = ANSWER_S) -> Any:
        """What a call gives. The wait is Python's, so that signals are heard.

        Raises:
            UnreachableError: the cluster has ended.
        """
        from ray.exceptions import RayError

        future, until = reference.future(), time.monotonic() + within_s
        self._seen = time.monotonic()
        try:
            while True:
                try:
                    return future.result(min(PROBE_S, max(0.0, until - time.monotonic())))
                except NoAnswer:
                    if future.done() or time.monotonic() >= until:
                        raise
                self._require_head()
        except (NoAnswer, RayError) as error:
            said = (str(error).strip().splitlines() or ["no answer"])[-1]
            raise UnreachableError(
                f"the pool of judges on the Ray cluster does not answer: {said}",
                f"see that the cluster runs (ray status); {_SAME}",
            ) from error

    def _require_head(self) -> None:
        """Raises:
        UnreachableError: the head is gone; a process that joined for us has left the cluster.
        """
        if ray_address.answers(self._head):
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > HEAD_S:
            self.ended = True
            if self._ray.get_runtime_context().namespace == _OURS:
                self._ray.shutdown()
            raise UnreachableError(
                f"the Ray cluster at {self._head} has ended",
                "start it again (ray start --head) and give the command again",
            )


def _first(error: Exception) -> str:
    """The first sentence of an error, with the lines that a colon announces."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines) if lines[0].endswith(":") else lines[0]


class _own_signals:
    """Puts handlers back that `ray.init` replaces."""

    def __enter__(self) -> None:
        self._before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)
