"""Takes a clock lock back when the process that holds it is gone, even by SIGKILL.

`python -P clock_watchdog.py NVML GPU PARENT`: NVML is the name of the module that speaks to it, GPU
is `index:N` or `uuid:GPU-...`, PARENT the process id watched. It says `ready` once the GPU answers;
one byte on stdin, and it ends without touching anything. A lock on the clocks of a GPU belongs to
the driver, not to a process: NVML's reference says that it lasts until a reset, a reboot or a
reload of the driver, and there is no call that reads it back.

Run as a file: it imports NVML and nothing of ours, so that it is there at once and little can fail.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from typing import Any

POLL_S = 0.5
"""Between two looks at whose child this is: a fork of the parent may keep the pipe open."""


def main(name: str, gpu: str, parent: int) -> int:
    """Exit code 0: told to end, or the clocks are reset; 1: they could not be reset."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they mean the parent, which restores by itself
    nvml: Any = importlib.import_module(name)
    nvml.nvmlInit()
    handle_of(nvml, gpu)
    os.write(1, b"ready\n")
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable:
            if os.read(0, 1):
                return 0
            break
    try:
        # anew: whatever took the parent away may have taken this connection, too
        nvml.nvmlInit()
        nvml.nvmlDeviceResetGpuLockedClocks(handle_of(nvml, gpu))
    except nvml.NVMLError as error:
        print(f"the GPU's clocks could not be reset: {error}", file=sys.stderr)
        return 1
    return 0


def handle_of(nvml: Any, gpu: str) -> Any:
    """NVML's handle of `index:N` or `uuid:GPU-...`."""
    kind, _, which = gpu.partition(":")
    if kind == "index":
        return nvml.nvmlDeviceGetHandleByIndex(int(which))
    return nvml.nvmlDeviceGetHandleByUUID(which)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
