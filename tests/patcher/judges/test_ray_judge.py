"""The judge on Ray: a real cluster of one node, workers killed in mid-job, candidates that look
around."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
)
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.sandbox.process_tree import descendants
from patcher.judges import open_judges, remote_judge, resolved_judge
from patcher.judges.ray_judge import Cluster, RayJudge

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


def test_no_ray_and_no_cluster_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with pytest.raises(MissingError, match=r"no Ray cluster answers at 127\.0\.0\.1:1") as caught:
        Cluster("127.0.0.1:1")
    assert "ray start --head" in caught.value.hint
    with pytest.raises(UsageError, match="does not speak"):
        Cluster("ray://127.0.0.1:10001")
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
        await pool.submit("one", jobs)
        await pool.submit("two", jobs)
        return await pool.poll("one", [job.digest for job in jobs])

    reply = asyncio.run(asked())
    assert reply.unknown == ("3", "4")
    assert reply.waiting == 3, "the same jobs of another client are not doubled"
