"""A lock on a GPU's SM clock that does not outlive what it was taken for.

Read against NVML's reference (Device Commands) and nvidia-ml-py 13: a lock needs root, replaces the
one before it, cannot be read back, and stays until it is reset. So it is taken back at the end of
the block, at exit and on SIGTERM by this process, and after any other end (SIGKILL, the kernel's
killer, a crash in native code) by a watchdog in a session of its own. Only what ends both at once,
with no time to act, leaves it in place: `nvidia-smi -rgc` then takes it back.

The memory clock is not locked: on the GPUs this is for it has one step under load; it is watched.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from patcher.bench.errors import VerificationError

READY_S = 30
"""For the watchdog to start and reach the GPU."""


class LockRefusedError(Exception):
    """The clock is not locked; the message says why."""


class ClockLock:
    """One GPU's lock. `take`, then `release`, which may be called twice."""

    def __init__(self, nvml: Any, handle: Any, gpu: str) -> None:
        """`gpu`: `index:N` or `uuid:GPU-...`, for the watchdog.

        NVML given as an object, not as a module, is a double that lives and dies with this process:
        no other one could reach it, and there is no watchdog.
        """
        self._nvml, self._handle, self._gpu = nvml, handle, gpu
        self._watchdog: _Watchdog | None = None
        self._held = False
        self._owner = os.getpid()
        self._on_sigterm: Any = None

    def take(self, mhz: int) -> None:
        """Lock; whether it is kept shows under load only.

        Raises:
            LockRefusedError: not permitted, or there is nobody who would take it back.
            VerificationError: beyond what the GPU can do.
        """
        nvml = self._nvml
        try:
            ceiling = int(nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        except nvml.NVMLError as error:
            raise LockRefusedError(str(error)) from error
        if mhz > ceiling:
            raise VerificationError(
                f"the SM clock cannot be locked at {mhz} MHz: {ceiling} MHz at most",
                "lock it lower, or only monitor",
            )
        if isinstance(nvml, ModuleType):
            self._watchdog = _Watchdog(nvml.__name__, self._gpu)
        self._arm()
        try:
            nvml.nvmlDeviceSetGpuLockedClocks(self._handle, mhz, mhz)
        except nvml.NVMLError as error:
            self._held = False
            self._disarm()
            self._dismiss()
            raise LockRefusedError(str(error)) from error

    def release(self) -> str | None:
        """Take the lock back; gives what went wrong, in words."""
        if not self._held or os.getpid() != self._owner:  # a fork has our handlers, not our lock
            return None
        self._held = False
        self._disarm()
        try:
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
        except self._nvml.NVMLError as error:
            if self._watchdog is not None and self._watchdog.fire():
                return None
            return f"clocks could not be restored: {error}; run: nvidia-smi -rgc"
        self._dismiss()
        return None

    def _arm(self) -> None:
        """Before the lock, so that no moment is left in which it could outlive the process."""
        self._held = True
        atexit.register(self.release)
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._terminated)
            self._on_sigterm = signal.SIG_DFL if before is None else before

    def _disarm(self) -> None:
        atexit.unregister(self.release)
        if self._on_sigterm is not None:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._on_sigterm = None

    def _dismiss(self) -> None:
        if self._watchdog is not None:
            self._watchdog.dismiss()
            self._watchdog = None

    def _terminated(self, number: int, _frame: FrameType | None) -> None:
        self.release()
        self._disarm()
        os.kill(os.getpid(), number)  # now for whoever was to get it before us


class _Watchdog:
    """`clock_watchdog.py` in a session of its own: what kills our process group spares it."""

    def __init__(self, module: str, gpu: str) -> None:
        script = Path(__file__).with_name("clock_watchdog.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), module, gpu, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], READY_S)
        if not readable or self._process.stdout.readline() != b"ready\n":
            self._process.kill()
            _, said = self._process.communicate()
            why = (said.decode(errors="replace").strip().splitlines() or ["it does not answer"])[-1]
            raise LockRefusedError(f"no watchdog would take it back: {why}")

    def dismiss(self) -> None:
        """It ends and touches nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already, and not needed any more
            self._process.stdin.write(b".")
            self._process.stdin.flush()
        self._end()

    def fire(self) -> bool:
        """Have it take the lock back; whether it could."""
        return self._end() == 0

    def _end(self) -> int:
        """Close the pipe and wait."""
        try:
            self._process.communicate(timeout=READY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        return self._process.returncode
