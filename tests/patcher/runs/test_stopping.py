"""A command that is stopped: exit code 130, nothing of it left behind, its run can be resumed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killing_stories import verdict
from stopping_sample import (
    LIMIT_S,
    OP,
    Stage,
    recorded,
)

from patcher import pipeline
from patcher.agent import run_loop
from patcher.bench import Language, load_op
from patcher.bench.sandbox.process_tree import descendants
from patcher.commands.workloads import workload_for
from patcher.hotspot import Profile, read
from patcher.models.replay import ReplayModel
from patcher.runs.journal import is_written
from patcher.runs.run import Run
from patcher.settings import resolve

ROOT = Path(__file__).resolve().parents[3]
GOOD = (ROOT / f"kernels/{OP}/solutions/cpu_simd/{OP}.cpp").read_text()


@pytest.fixture
def orphans() -> Iterator[Callable[[], set[int]]]:
    """Whoever loses its parent becomes a child of this process, so that it is found: returns those
    that live."""
    subreaper = 36
    libc = ctypes.CDLL(None)
    before = descendants(os.getpid())
    libc.prctl(subreaper, 1)

    def living() -> set[int]:
        found = set()
        for pid in descendants(os.getpid()) - before:
            try:
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    found.add(pid)
            except ChildProcessError:
                found.add(pid)  # somebody else's child; it may be dead by now
        return found

    yield living
    libc.prctl(subreaper, 0)
    for pid in descendants(os.getpid()) - before:
        os.kill(pid, signal.SIGKILL)


def nothing_left(orphans: Callable[[], set[int]]) -> None:
    """At once, but for what the kernel is still taking down."""
    deadline = time.monotonic() + 5
    while left := orphans():
        assert time.monotonic() < deadline, [
            Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left
        ]
        time.sleep(0.02)


def resumable(folder: Path, pending: str, said: dict[str, Any]) -> None:
    [path] = Run.list(folder / "patcher-runs")
    assert not is_written(path / "journal.jsonl")
    with Run.open(path) as run:
        assert run.state.pending[-1:] == (pending,)
        resume = "go on with: patcher resume"
        assert not said or said["hint"] in (resume, f"{resume} {run.id}")


@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGINT, "alone"), (signal.SIGTERM, "alone"), (signal.SIGHUP, "group")],
)
def test_stopped_while_a_model_is_asked(
    tmp_path: Path, orphans: Callable[[], set[int]], number: signal.Signals, to: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the question, never answers
        stage = Stage(
            tmp_path,
            *("optimize", OP, "--language", "cpp", "--iterations", "1", "--model", "anthropic"),
            ANTHROPIC_API_KEY="sk-ant-none",
            ANTHROPIC_BASE_URL=f"http://127.0.0.1:{server.getsockname()[1]}",
        )
        server.settimeout(LIMIT_S)
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            said = stage.stop(number, to)
    nothing_left(orphans)
    resumable(tmp_path, f"{OP}/0/ask-generate", said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_in_its_imports(tmp_path: Path, number: signal.Signals) -> None:
    stage = Stage(tmp_path, "ops")
    libraries = Path(f"/proc/{stage.process.pid}/maps")
    stage.until(lambda: "pydantic_core" in libraries.read_text())
    assert stage.stop(number, "alone")["message"] == "the command was stopped before its end"


STOPPED_TWICE = """
import os, signal, time
from pathlib import Path
from patcher.ab.engine_command import EngineCommand
from patcher.runs import stopping

