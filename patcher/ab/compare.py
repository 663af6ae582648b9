"""End-to-end A/B and quality of one or more patches, in a separate process.

A language model wrote the patched kernel. So the process that runs it gets only allowed environment
variables, without API keys, and its result is JSON that is validated against a schema.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.bench import PatcherError, relayed
from patcher.bench.ab.phases import ABPhase, ABProgress
from patcher.bench.engines.child_errors import child_failed
from patcher.bench.machine.environment import engine_environment
from patcher.bench.sandbox import Excerpt, plain_file
from patcher.bench.sandbox.die_with_parent import die_with_parent
from patcher.integrate import Patch
from patcher.places import require_layers

_LONGEST_LINE = 1 << 16
_MOST_BYTES = 1 << 28
RESULT: TypeAdapter[tuple[Measurement, ...]] = TypeAdapter(tuple[Measurement, ...])
"""The result file of the measuring process."""


def compare_patch(
    job: ABJob, patch_folder: Path, progress: ABProgress, keep: Path | None = None
) -> Measurement:
    """Compare one patch; see `compare_patches`."""
    [measurement] = compare_patches(job, [patch_folder], progress, keep)
    return measurement


def compare_patches(
    job: ABJob,
    patch_folders: Sequence[Path],
    progress: ABProgress,
    keep: Path | None = None,
) -> tuple[Measurement, ...]:
    """Compare the model with these patches, all installed together, with the unpatched model.

    Both arms run in one process without API keys (`patcher.ab.one_process`), or in separate
    processes (`ABJob.process_pairs`). An interrupt kills the whole process group.

    Args:
        keep: with process pairs, where those that were measured are kept until all have been.

    Returns:
        The measurement of each patch, with its own receipts.

    Raises:
        PatcherError: the process failed; the hint names its log file.
    """
    patches = [Patch.load(folder) for folder in patch_folders]
    for patch in patches:
        patch.verify_target()
    require_layers(job.workload, patches)
    if job.process_pairs:
        from patcher.ab.session import compare_in_pairs

        return compare_in_pairs(job, patches, progress, keep)
    with tempfile.TemporaryDirectory(prefix="patcher-measure-") as scratch:
        folder = Path(scratch)
        (folder / "job.json").write_text(job.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "patcher.ab.one_process", str(folder)]
        command += [str(each.resolve()) for each in patch_folders]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                die_with_parent(*command),
                env=engine_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(_LONGEST_LINE):  # others come in pieces
                _relay(line, progress)
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        result = folder / "result.json"
        told = plain_file(result, _MOST_BYTES)
        if code != 0 or told is None:
            if error := plain_file(folder / "error.json", _MOST_BYTES):
                raise relayed(json.loads(error))
            raise child_failed("measuring", code, bytes(Excerpt.of_file(folder / "log")))
        try:
            return RESULT.validate_json(told)
        except ValidationError as error:
            raise PatcherError(f"the measurement gave no valid result: {error}") from error


def _relay(line: bytes, progress: ABProgress) -> None:
    try:
        phase, said, done, total = json.loads(line)
        phase = ABPhase(phase)
    except (ValueError, TypeError):
        return  # lines that the engine prints to stdout are not progress
    progress(phase, str(said), int(done), int(total))
