"""The clocks a figure was made at: locked where permitted, else watched; never guessed.

NVML is a parameter, so that a test can put one in that refuses, lies or dies. A lock is taken back
at the end of the block, at exit and on SIGTERM; after SIGKILL it stays until `nvidia-smi -rgc`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import statistics
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from bench.errors import VerificationError

THROTTLE_BITS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""nvmlClocksEventReasons that make a sample unfit. Idle and application settings do not."""
TOLERANCE = 0.02
"""Share by which a clock may be off and still be called the same."""


@dataclass(frozen=True)
class ClockSample:
    """What NVML said at one moment; None where it says nothing."""

    sm_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()


class ClockMonitor:
    """Watches the SM clock of one GPU; locks it when asked and permitted, and always restores.

    A context manager. On a CPU, or where NVML is missing or dies, it says so in `description` and
    the measurement goes on without clocks.
    """

    def __init__(
        self, device: str, lock_mhz: int | None = None, nvml: Any = None, index: int = 0
    ) -> None:
        self._device, self._lock_mhz, self._index = device, lock_mhz, index
        self._nvml = nvml
        self._uuid: str | None = None
        self._handle: Any = None
        self._dead = False
        self._locked = False
        self._was_locked = False
        self._on_sigterm: Any = None
        self._problem: str | None = None
        self._seen: list[int] = []
        self._throttled = 0

    def __enter__(self) -> Self:
        if self._device != "cuda":
            return self
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
                self._uuid = _uuid(self._index)
            self._nvml.nvmlInit()
            self._handle = (
                self._nvml.nvmlDeviceGetHandleByIndex(self._index)
                if self._uuid is None
                else self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            )
        except self._errors() as error:
            self._problem = f"NVML is not available: {error}"
            return self
        if self._lock_mhz is not None:
            try:
                self._lock(self._lock_mhz)
            except VerificationError:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if self._handle is not None:
            with contextlib.suppress(*self._errors()):  # nothing is left to shut down
                self._nvml.nvmlShutdown()
            self._handle = None

    def sample(self) -> ClockSample:
        """What the GPU does now."""
        if self._handle is None or self._dead:
            return ClockSample()
        nvml = self._nvml
        try:
            clock = int(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
            degrees = int(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU))
            bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        except self._errors() as error:
            self._problem = f"NVML stopped answering: {error}"
            self._dead = True
            return ClockSample()
        throttle = tuple(name for bit, name in THROTTLE_BITS.items() if bits & bit)
        self._seen.append(clock)
        self._throttled += bool(throttle)
        return ClockSample(clock, degrees, throttle)

    @property
    def description(self) -> str:
        """`locked at N MHz`, or `monitored: ...` with what was seen, or why nothing was."""
        if self._device != "cuda":
            return "monitored: CPU, no clock control"
        if not self._seen:
            return f"not available: {self._problem or 'no sample taken'}"
        low, high = min(self._seen), max(self._seen)
        middle = statistics.median(self._seen)
        how, kept = "monitored", True
        if self._was_locked and self._lock_mhz is not None:
            kept = abs(middle - self._lock_mhz) <= TOLERANCE * self._lock_mhz
            how = f"locked at {self._lock_mhz} MHz" if kept else how
        told = f"{how}: SM {middle:.0f} MHz ({low} to {high}), {len(self._seen)} samples"
        told += f", {self._throttled} throttled"
        if not kept:
            told += f"; a lock at {self._lock_mhz} MHz was accepted and not kept"
        return f"{told}; {self._problem}" if self._problem else told

    def _lock(self, mhz: int) -> None:
        """Lock; a refusal means monitoring, a clock beyond the GPU is an error.

        Whether the lock holds shows under load only, so `description` judges by the samples.
        """
        nvml = self._nvml
        try:
            ceiling = int(nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM))
            if mhz > ceiling:
                raise VerificationError(
                    f"the SM clock cannot be locked at {mhz} MHz: {ceiling} MHz at most",
                    "lock it lower, or only monitor",
                )
            self._arm()
            nvml.nvmlDeviceSetGpuLockedClocks(self._handle, mhz, mhz)
        except self._errors() as error:
            self._disarm()
            self._locked = False
            self._problem = f"locking was refused: {error}"
            return
        self._was_locked = True

    def _arm(self) -> None:
        """Before the lock, so that no moment is left in which it could outlive the process."""
        self._locked = True
        atexit.register(self._restore)
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._terminated)
            self._on_sigterm = signal.SIG_DFL if before is None else before

    def _disarm(self) -> None:
        atexit.unregister(self._restore)
        if self._on_sigterm is not None:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._on_sigterm = None

    def _terminated(self, number: int, _frame: FrameType | None) -> None:
        self._restore()
        os.kill(os.getpid(), number)  # now for whoever was to get it before us

    def _restore(self) -> None:
        if not self._locked:
            return
        self._locked = False
        self._disarm()
        try:
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
        except self._errors() as error:
            self._problem = f"clocks could not be restored: {error}; run: nvidia-smi -rgc"

    def _errors(self) -> tuple[type[BaseException], ...]:
        if self._nvml is None:
            return (ImportError,)
        error: type[BaseException] = self._nvml.NVMLError
        return (ImportError, error)


def _uuid(index: int) -> str:
    """NVML's name of the GPU that CUDA calls `index` here.

    NVML counts all GPUs of the host, CUDA those that CUDA_VISIBLE_DEVICES leaves.
    """
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
