"""Free memory of this host."""

from __future__ import annotations

from pathlib import Path

from patcher.bench.errors import UsageError


def free_host_bytes() -> int:
    """Memory in bytes that programs can get without swapping.

    Raises:
        UsageError: the kernel does not say.
    """
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UsageError("/proc/meminfo has no MemAvailable")
