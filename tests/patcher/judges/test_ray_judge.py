"""The judge on Ray: a real cluster of one node, workers killed in mid-job, candidates that look
around."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray_cluster import ray_cluster

from patcher import bench
from patcher.bench import (
    BusyError,
    Candidate,
    Evaluation,
    Language,
    MissingError,
    Outcome,
    UsageError,
    VerificationError,
)
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.sandbox.process_tree import descendants
from patcher.judges import open_judges, ray_judge, remote_judge, resolved_judge
from patcher.judges.jobs import JobResult, Refusal
from patcher.judges.ray_judge import Cluster, RayJudge
from patcher.judges.remote import UnreachableError
from patcher.judges.worker import this_machine

OP = bench.load_op("fused_add_rms_norm")
GOOD = next(candidate for info, candidate in OP.solutions() if info.name == "cpu_simd").source
QUICK = JudgeSettings(
    baseline="eager", pairs=3, threads=1, calls=20, lives_s=0.0, points=1, precision_pct=100.0
)
TIMES = {"total_s", "build_s", "phases_s"}
LOOKS_AROUND = """
#include <tvm/ffi/container/tensor.h>
#include <arpa/inet.h>
#include <cstring>
#include <dirent.h>
#include <stdexcept>
#include <string>
#include <unistd.h>
extern char** environ;
static std::string names(const char* folder) {
  std::string found;
  if (DIR* open = opendir(folder))
    while (dirent* entry = readdir(open))
      if (entry->d_name[0] != '.') found += std::string(" ") + folder + "/" + entry->d_name;
  return found;
}
void fused_add_rms_norm(tvm::ffi::TensorView, tvm::ffi::TensorView, tvm::ffi::TensorView, double) {
  std::string seen;
  for (char** each = environ; *each; ++each)
    if (!strncmp(*each, "RAY", 3)) seen += std::string(" ") + *each;
  seen += names("/dev/shm") + names("SESSION");
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(PORT);
  inet_pton(AF_INET, "HOST", &at.sin_addr);
  int handle = socket(AF_INET, SOCK_STREAM, 0);
  if (handle >= 0 && !connect(handle, (sockaddr*)&at, sizeof at)) seen += " gcs";
  throw std::runtime_error("seen:[" + seen + "]");
}
"""


def cpp(source: str) -> Candidate:
    return Candidate(op=OP.name, language=Language.CPP, source=source)


def untimed(evaluation: Evaluation) -> dict[str, Any]:
    return evaluation.model_dump(mode="json", exclude=TIMES)


def kill_worker(title: str) -> bool:
    """Kill a process of this cluster by the name that Ray gives it."""
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if words.startswith(f"ray::{title}".encode()):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def judge(report: Callable[[str, int, int], None] = lambda *_: None, who: str = "r1") -> RayJudge:
    return RayJudge("", QUICK, who, report=report)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_cluster() as ray:
        yield ray


def judged(ray: Any) -> int:
    try:
        pool = ray.get_actor("judges-cpu", namespace="patcher")
    except ValueError:  # nobody has asked for a judge yet
        return 0
    return int(ray.get(pool.poll.remote("", [])).judged)


def test_what_nobody_waits_for_is_not_begun(ray: Any) -> None:
    with judge() as left:  # before any worker has started
        left.prepare([cpp(f"{GOOD}// {number}\n") for number in range(8)])
    with judge() as asked:
        [found] = asked.evaluate([cpp("int other;")])
    assert found.outcome is Outcome.GENERATION_FAILURE
    assert judged(ray) == 1


def test_what_was_handed_over_is_not_sent_again(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    answer = Cluster.answer

    def counted(cluster: Cluster, *given: Any) -> Any:
        calls.append(given)
        return answer(cluster, *given)

    candidates = [cpp(f"int y{number};") for number in range(3)]
    with judge() as asked:
        asked.prepare(candidates)
        monkeypatch.setattr(Cluster, "answer", counted)
        jobs = [asked.submit(candidate) for candidate in candidates]
        assert not calls
        asked.submit(cpp("int z;"))
        assert len(calls) == 1
        found = asked.gather(jobs)
    assert [each.digest for each in found] == [each.digest for each in candidates]


@pytest.mark.slow
def test_killed_workers_cost_nothing_and_nothing_is_judged_twice(ray: Any) -> None:
    killed: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        judging = not stage.startswith(("waiting", "build"))
        if judging and not killed and kill_worker("RayWorker"):
            killed.append(stage)

    before = judged(ray)
    candidates = [cpp(GOOD), cpp("void fused_add_rms_norm() { broken }"), cpp("int x;"), cpp(GOOD)]
    with judge(report) as asked:
        asked.prepare(candidates)
        found = asked.evaluate(candidates)
    assert killed, "a worker died in mid-job"
    assert found[0].outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)
    assert [each.digest for each in found] == [each.digest for each in candidates]
    assert judged(ray) == before + 3, "the fourth is the first"
    with judge() as again:
        assert again.evaluate(candidates) == found, "the same verdicts, times and all"
    assert judged(ray) == before + 3
    with open_judge(QUICK) as local:
        here = [local.evaluate(candidate, lambda *_: None) for candidate in candidates[1:3]]
    assert [untimed(each) for each in here] == [untimed(each) for each in found[1:3]]


def test_a_candidate_sees_nothing_of_ray(ray: Any) -> None:
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    session = str(Path(ray.nodes()[0]["RayletSocketName"]).parent)
    assert os.listdir(session), "there is something to see"
    source = LOOKS_AROUND.replace("SESSION", session).replace("PORT", port).replace("HOST", host)
    with judge() as asked:
        [found] = asked.evaluate([cpp(source)])
    assert "seen:[]" in found.model_dump_json(), found.failed_checks


def test_what_runs_on_both_kinds_is_judged_on_the_kind_that_is_there(ray: Any) -> None:
    solutions = bench.load_op("linear").solutions()
    in_torch = next(candidate for info, candidate in solutions if info.name == "cpu_torch")
    with judge() as asked:
        [found] = asked.evaluate([in_torch])
    assert found.right, found.failed_checks
    assert found.environment is not None
    assert found.environment.device_kind == "cpu"
    assert Cluster("@H100").usual == "cuda"


def test_what_the_cluster_lacks_is_said(ray: Any) -> None:
    for place, says in (("", "the Ray cluster has no GPU"), ("@H100", "has no H100 GPU")):
        with pytest.raises(MissingError, match=says) as caught:
            Cluster(place).pool("cuda")
        assert "ray start --address" in caught.value.hint
        assert caught.value.exit_code == 3


def test_a_busy_worker_is_told_from_one_that_lacks_something() -> None:
    pytest.importorskip("ray")
    from patcher.judges.ray_worker import PoolOutcome

    open_ = object.__new__(RayJudge)  # without a cluster
    posted: Any = SimpleNamespace(name="a job", digest="1")
    open_._done = {"1": PoolOutcome(kind="left", text="no compiler")}
    with pytest.raises(MissingError, match="lacks what a job needs") as caught:
        open_._taken(posted)
    assert not isinstance(caught.value, BusyError)
    open_._done = {"1": PoolOutcome(kind="busy", text="another program")}
    with pytest.raises(BusyError, match="could not time a job: another program"):
        open_._taken(posted)


def test_no_ray_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingError, match="ray is not installed") as caught:
        Cluster("")
    assert caught.value.hint == "pip install 'patcher[ray]'"


def test_judges_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_judge("local") is None
    assert remote_judge("ray") == (RayJudge, "")
    assert remote_judge("ray@H100") == (RayJudge, "@H100")
    assert remote_judge("ray:10.0.0.1:6379@H100") == (RayJudge, "10.0.0.1:6379@H100")
    monkeypatch.chdir(tmp_path)
    assert resolved_judge("exchange:jobs") == f"exchange:{tmp_path}/jobs"
    assert resolved_judge("ray@H100") == "ray:@H100"
    assert resolved_judge("local") == "local"
    for wrong in ("nobody", "rays", "exchange"):
        with pytest.raises(UsageError), open_judges(wrong, QUICK, "r1", lambda *_: None):
            pass


def test_a_full_pool_leaves_the_rest_with_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from patcher.judges import ray_pool
    from patcher.judges.ray_worker import PoolJob

    async def idle(_pool: ray_pool.JudgePool) -> None:
        """No cluster, so no workers."""

    monkeypatch.setattr(ray_pool, "MOST_JOBS", 3)
    monkeypatch.setattr(ray_pool.JudgePool, "_keep", idle)
    jobs = [PoolJob(name=f"x-{each}", digest=f"{each}", files={}) for each in range(5)]

    async def asked() -> ray_pool.PoolReply:
        pool = ray_pool.JudgePool("cpu")
        assert await pool.submit("one", jobs[:2])
        assert not await pool.submit("one", jobs)
        await pool.submit("two", jobs)
        return await pool.poll("one", [job.digest for job in jobs])

    reply = asyncio.run(asked())
    assert reply.unknown == ("3", "4")
    assert reply.waiting == 3, "the same jobs of another client are not doubled"


def test_a_process_has_one_cluster(ray: Any) -> None:
    joined = ray.get_runtime_context().gcs_address
    port = joined.rpartition(":")[2]
    for same in ("", joined, f"127.0.0.1:{port}", f"localhost:{port}"):
        assert Cluster(same).usual == "cpu"
    for other in ("127.0.0.1:1", f"198.51.100.7:{port}"):
        with pytest.raises(UsageError, match=f"has joined the Ray cluster at {joined}, not"):
            Cluster(other)


def test_errors_of_nodes_and_of_others_stay_off_stdout(ray: Any) -> None:
    joined = ray.get_runtime_context().gcs_address
    program = f"""
