"""Run a process of an engine whose log says what went wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from patcher.bench.machine.environment import engine_environment


def run_logged(
    command: Sequence[str], variables: Mapping[str, str], log: Path, limit_s: float
) -> None:
    """Run a command to its end or for so many seconds; all that it prints goes to the log.

    Args:
        variables: of its environment, besides those that engines read.
    """
    with log.open("wb") as told:
        try:
            subprocess.run(
                command,
                env={**engine_environment(), **variables},
                stdout=told,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            told.write(f"\nended after {limit_s} s\n".encode())
