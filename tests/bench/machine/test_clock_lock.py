"""A lock must not outlive the process that took it, however that ends: real processes, real kills,
and a double of NVML (`doubles/nvml/fake_nvml.py`) that they all see.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patcher.bench.machine.clocks import ClockMonitor

DOUBLE = Path(__file__).resolve().parents[2] / "doubles" / "nvml"
ROOT = Path(__file__).resolve().parents[3]

HOLD = """
import os, time
import fake_nvml
from patcher.bench.machine.clocks import ClockMonitor
with ClockMonitor("cuda", lock_mhz=1500, nvml=fake_nvml) as clocks:
    clocks.sample()
    print(clocks.description, flush=True)
    {then}
    time.sleep(600)
"""


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is the GPU, seen by this process and those that it starts."""
    paths = os.pathsep.join([str(DOUBLE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))
    monkeypatch.syspath_prepend(str(DOUBLE))
    return tmp_path


@pytest.fixture
def nvml(gpu: Path) -> Iterator[Any]:
    yield importlib.import_module("fake_nvml")
    sys.modules.pop("fake_nvml", None)


def calls(gpu: Path) -> list[tuple[int, str]]:
    file = gpu / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


@pytest.fixture
def started(gpu: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that holds a lock, in a session of its own; none outlives the test."""
    processes = []

    def start(then: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", HOLD.format(then=then)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("locked at 1500 MHz")
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(what: Any) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("whole_group", [False, True])
def test_sigkill_does_not_leave_a_lock(gpu: Path, started: Any, whole_group: bool) -> None:
    """As one process, and as the group that an interrupted measurement is killed by."""
    process = started()
    assert (gpu / "locked").read_text() == "1500"
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: not (gpu / "locked").exists())
    (locker, first), (watchdog, second) = calls(gpu)
    assert (locker, first, second) == (process.pid, "set", "reset")
    assert watchdog != process.pid
    until(lambda: not is_running(watchdog))


@needs_proc
def test_a_fork_that_lives_on_does_not_keep_the_lock(gpu: Path, started: Any) -> None:
    """It holds the other end of the watchdog's pipe, and its parent's exit and signal handlers."""
    fork = "child = os.fork(); (print(child, flush=True) if child else time.sleep(600))"
    process = started(fork)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not (gpu / "locked").exists())
    assert is_running(child)


def test_a_fork_that_ends_does_not_take_its_parents_lock(gpu: Path, started: Any) -> None:
    """It is terminated, or leaves the block: the lock is not its own."""
    fork = """
    for way in ("terminated", "left"):
        child = os.fork()
        if child == 0 and way == "left":
            break
        if child == 0:
            time.sleep(600)
        if way == "terminated":
            time.sleep(0.2)
            os.kill(child, 15)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    if child == 0:
        raise SystemExit(3)
"""
    process = started(fork.strip().replace("\n    ", "\n    "))
    assert process.stdout is not None
    assert [int(process.stdout.readline()) for _ in range(2)] == [-signal.SIGTERM, 3]
    assert (gpu / "locked").exists()
    process.terminate()
    assert process.wait() == -signal.SIGTERM
    assert not (gpu / "locked").exists()
    assert calls(gpu) == [(process.pid, "set"), (process.pid, "reset")]


def test_the_watchdog_is_dismissed_where_all_goes_well(gpu: Path, nvml: Any) -> None:
    with ClockMonitor("cuda", lock_mhz=1500, nvml=nvml) as clocks:
        sample = clocks.sample()
    assert (sample.sm_mhz, sample.memory_mhz, sample.power_w) == (1500, 3201, None)
    assert clocks.description == (
        "locked at 1500 MHz: SM 1500 MHz (1500 to 1500), 1 samples, 0 throttled, "
        "memory 3201 MHz, 41 C"
    )
    assert calls(gpu) == [(os.getpid(), "set"), (os.getpid(), "reset")]


def test_the_watchdog_restores_where_our_own_nvml_died(gpu: Path, nvml: Any) -> None:
    with ClockMonitor("cuda", lock_mhz=1500, nvml=nvml) as clocks:
        clocks.sample()
        (gpu / "dead").write_text(str(os.getpid()))
        assert clocks.sample().sm_mhz is None
    assert not (gpu / "locked").exists()
    [(_, _), (watchdog, last)] = calls(gpu)
    assert watchdog != os.getpid()
    assert last == "reset"
    assert "NVML stopped answering: GPU is lost" in clocks.description
    assert "nvidia-smi" not in clocks.description


def test_without_a_watchdog_there_is_no_lock(gpu: Path, nvml: Any) -> None:
    (gpu / "dead").write_text(f"!{os.getpid()}")
    with ClockMonitor("cuda", lock_mhz=1500, nvml=nvml) as clocks:
        clocks.sample()
    assert calls(gpu) == []
    assert clocks.description.startswith("monitored: SM 1980 MHz")
    assert "no watchdog would take it back" in clocks.description
    assert "GPU is lost" in clocks.description


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("refuse", "locking was refused: Insufficient Permissions"),
        ("lie", "a lock at 1500 MHz was accepted and not kept"),
    ],
)
def test_a_refusal_and_a_lie_are_monitoring(gpu: Path, nvml: Any, file: str, said: str) -> None:
    (gpu / file).touch()
    with ClockMonitor("cuda", lock_mhz=1500, nvml=nvml) as clocks:
        clocks.sample()
    assert clocks.description.startswith("monitored: SM 1980 MHz")
    assert said in clocks.description
    assert not (gpu / "locked").exists()


def test_a_lock_that_nobody_can_take_back_names_the_command(gpu: Path, nvml: Any) -> None:
    with ClockMonitor("cuda", lock_mhz=1500, nvml=nvml) as clocks:
        clocks.sample()
        (gpu / "dead").write_text("!0")
    assert "nvidia-smi -rgc" in clocks.description
