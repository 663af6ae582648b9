"""Clocks: a lock that does not hold, a driver that dies, a process that is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from measure_sample import FakeNvml

from patcher.bench.machine.clocks import ClockMonitor


class LyingNvml(FakeNvml):
    """A double for an NVML that accepts a lock and does not keep it."""

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1700


class BrokenNvml(FakeNvml):
    """A double for an NVML that is installed without a driver."""

    def nvmlInit(self) -> None:
        raise self.NVMLError("Driver Not Loaded")


class UnrestorableNvml(FakeNvml):
    """A double for an NVML that dies under a lock."""

    def nvmlDeviceResetGpuLockedClocks(self, handle: int) -> None:
        raise self.NVMLError("GPU is lost")


def test_a_lock_that_is_not_kept_is_not_called_one() -> None:
    nvml = LyingNvml()
    with ClockMonitor("cuda", lock_mhz=1500, nvml=nvml) as clocks:
        clocks.sample()
    assert clocks.description.startswith("monitored: SM 1700 MHz")
    assert "accepted and not kept" in clocks.description
    assert nvml.restored == 1


def test_no_driver_is_said_and_survived() -> None:
    with ClockMonitor("cuda", nvml=BrokenNvml()) as clocks:
        assert clocks.sample().sm_mhz is None
    assert clocks.description == "not available: NVML is not available: Driver Not Loaded"


def test_a_lock_that_cannot_be_taken_back_names_the_command() -> None:
    with ClockMonitor("cuda", lock_mhz=1500, nvml=UnrestorableNvml()) as clocks:
        clocks.sample()
    assert "nvidia-smi -rgc" in clocks.description


def test_the_lock_is_taken_back_after_nvml_stopped_answering() -> None:
    nvml = FakeNvml()
    with ClockMonitor("cuda", lock_mhz=1500, nvml=nvml) as clocks:
        nvml.dead = True
        clocks.sample()
        nvml.dead = False
    assert nvml.locked is None


def test_throttling_is_named_and_counted() -> None:
    nvml = FakeNvml()
    with ClockMonitor("cuda", nvml=nvml) as clocks:
        nvml.bits = 0x1 | 0x2  # idle, application settings: no fault
        assert clocks.sample().throttle == ()
        nvml.bits = 0x4 | 0x40
        assert clocks.sample().throttle == ("power cap", "hardware thermal slowdown")
    assert "2 samples, 1 throttled" in clocks.description


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ClockMonitor("cuda", lock_mhz=1500, nvml=FakeNvml()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    with ClockMonitor("cuda", lock_mhz=1500, nvml=FakeNvml(refuse=True)):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGTERM)", "sys.exit(3)"])
def test_an_ended_process_leaves_no_lock(tmp_path: Path, end: str) -> None:
    mark = tmp_path / "restored"
    script = f"""
import os, signal, sys
from pathlib import Path
from measure_sample import FakeNvml
from patcher.bench.machine.clocks import ClockMonitor

class Marking(FakeNvml):
    def nvmlDeviceResetGpuLockedClocks(self, handle):
        Path({str(mark)!r}).write_text("yes")

monitor = ClockMonitor("cuda", lock_mhz=1500, nvml=Marking())
monitor.__enter__()  # no `with`: nothing but the handlers takes the lock back
{end}
"""
    here = Path(__file__).resolve().parents[2] / "support"
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == (-signal.SIGTERM if "SIGTERM" in end else 3), ended.stderr
    assert mark.read_text() == "yes"
