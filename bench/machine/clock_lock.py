"""Lock a GPU's SM clock, and release the lock whenever the process ends.

According to NVML's reference (Device Commands) and nvidia-ml-py 13, a lock needs root, replaces an
earlier lock, cannot be read back, and stays until it is reset. This process releases it at the end
of the block, at exit and on SIGTERM. After any other end (SIGKILL, the OOM killer, a crash in
native code) a watchdog in its own session releases it. The lock stays only if both end at once;
`nvidia-smi -rgc` then releases it.

The memory clock is monitored, not locked: on the supported GPUs it has only one step under load.
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
"""Time limit in seconds for the watchdog to start and reach the GPU."""


class LockRefusedError(Exception):
    """The clock could not be locked; the message says why."""


class ClockLock:
    """The clock lock of one GPU: `take`, then `release`, which may be called twice."""

    def __init__(self, nvml: Any, handle: Any, gpu: str) -> None:
        """Prepare a lock.

        Args:
            nvml: the NVML module. An object that is no module is a test double of this process;
                another process cannot reach it, so there is no watchdog.
            handle: NVML's handle of the GPU.
            gpu: `index:N` or `uuid:GPU-...`, for the watchdog.
        """
        self._nvml, self._handle, self._gpu = nvml, handle, gpu
        self._watchdog: _Watchdog | None = None
        self._held = False
        self._owner = os.getpid()
        self._on_sigterm: Any = None

    def take(self, mhz: int) -> None:
        """Lock the SM clock. Whether the GPU holds it shows only under load.

        Args:
            mhz: clock in MHz.

        Raises:
            LockRefusedError: locking is not permitted, or the watchdog does not start.
            VerificationError: the GPU does not support this clock.
        """
        nvml = self._nvml
        try:
            ceiling = int(nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        except nvml.NVMLError as error:
            raise LockRefusedError(str(error)) from error
        if mhz > ceiling:
            raise VerificationError(
                f"the SM clock cannot be locked at {mhz} MHz: {ceiling} MHz at most",
                "lock a lower clock, or only monitor it",
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
        """Release the lock; return what went wrong, or None."""
        if not self._held or os.getpid() != self._owner:  # a fork inherits handlers, not the lock
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
        """Install the handlers before locking, so that the lock can never outlive the process."""
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
        os.kill(os.getpid(), number)  # deliver the signal to the earlier handler


class _Watchdog:
    """`clock_watchdog.py` in its own session, so that killing our process group spares it."""

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
            _, stderr = self._process.communicate()
            lines = stderr.decode(errors="replace").strip().splitlines()
            why = (lines or ["it does not answer"])[-1]
            raise LockRefusedError(f"no watchdog would take it back: {why}")

    def dismiss(self) -> None:
        """End the watchdog without touching the clocks."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.write(b".")
            self._process.stdin.flush()
        self._end()

    def fire(self) -> bool:
        """Let the watchdog release the lock; return whether it could."""
        return self._end() == 0

    def _end(self) -> int:
        """Close the pipe and wait; return the exit code."""
        try:
            self._process.communicate(timeout=READY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        return self._process.returncode
