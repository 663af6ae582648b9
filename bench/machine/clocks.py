"""GPU clocks during a measurement: locked if requested and permitted, else monitored.

NVML is a parameter, so that a test can supply one that refuses, lies or fails.
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
"""nvmlClocksEventReasons that disqualify a sample. Idle and application settings do not."""
TOLERANCE = 0.02
"""Relative difference up to which two clocks count as equal."""
NOT_SAID = (3, 4)
"""NVML_ERROR_NOT_SUPPORTED and _NO_PERMISSION: this value is unavailable, others may not be."""


@dataclass(frozen=True)
class ClockSample:
    """NVML's values at one moment; None for each value that is unavailable."""

    sm_mhz: int | None = None
    """SM clock in MHz."""
    temperature_c: int | None = None
    """GPU temperature in degrees Celsius."""
    throttle: tuple[str, ...] = ()
    """Active throttle reasons, names from `THROTTLE_BITS`."""
    memory_mhz: int | None = None
    """Memory clock in MHz."""
    power_w: float | None = None
    """Power of the whole board in watts; since Ampere, the mean of the last second."""


class ClockMonitor:
    """A context manager that monitors the clocks of one GPU and can lock the SM clock.

    A lock is always released. On a CPU, or if NVML is missing or fails, `description` says so and
    the measurement continues without clocks.

    Args:
        device: `cpu` or `cuda`.
        lock_mhz: SM clock to lock, in MHz; None: only monitor.
        nvml: the NVML module; None: pynvml.
        index: CUDA's index of the GPU.
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

    @property
    def gpu(self) -> str:
        """Its UUID; empty where there is none, or before the monitor began."""
        return self._uuid or ""

    def sample(self) -> ClockSample:
        """Read the clocks now."""
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
        sample = ClockSample(clock, degrees, throttle, memory, watts)
        self._seen.append(sample)
        return sample

    @property
    def description(self) -> str:
        """The clocks in words: `locked at N MHz: ...`, `monitored: ...`, or why there are none."""
        if self._device != "cuda":
            return "monitored: CPU, no clock control"
        clocks = [sample.sm_mhz for sample in self._seen if sample.sm_mhz is not None]
        if not clocks:
            return f"not available: {self._problem or 'no sample taken'}"
        middle = statistics.median(clocks)
        how, effective = "monitored", True
        if self._was_locked and self._lock_mhz is not None:
            effective = abs(middle - self._lock_mhz) <= TOLERANCE * self._lock_mhz
            how = f"locked at {self._lock_mhz} MHz" if effective else how
        throttled = sum(bool(sample.throttle) for sample in self._seen)
        text = f"{how}: SM {middle:.0f} MHz ({min(clocks)} to {max(clocks)}), "
        text += f"{len(self._seen)} samples, {throttled} throttled"
        text += _span("memory", "MHz", [sample.memory_mhz for sample in self._seen])
        text += _span("", "C", [sample.temperature_c for sample in self._seen])
        text += _span("", "W", [sample.power_w for sample in self._seen])
        if not effective:
            text += f"; a lock at {self._lock_mhz} MHz was accepted and not kept"
        return f"{text}; {self._problem}" if self._problem else text

    def _ask(self, question: Callable[[], Any]) -> int | None:
        """One value, or None if this GPU does not provide it.

        Raises:
            NVMLError: NVML stopped answering.
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
    """UUID of the GPU with this CUDA index.

    NVML counts all GPUs of the host, CUDA only those in CUDA_VISIBLE_DEVICES.
    """
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
