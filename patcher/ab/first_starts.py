"""The first starts of both sides on a host, in which an engine compiles: at once, if both fit.

Compiling takes CPUs and hardly the GPU, so that two starts together take little longer than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from pydantic import JsonValue

from patcher.ab.engine_command import EngineCommand
from patcher.ab.served_folder import ServedFolder, this_host
from patcher.ab.taking import SideTaking
from patcher.bench import PatcherError, Shape
from patcher.bench.ab.processes import SHARE_BESIDE
from patcher.bench.engines.beside import arguments_beside
from patcher.bench.stats.comparison import Arm

STOP_S = 0.2
"""Seconds between two looks whether both threads have stopped."""


def compile_at_once(
    folder: ServedFolder, takings: Mapping[Arm, SideTaking], python: str
) -> PatcherError | None:
    """Start both sides at once, if neither has compiled on this host, each can leave room for the
    other, and no port is given, at which one might answer for the other: vLLM shares ports.

    Args:
        takings: of both arms.
        python: the client's interpreter.

    Returns:
        Why a side failed, which then has to start alone.

    Raises:
        UsageError: other programs hold the device's memory.
    """
    if any(folder.has_compiled(arm, this_host()) for arm in takings):
        return None
    first = next(iter(takings.values()))
    if first.job.port is not None:
        return None
    values = first.job.values(first.prompts)
    room = Shape(batch=values["users"], context=values["context"])
    versions = [taking.installed.version for taking in takings.values()]
    beside = arguments_beside(first.job.workload, (room,), SHARE_BESIDE, versions)
    if not beside:
        return None
    first.await_free_device()
    with ThreadPoolExecutor(len(takings)) as pool:
        started = [
            pool.submit(compile_side, folder, arm, taking, python, beside)
            for arm, taking in takings.items()
        ]
        try:
            wait(started)
        except BaseException:  # Ctrl-C comes to this thread alone
            while wait(started, STOP_S).not_done:
                EngineCommand.close_all()
            raise
    failures = [error for one in started if (error := one.exception()) is not None]
    expected = [error for error in failures if isinstance(error, PatcherError)]
    for error in failures:
        if not isinstance(error, PatcherError):
            raise error
    return next(iter(expected), None)


def compile_side(
    folder: ServedFolder,
    arm: Arm,
    taking: SideTaking,
    python: str,
    beside: Mapping[str, JsonValue] | None = None,
) -> None:
    """Start a side that has not compiled on this host yet, and end it.

    Args:
        beside: as in `SideTaking.compile`.
    """
    with folder.compiling(arm, this_host()) as needed:
        if needed:
            taking.compile(arm, folder.taken, python, beside)
