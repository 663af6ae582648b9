"""Read a profile from a file, check that it hides no kernels, and rank it.

What reads and ranks needs numpy; it is imported when it is used, as in `patcher.hotspot.capture`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from patcher.bench import Count, FilePath, UsageError, check_arguments
from patcher.hotspot.profile import Profile, ProfileWarning
from patcher.hotspot.roofline import ServedModel

if TYPE_CHECKING:
    from patcher.hotspot.recording import Recording

UNNAMED = "model"
"""The model's name if the caller gives none."""


@check_arguments
def read(
    path: FilePath,
    model: str = UNNAMED,
    *,
    window: str | None = None,
    minus: FilePath | None = None,
    ncu: FilePath | None = None,
    batch: Count | None = None,
    steps: Count | None = None,
    force: bool = False,
) -> Profile:
    """Read and rank a profile.

    Args:
        path: an nsys report, its SQLite or Parquet export, what `nsys stats` printed, or a trace of
            torch.profiler.
        model: the model's name; a preset's name supplies layers and sizes.
        window: text of an NVTX range to rank, or `all` to include warm-up and loading.
        minus: a profile of the same run with fewer tokens, whose kernels are subtracted.
        ncu: Nsight Compute's counters for the same kernels: a report or its CSV page.
        batch: sequences in a decode step; by default the preset's batch.
        steps: decode steps in the profile, if the source does not show them.
        force: rank a trace that hides kernels, with a warning.

    Returns:
        The ranked profile.

    Raises:
        UsageError: the file is missing, empty, truncated, binary, hides kernels, or holds another
            kind of report.
        MissingError: a report needs nsys or ncu, which is not installed.
    """
    from patcher.hotspot.rank import build_profile
    from patcher.hotspot.readers.ncu import MatchedCounters, attach, read_ncu, without_bytes
    from patcher.hotspot.stats import EVERYTHING
    from patcher.hotspot.subtract import subtract

    chosen = None if window == EVERYTHING else window
    served = ServedModel.of(model, batch)
    recording = _checked(Path(path), chosen, served, force)
    if minus is not None:
        recording = subtract(recording, _checked(Path(minus), chosen, served, force))
    names = _names(recording)
    counters = MatchedCounters({}, ()) if ncu is None else attach(read_ncu(Path(ncu)), names)
    profile = build_profile(
        recording, model, served=served, steps=steps, counters=counters.counters, window=window
    )
    told = (*profile.warnings, *counters.warnings, *without_bytes(counters.counters))
    return profile.model_copy(update={"warnings": told})


def _checked(path: Path, window: str | None, served: ServedModel, force: bool) -> Recording:
    """Read a recording; refuse one that hides kernels, or warn if `force` is set.

    Raises:
        UsageError: the source says or its counts show that graphs were traced as a whole.
    """
    from patcher.hotspot.readers import read_recording
    from patcher.hotspot.readers.sqlite import NODE_LEVEL

    recording = read_recording(path, window)
    hidden = recording.hidden or _suspicion(recording, served)
    if hidden is None:
        return recording
    what = f"{path.name}: {hidden}"
    if not force:
        raise UsageError(what, f"profile again: {NODE_LEVEL}   (or rank it anyway: --force)")
    warning = ProfileWarning(kind="graph_level", message=f"{what}; profile again: {NODE_LEVEL}")
    return replace(recording, warnings=(*recording.warnings, warning))


def _suspicion(recording: Recording, served: ServedModel) -> str | None:
    """Why a summary seems to hide kernels: none of them runs once per layer."""
    if not recording.rows or not served.layers:
        return None
    whole = sum(row.total_ns for row in recording.rows)
    often = [row.instances for row in recording.rows if row.total_ns > 1e-3 * whole]
    if max(often) >= served.layers * min(often):
        return None
    return (
        f"no kernel runs {served.layers} times as often as another, though the model has "
        f"{served.layers} layers: CUDA graphs seem to have been traced as a whole, "
        "so the kernels inside them are missing"
    )


def _names(recording: Recording) -> list[str]:
    if recording.launches is not None:
        return list(recording.launches.texts)
    return [row.name for row in recording.rows]