import time
from patcher.judges.ray_judge import Cluster
cluster = Cluster("{joined}")
from ray._private.utils import publish_error_to_driver
from ray._private.worker import global_worker
publish_error_to_driver("node", "a node died", gcs_client=global_worker.gcs_client)
time.sleep(2)
"""
    words = [sys.executable, "-P", "-c", program]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == ""


def test_a_cluster_without_cpus_is_said() -> None:
    pytest.importorskip("ray")
    cluster = object.__new__(Cluster)
    cluster._known = {}
    cluster._ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"memory": 1.0}}])
    with pytest.raises(MissingError, match="no node of the Ray cluster has a CPU"):
        cluster.pool("cpu")


def test_a_worker_of_another_patcher_is_not_believed() -> None:
    pytest.importorskip("ray")
    from patcher.judges.ray_worker import PoolOutcome

    machine = this_machine().model_copy(update={"patcher": "0.0.1"})
    refusal = Refusal(kind="usage", message="no", hint="")
    result = JobResult(job="1", refusal=refusal, machine=machine)
    open_ = object.__new__(RayJudge)
    open_._version = this_machine().patcher
    open_._done = {"1": PoolOutcome(kind="result", text=result.model_dump_json())}
    posted: Any = SimpleNamespace(name="a job", digest="1")
    with pytest.raises(VerificationError, match=r"judged a job runs patcher 0\.0\.1, not"):
        open_._taken(posted)


def test_a_dead_cluster_does_not_hide_why_the_judge_ended() -> None:
    pytest.importorskip("ray")

    def answer(*_: object) -> None:
        raise MissingError("the cluster has ended")

    open_ = object.__new__(RayJudge)
    job: Any = MagicMock()
    open_._client, open_._open = "me", {"1": (MagicMock(), job)}
    open_._cluster = MagicMock(answer=answer, ended=False)
    with pytest.raises(KeyboardInterrupt), open_:
        raise KeyboardInterrupt


@pytest.mark.parametrize("namespace", [ray_judge._OURS, "a trainer"])
def test_a_cluster_that_ends_is_left_before_ray_ends_the_process(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_judge, "PROBE_S", 0.01)
    monkeypatch.setattr(ray_judge, "HEAD_S", 0.05)
    runtime = SimpleNamespace(namespace=namespace)
    cluster = object.__new__(Cluster)
    cluster._ray = MagicMock(get_runtime_context=lambda: runtime)
    cluster._head, cluster.ended = "127.0.0.1:1", False
    with pytest.raises(UnreachableError, match=r"the Ray cluster at 127\..+ has ended") as caught:
        cluster.answer(SimpleNamespace(future=Future))
    assert caught.value.exit_code == 3
    assert cluster.ended, "nothing more is asked of it"
    assert cluster._ray.shutdown.called == (namespace == ray_judge._OURS)


def lane_end(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    """What becomes of a job that meets this error each time, on a node that dies with it."""
    from patcher.judges import ray_pool
    from patcher.judges.ray_worker import PoolJob

    async def idle(_pool: ray_pool.JudgePool) -> None:
        """No cluster."""

    async def judged(*_: object) -> None:
        raise error

    told = this_machine().model_dump_json(), None
    deaths: list[int] = []

    def again(_actor: Any) -> asyncio.Future[Any]:
        deaths.append(1)
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if len(deaths) < 3:
            ready.set_result(told)
        return ready

    monkeypatch.setattr(ray_pool.JudgePool, "_keep", idle)
    monkeypatch.setattr(ray_pool.JudgePool, "_judged", judged)
    monkeypatch.setattr(ray_pool, "_told", again)

    async def ended() -> Any:
        pool = ray_pool.JudgePool("cpu")
        await pool.submit("me", [PoolJob(name="x-1", digest="1", files={})])
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ready.set_result(told)
        lane = asyncio.create_task(pool._lane(ray_pool._Place("node", 1, None, ready)))
        done = (await pool.poll("me", ["1"])).done
        for _ in range(100):
            if done:
                break
            await asyncio.sleep(0.01)
            done = (await pool.poll("me", ["1"])).done
        lane.cancel()
        return done["1"]

    return asyncio.run(ended())


def test_a_job_whose_workers_die_is_refused_and_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    for error in (exceptions.ActorDiedError(), exceptions.OutOfMemoryError("no memory")):
        with monkeypatch.context() as patch:
            found = lane_end(patch, error)
        assert found.kind == "result"
        assert "it ended 3 workers that judged it" in found.text
    found = lane_end(monkeypatch, ValueError("a defect"))
    assert (found.kind, found.text) == ("failed", "a defect")


def test_a_pool_outlives_a_silent_head_and_tries_a_repaired_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray")
    from patcher.judges import ray_pool

    asked: list[int] = []

    def nodes() -> dict[str, dict[str, float]]:
        asked.append(1)
        if len(asked) == 1:
            raise ConnectionError("the head is away")
        return {"node": {"CPU": 1.0}}

    added: list[str] = []
    monkeypatch.setattr(ray_pool, "_nodes", nodes)
    monkeypatch.setattr(ray_pool, "RECONCILE_S", 0.01)
    monkeypatch.setattr(ray_pool.JudgePool, "_add", lambda _, node, _cpus: added.append(node))

    async def followed() -> list[str]:
        pool = ray_pool.JudgePool("cpu")
        pool._broken["node"] = (time.monotonic(), "no patcher there")
        await pool.submit("me", [])
        for _ in range(100):
            await asyncio.sleep(0.01)
            if len(asked) > 2:
                break
        assert not added
        told = [(await pool.poll("me", [])).problem for _ in range(2)]
        await asyncio.sleep(0.1)
        assert pool._keeper is not None
        pool._keeper.cancel()
        return told

    assert asyncio.run(followed()) == ["no patcher there", ""]
    assert added
