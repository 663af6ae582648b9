"""Release a clock lock when the process that holds it ends, even by SIGKILL.

`python -P clock_watchdog.py NVML GPU PARENT`: NVML is the name of NVML's Python module, GPU is
`index:N` or `uuid:GPU-...`, and PARENT is the process id to watch. The watchdog prints `ready` once
the GPU answers. After one byte on stdin it ends and leaves the clocks alone. A clock lock belongs
to the driver, not to a process: NVML's reference says that it lasts until a reset, a reboot or a
reload of the driver, and no call reads it back.

It runs as a file and imports only NVML, so that it starts fast and little can fail.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from typing import Any

POLL_S = 0.5
"""Seconds between checks of the parent's id, since a fork of it may keep the pipe open."""


def main(name: str, gpu: str, parent: int) -> int:
    """Watch the parent.

    Returns:
        Exit code 0 if dismissed or the clocks were reset, 1 if they could not be reset.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the parent, which restores the clocks
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
        # connect again: what ended the parent may have broken this connection, too
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
