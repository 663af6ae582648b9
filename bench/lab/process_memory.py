"""Memory that a process and all that it started hold, on the GPU and on the host."""

from __future__ import annotations

import subprocess
from pathlib import Path


def gpu_mib(pids: set[int]) -> float | None:
    """Memory of all GPUs that these processes hold, as the driver says."""
    command = [
        "nvidia-smi",
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
    ]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    rows = [line.split(",") for line in listed.splitlines() if line]
    own = [float(used) for pid, used in rows if int(pid) in pids and used.strip().isdigit()]
    return sum(own) if own else None


def host_mib(pids: set[int]) -> float:
    """Memory of the host that is these processes' own."""
    kib = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:  # it has just ended
            continue
        kib += sum(
            int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_")
        )
    return kib / 1024
