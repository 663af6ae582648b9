"""A double for NVML, which needs a driver, as a module: its GPU is the folder FAKE_NVML.

So two processes see one GPU, as they would. Files in the folder are what it is and does: `locked`
(MHz; there while a lock is), `calls` (a line a call that changes it, with the process that made
it), `refuse` (no permission to lock), `lie` (a lock is accepted and not kept), `dead` (a process id
that NVML answers no more; `!` before it: every other one).
"""

from __future__ import annotations

import os
from pathlib import Path

NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_TEMPERATURE_GPU = 0


class NVMLError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


def _folder() -> Path:
    return Path(os.environ["FAKE_NVML"])


def _answer() -> None:
    file = _folder() / "dead"
    if file.exists():
        whom = file.read_text()
        if (whom.lstrip("!") == str(os.getpid())) is not whom.startswith("!"):
            raise NVMLError(15, "GPU is lost")


def _note(what: str) -> None:
    with (_folder() / "calls").open("a") as file:
        file.write(f"{os.getpid()} {what}\n")


def nvmlInit() -> None:
    _answer()


def nvmlShutdown() -> None:
    return


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _answer()
    return index


def nvmlDeviceGetMaxClockInfo(handle: int, kind: int) -> int:
    _answer()
    return 1980


def nvmlDeviceGetClockInfo(handle: int, kind: int) -> int:
    _answer()
    if kind == NVML_CLOCK_MEM:
        return 3201
    locked = _folder() / "locked"
    kept = locked.exists() and not (_folder() / "lie").exists()
    return int(locked.read_text()) if kept else 1980


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    _answer()
    return 41


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    _answer()
    raise NVMLError(3, "Not Supported")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    _answer()
    return 0


def nvmlDeviceSetGpuLockedClocks(handle: int, low: int, high: int) -> None:
    _answer()
    if (_folder() / "refuse").exists():
        raise NVMLError(4, "Insufficient Permissions")
    (_folder() / "locked").write_text(str(high))
    _note("set")


def nvmlDeviceResetGpuLockedClocks(handle: int) -> None:
    _answer()
    # first the note: who sees the lock gone may read at once who took it away
    _note("reset")
    (_folder() / "locked").unlink(missing_ok=True)