stopping.PATIENCE_S = 0
line = "trap '' INT; sleep 600 & touch there; wait"
with stopping.Stopping(), EngineCommand("it", ["sh", "-c", line], os.environ, Path.cwd(), "log"):
    while not Path("there").exists():
        time.sleep(0.02)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_stopped_twice_an_engine_leaves_no_workers(
    tmp_path: Path, orphans: Callable[[], set[int]]
) -> None:
    """They have parents of their own, which the kernel ends with us, and not them."""
    code = subprocess.run([sys.executable, "-P", "-c", STOPPED_TWICE], cwd=tmp_path).returncode
    assert code == 130
    nothing_left(orphans)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_without_a_run(
    tmp_path: Path, orphans: Callable[[], set[int]], number: signal.Signals
) -> None:
    (tmp_path / "slow.cpp").write_text(SLOW_TO_BUILD + GOOD)
    stage = Stage(tmp_path, "evaluate", OP, "slow.cpp")
    stage.until(lambda: stage.runs("cc1plus"))
    assert stage.stop(number, "alone")["hint"] == "give the command again"
    nothing_left(orphans)


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """Somebody's cleaning up hangs: the second Ctrl-C ends the process all the same."""
    code = (
        "import os, signal, time; from patcher.runs.stopping import Stopping\n"
        "with Stopping() as stopping:\n"
        "    try: print(flush=True); time.sleep(60)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"  # a wrapper's copy of the first
        "        print(stopping.asked, flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"True\n"
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    process.stdout.close()
    assert process.returncode == 130


def test_what_nohup_switched_off_stays_off() -> None:
    code = (
        "import os, signal; from patcher.runs.stopping import Stopping\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with Stopping() as stopping: os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(stopping.asked)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True)
    assert done.stdout == b"False\n"


# Each constant takes g++ seconds, and is of another type: minutes.
SLOW_TO_BUILD = """
template <int N> constexpr unsigned long slow() {
  unsigned long x = N;
  for (int i = 0; i < 3000000; ++i) x ^= x * 5 + i;
  return x;
}
template <int N> struct Slow {
  static constexpr unsigned long value = slow<N>() + Slow<N - 1>::value;
};
template <> struct Slow<0> { static constexpr unsigned long value = 0; };
static_assert(Slow<60>::value != 1);
"""
HANGS = f"""
#include <unistd.h>
#include <tvm/ffi/container/tensor.h>
void {OP}(tvm::ffi::TensorView input, tvm::ffi::TensorView residual,
          tvm::ffi::TensorView weight, double epsilon) {{ ::sleep(170); }}
"""


def optimizing(folder: Path, source: str) -> Stage:
    words = ["optimize", OP, "--language", "cpp", "--iterations", "1", "--model"]
    return Stage(folder, *words, recorded(folder / "recording.jsonl", source))


def test_stopped_while_a_candidate_is_built(
    tmp_path: Path, orphans: Callable[[], set[int]]
) -> None:
    stage = optimizing(tmp_path, SLOW_TO_BUILD + GOOD)
    stage.until(lambda: stage.runs("cc1plus"))
    said = stage.stop(signal.SIGINT, "group")
    nothing_left(orphans)
    resumable(tmp_path, f"{OP}/0/evaluate", said)


AHEAD = """
import sys
from patcher.bench import Candidate
from patcher.bench.judge import open_judge
from patcher.runs.stopping import Stopping

with Stopping(), open_judge() as judge:
    try:
        judge.build_ahead(
            [Candidate(op=sys.argv[1], language="cpp", source=sys.argv[2] + n) for n in "abc"]
        )
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_stopped_while_several_are_built_side_by_side(
    tmp_path: Path, orphans: Callable[[], set[int]]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", AHEAD, OP, SLOW_TO_BUILD + GOOD + "//"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    deadline = time.monotonic() + LIMIT_S
    while compilers(process.pid) < min(2, os.cpu_count() or 1):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    nothing_left(orphans)


def compilers(pid: int) -> int:
    found = 0
    for each in descendants(pid):
        with contextlib.suppress(OSError):  # one that has just ended
            found += Path(f"/proc/{each}/comm").read_text() == "cc1plus\n"
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_while_a_candidate_runs(
    tmp_path: Path, orphans: Callable[[], set[int]], number: signal.Signals
) -> None:
    stage = optimizing(tmp_path, HANGS)
    stage.until(lambda: asleep(stage.process.pid))
    said = stage.stop(number, "alone")
    nothing_left(orphans)
    resumable(tmp_path, f"{OP}/0/evaluate", said)


def asleep(pid: int) -> bool:
    """Whether the kernel below that process is in its long sleep."""
    for each in descendants(pid) - {pid}:
        try:
            if "nanosleep" in Path(f"/proc/{each}/wchan").read_text():
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize(("number", "to"), [(signal.SIGINT, "group"), (signal.SIGKILL, "alone")])
def test_stopped_while_the_model_is_measured(
    tmp_path: Path, orphans: Callable[[], set[int]], number: signal.Signals, to: str
) -> None:
    judged(tmp_path)
    stage = Stage(tmp_path, "resume")
    stage.until(lambda: stage.runs("-m", "patcher.ab.one_process"))
    said = stage.stop(number, to)
    nothing_left(orphans)
    resumable(tmp_path, "measure", said)


def judged(folder: Path) -> None:
    """A run whose loop is done: what comes next is patch and A/B."""
    file = folder / "recording.jsonl"
    model = recorded(file, GOOD)
    settings = resolve({"model": model, "iterations": 1, "runs_dir": folder / "patcher-runs"})
    workload = workload_for("gpt-oss-tiny", "cpu", threads=1)
    plan = pipeline.RunPlan(op=OP, language=Language.CPP, threads=1, pairs=6)
    with pipeline.start(settings, "run", "gpt-oss-tiny", workload, plan) as run:
        found = read(ROOT / "tests/data/nsys/decode.sqlite", "gpt-oss-20b")
        run.step("profile", lambda: found, Profile)
        run_loop(
            *(run, load_op(OP), Language.CPP, ReplayModel(file)),
            *(lambda candidate: verdict(candidate, 2.0), 1, "a CPU"),
        )
