"""The first starts of both sides on a host, in which an engine compiles: at once, if both fit.

Compiling takes CPUs and hardly the GPU, so that two starts together take little longer than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from pydantic import JsonValue

from patcher.ab.served_folder import ServedFolder, this_host
from patcher.ab.taking import SideTaking
from patcher.bench import PatcherError, Shape
from patcher.bench.ab.processes import SHARE_BESIDE
from patcher.bench.engines import arguments_beside
from patcher.bench.stats.comparison import Arm


def compile_at_once(
    folder: ServedFolder, takings: Mapping[Arm, SideTaking], python: str
) -> PatcherError | None:
    """Start both sides at once, if neither has compiled on this host and each can leave room for
    the other.

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
    values = first.job.values(first.prompts)
    room = Shape(batch=values["users"], context=values["context"])
    beside = arguments_beside(first.job.workload, (room,), SHARE_BESIDE)
    if not beside:
        return None
    first.await_free_device()
    with ThreadPoolExecutor(len(takings)) as pool:
        started = [
            pool.submit(compile_side, folder, arm, taking, python, beside)
            for arm, taking in takings.items()
        ]
    failures = [error for one in started if (error := one.exception()) is not None]
    for error in failures:
        if not isinstance(error, PatcherError):
            raise error
        return error
    return None


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
