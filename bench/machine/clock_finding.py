"""Whether the GPU's clocks may be locked, for `patcher doctor`."""

from __future__ import annotations

import os
from typing import Literal

from patcher.bench.machine.environment import first_gpu


def clocks_finding() -> tuple[Literal["ok", "warn", "fail"], str, str]:
    """Status, message and fix for `patcher doctor`: NVML wants root. Nothing is locked to find out.

    Raises:
        ImportError: pynvml is not installed.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        fix = "needed to read and lock a GPU's clocks: install NVIDIA's driver"
        return "warn", f"not available: {error}", fix
    try:
        handle = first_gpu(pynvml)
        now = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        if os.geteuid() == 0:
            detail = f"SM at {now} MHz; locking is permitted to root, where the host allows it"
            return "ok", detail, ""
        return "warn", f"SM at {now} MHz; monitored only", "locking needs root (nvidia-smi -lgc)"
    except pynvml.NVMLError as error:
        fix = "see nvidia-smi -q -d CLOCK; results then say that no clock was read"
        return "warn", f"not readable: {error}", fix
    finally:
        pynvml.nvmlShutdown()
