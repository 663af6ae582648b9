"""The clocks a figure was made at: locked where permitted, else watched; never guessed.

NVML is a parameter, so that a test can put one in that refuses, lies or dies.
"""

from __future__ import annotations

import atexit
import contextlib
import statistics
from dataclasses import dataclass
from types import TracebackType
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
        self._handle: Any = None
        self._locked = False
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
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        except self._errors() as error:
            self._problem = f"NVML is not available: {error}"
            return self
        if self._lock_mhz is not None:
            self._lock(self._lock_mhz)
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
        if self._handle is None:
            return ClockSample()
        nvml = self._nvml
        try:
            clock = int(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
            degrees = int(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU))
            bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        except self._errors() as error:
            self._problem = f"NVML stopped answering: {error}"
            self._handle = None
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
        how = f"locked at {self._lock_mhz} MHz" if self._locked else "monitored"
        seen = f"SM {statistics.median(self._seen):.0f} MHz ({low} to {high})"
        told = f"{how}: {seen}, {len(self._seen)} samples, {self._throttled} throttled"
        return f"{told}; {self._problem}" if self._problem else told

    def _lock(self, mhz: int) -> None:
        """Lock and read back; a refusal means monitoring, a lie is an error."""
        nvml = self._nvml
        try:
            nvml.nvmlDeviceSetGpuLockedClocks(self._handle, mhz, mhz)
        except self._errors() as error:
            self._problem = f"locking was refused: {error}"
            return
        self._locked = True
        atexit.register(self._restore)
        # A bound higher than the GPU can hold is accepted by NVML and not kept.
        ceiling = int(nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        if mhz > ceiling:
            self._restore()
            raise VerificationError(
                f"the SM clock cannot be locked at {mhz} MHz: {ceiling} MHz at most",
                "lock it lower, or only monitor",
            )

    def _restore(self) -> None:
        if not self._locked:
            return
        self._locked = False
        atexit.unregister(self._restore)
        try:
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
        except self._errors() as error:
            self._problem = f"clocks could not be restored: {error}; run: nvidia-smi -rgc"

    def _errors(self) -> tuple[type[BaseException], ...]:
        if self._nvml is None:
            return (ImportError,)
        error: type[BaseException] = self._nvml.NVMLError
        return (ImportError, error)
