"""The clocks a figure was made at: locked where asked and permitted, else watched; never guessed.

NVML is a parameter, so that a test can put one in that refuses, lies or dies.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from patcher.bench.errors import VerificationError
from patcher.bench.machine.clock_lock import ClockLock, LockRefusedError

POWER_CAP = "power cap"
THROTTLE_BITS = {
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""nvmlClocksEventReasons that make a sample unfit. Idle and application settings do not."""
TOLERANCE = 0.02
"""Share by which a clock may be off and still be called the same."""
NOT_SAID = (3, 4)
"""NVML_ERROR_NOT_SUPPORTED and _NO_PERMISSION: this figure is not to be had here, others are."""


@dataclass(frozen=True)
class ClockSample:
    """What NVML said at one moment; None where it says nothing."""

    sm_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()
    memory_mhz: int | None = None
    power_w: float | None = None
    """Of the whole board; since Ampere NVML's figure is the mean of the last second."""


class ClockMonitor:
    """Watches the clocks of one GPU; locks the SM's when asked and permitted, and always restores.

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
        self._lock: ClockLock | None = None
        self._was_locked = False
        self._problem: str | None = None
        self._seen: list[ClockSample] = []

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
            gpu = f"index:{self._index}" if self._uuid is None else f"uuid:{self._uuid}"
            self._lock = ClockLock(self._nvml, self._handle, gpu)
            try:
                self._lock.take(self._lock_mhz)
                self._was_locked = True
            except LockRefusedError as error:
                self._problem = f"locking was refused: {error}"
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
        if self._lock is not None:
            self._problem = self._lock.release() or self._problem
        if self._handle is not None:
            with contextlib.suppress(*self._errors()):  # nothing is left to shut down
                self._nvml.nvmlShutdown()
            self._handle = None

    def sample(self) -> ClockSample:
        """What the GPU does now."""
        if self._handle is None or self._dead:
            return ClockSample()
        nvml, handle = self._nvml, self._handle
        try:
            clock = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            memory = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
            degrees = self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            )
            milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
            bits = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
        except self._errors() as error:
            self._problem = f"NVML stopped answering: {error}"
            self._dead = True
            return ClockSample()
        throttle = tuple(name for bit, name in THROTTLE_BITS.items() if bits & bit)
        watts = None if milliwatts is None else milliwatts / 1000
        found = ClockSample(clock, degrees, throttle, memory, watts)
        self._seen.append(found)
        return found

    @property
    def description(self) -> str:
        """`locked at N MHz`, or `monitored: ...` with what was seen, or why nothing was."""
        if self._device != "cuda":
            return "monitored: CPU, no clock control"
        clocks = [sample.sm_mhz for sample in self._seen if sample.sm_mhz is not None]
        if not clocks:
            return f"not available: {self._problem or 'no sample taken'}"
        middle = statistics.median(clocks)
        how, kept = "monitored", True
        if self._was_locked and self._lock_mhz is not None:
            kept = abs(middle - self._lock_mhz) <= TOLERANCE * self._lock_mhz
            how = f"locked at {self._lock_mhz} MHz" if kept else how
        throttled = sum(bool(sample.throttle) for sample in self._seen)
        told = f"{how}: SM {middle:.0f} MHz ({min(clocks)} to {max(clocks)}), "
        told += f"{len(self._seen)} samples, {throttled} throttled"
        told += _span("memory", "MHz", [sample.memory_mhz for sample in self._seen])
        told += _span("", "C", [sample.temperature_c for sample in self._seen])
        told += _span("", "W", [sample.power_w for sample in self._seen])
        if not kept:
            told += f"; a lock at {self._lock_mhz} MHz was accepted and not kept"
        return f"{told}; {self._problem}" if self._problem else told

    def _ask(self, question: Callable[[], Any]) -> int | None:
        """One figure; None where this GPU does not tell it.

        Raises:
            NVMLError: NVML answers no more.
        """
        try:
            return int(question())
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) in NOT_SAID:
                return None
            raise

    def _errors(self) -> tuple[type[BaseException], ...]:
        if self._nvml is None:
            return (ImportError,)
        error: type[BaseException] = self._nvml.NVMLError
        return (ImportError, error)


def _span(name: str, unit: str, figures: Sequence[float | None]) -> str:
    seen = [figure for figure in figures if figure is not None]
    if not seen:
        return ""
    low, high = f"{min(seen):.0f}", f"{max(seen):.0f}"
    return (
        f", {name} ".replace("  ", " ") + (low if low == high else f"{low} to {high}") + f" {unit}"
    )


def _uuid(index: int) -> str:
    """NVML's name of the GPU that CUDA calls `index` here.

    NVML counts all GPUs of the host, CUDA those that CUDA_VISIBLE_DEVICES leaves.
    """
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
