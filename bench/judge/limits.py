"""Limits of one runner, and the compile workers that fit into them."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

_WORKERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Inductor reads it when it is first imported."""
WORKER_BYTES = 512 << 20
"""Memory in bytes that one compile worker of Inductor may take, which has imported torch and
triton. Each counts in full, though they share pages."""
MOST_WORKERS = 32
"""Inductor itself starts no more."""


@dataclass(frozen=True)
class Limits:
    """Limits of one runner."""

    reply_s: float = 30.0
    """Time limit in seconds of a command, unless the command sets its own."""
    memory_bytes: int = 16 << 30
    """Memory limit in bytes of all its processes together."""

    def compilers(self, cpus: Collection[int] | None = None) -> dict[str, str]:
        """Environment variables that bound how many compile workers Inductor starts: as many as
        there are CPUs, within half of the memory limit. The other half is for the process itself.
        A number that the user set in `TORCHINDUCTOR_COMPILE_THREADS` counts as it is.

        Args:
            cpus: the CPUs to which the process is pinned; None: those of this process.
        """
        usable = len(os.sched_getaffinity(0) if cpus is None else cpus)
        room = self.memory_bytes // 2 // WORKER_BYTES
        fitting = str(max(min(usable, room, MOST_WORKERS), 1))
        return {_WORKERS: os.environ.get(_WORKERS) or fitting}
