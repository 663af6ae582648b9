"""Put recorders into patch points: for a block, or as the environment of a server says."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patcher.bench import PatcherError, UsageError, load_op
from patcher.bench.judge.call_recording import parts_of
from patcher.integrate.points import PatchPoint, find_point
from patcher.integrate.recording import Recorder, RecordingLimits
from patcher.integrate.switches import Switches

log = logging.getLogger("patcher")


class RecordedPoint:
    """A recorder at its patch point."""

    def __init__(self, point: PatchPoint, recorder: Recorder) -> None:
        self.point, self.recorder = point, recorder

    @classmethod
    def install(
        cls,
        engine: str,
        name: str,
        file: Path,
        target: Any = None,
        limits: RecordingLimits | None = None,
    ) -> RecordedPoint:
        """Put a recorder into a patch point; see `recorder`."""
        kind = find_point(engine, name)
        if getattr(kind, "tells_tokens", False):
            raise UsageError(
                f"calls at {name} hold token ids, that is, what people wrote",
                "record another point: activations are recorded, texts are not",
            )
        found = Recorder(load_op(kind.op).contract, kind, file, limits or RecordingLimits())
        place = kind(target)
        place.find()
        try:
            place.install(found)
        except BaseException:
            place.remove()
            found.close()
            raise
        return cls(place, found)

    def remove(self) -> None:
        """Restore the engine and write what is recorded; idempotent.

        Raises:
            UsageError: the file cannot be written; the engine is restored all the same.
        """
        self.point.remove()
        self.recorder.close()
        try:
            self.recorder.write()
        except OSError as error:
            file = self.recorder.file
            raise UsageError(
                f"cannot write {file}: {error.strerror or error}",
                f"what was recorded before is in {parts_of(file)}; make room, or name another file",
            ) from error


@contextmanager
def recorder(
    engine: str,
    point: str,
    file: Path,
    target: Any = None,
    limits: RecordingLimits | None = None,
) -> Iterator[Recorder]:
    """Record calls at a patch point while a block runs, in this process.

    The file is written at the end, and each call that is recorded beside it before; see
    `patcher.bench.judge.call_recording`.

    Args:
        engine: the engine's name.
        point: the patch point's name.
        file: the file to write.
        target: a built model, or None if the point lies in the engine's classes.
        limits: how much is recorded.

    Raises:
        UsageError: there is no such point, or its calls hold what was said to the model.
        VerificationError: the engine or the model is not what the point replaces.
        MissingError: the engine is not installed.
    """
    installed = RecordedPoint.install(engine, point, file, target, limits)
    try:
        yield installed.recorder
    finally:
        installed.remove()


def start_recorders(engine: str, switches: Switches) -> list[RecordedPoint]:
    """Put the recorders that the environment asks for into this process's engine. They wait for
    `Recorder.waits` to be unset, so that no call of warm-up is recorded.

    Raises:
        Exception: with `PATCHER_STRICT`, why a point cannot be recorded; else it is logged.
    """
    started: list[RecordedPoint] = []
    if switches.recordings is None:
        return started
    # with the time: each start of a container has the same process ids
    process = f"{os.getpid()}-{time.time_ns():x}"
    for name in switches.recorded:
        file = switches.recordings / f"{engine}-{name}-{process}.safetensors"
        try:
            limits = RecordingLimits.of(switches.recorded_mb)
            started.append(RecordedPoint.install(engine, name, file, limits=limits))
        except Exception as error:  # on any error, requests are served
            if switches.strict:
                for each in started:
                    each.remove()
                raise
            known = isinstance(error, PatcherError)
            log.error("%s is not recorded: %s", name, error, exc_info=not known)
        else:
            started[-1].recorder.waits = True
    return started
