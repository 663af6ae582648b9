"""What one runner may take, and what a command of it took."""

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


@dataclass(frozen=True)
class Spent:
    """What one command took, from the moment that its process could run until it was stopped."""

    cpu_us: float
    """CPU time in microseconds of all threads, by the kernel's count."""
    wall_us: float
    """Microseconds by the judge's clock until the reply."""
    waited_us: float
    """Microseconds of these in which the main thread, or the judge, had to wait for a CPU."""
    lost: int = 0
    """Processes that were there before and ended, so that nobody knows what they used."""

    @property
    def idle_us(self) -> float:
        """Microseconds in which nobody worked and nobody had to wait for a CPU."""
        return self.wall_us - self.waited_us - self.cpu_us
