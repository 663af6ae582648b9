"""What one call of a patched kernel saves, from the micro-benchmark of its shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from patcher.bench import Evaluation, Timing
from patcher.reconciling.launches import ShapeLaunches
from patcher.reconciling.used_lengths import UsedLengths


@dataclass(frozen=True)
class Saving:
    """Microseconds that one call saves, negative if it costs, with a 95 % interval."""

    us: float
    low_us: float
    high_us: float
    note: str
    caveats: tuple[str, ...] = ()
    apart: str = ""
    """What was served otherwise than it was judged, so that this is no part of a promise; empty:
    nothing."""


def saving(
    evaluation: Evaluation,
    shape: ShapeLaunches,
    dtypes: tuple[str, ...],
    replayed: bool | None,
    working_axes: frozenset[str] | None = None,
    used: UsedLengths | None = None,
) -> Saving | str:
    """The saving at a shape, or why it is not known: another shape's figure is not taken for it.

    Args:
        dtypes: of the timed sweep.
        replayed: whether the engine's calls ran in CUDA graphs, as the timed ones did.
        working_axes: `Contract.working_axes`. A timing that differs in other axes alone, as in the
            blocks of a cache of which a call writes a few rows, counts, and the note says so; None:
            all axes tell.
        used: of an op over a paged cache. There only what the cache has room for may differ, and a
            timing whose requests are of other lengths than the served ones gives a saving that is
            `apart`.
    """
    if shape.bucket is not None:
        return f"the receipt names a range of sizes of {shape.bucket} only"
    telling = _telling(shape.axes, working_axes, used)
    timing, apart = _nearest(evaluation.timings, shape.axes, telling, used)
    if timing is None:
        return _unjudged(evaluation.timings, telling)
    if dtypes and shape.dtypes and set(dtypes) != set(shape.dtypes):
        return f"judged with {'/'.join(dtypes)} only"
    baseline, speedup = timing.baseline_us, timing.speedup
    note = f"against {evaluation.baseline or 'the strongest baseline'}"
    caveats: tuple[str, ...] = ()
    if apart:
        note = f"{apart}; {note}"
    elif other := _apart(timing.axes, shape.axes):
        note += f"; judged at {other}"
        note += f"; {used.used(timing.axes, shape.axes)}" if used is not None else ""
    kind = evaluation.environment.device_kind if evaluation.environment else "cpu"
    if kind == "cuda" and replayed is not True:
        eager, ours = timing.baseline_eager_us, timing.candidate_eager_us
        if replayed is False and eager and ours:
            # the interval of the timing in graphs, as wide by proportion
            baseline, speedup = eager, eager / ours
            note += ", both with their launches, outside of graphs"
        else:
            who = "the engine launched it outside of graphs" if replayed is False else _UNKNOWN
            caveats = (f"{evaluation.op}: timed inside of CUDA graphs; {who}",)
    by = speedup / timing.speedup
    cold, ours = timing.baseline_cold_us, timing.candidate_cold_us
    if cold is not None and ours is not None:
        note += f"; {cold - ours:+.2f} us a call where L2 is cold"
    return Saving(
        us=baseline * (1 - 1 / speedup),
        low_us=baseline * (1 - 1 / (timing.speedup_low * by)),
        high_us=baseline * (1 - 1 / (timing.speedup_high * by)),
        note=note,
        caveats=caveats,
        apart=apart,
    )


_UNKNOWN = "whether the engine ran it in one was not recorded"


def _nearest(
    timings: tuple[Timing, ...],
    axes: dict[str, int],
    telling: dict[str, int],
    used: UsedLengths | None,
) -> tuple[Timing | None, str]:
    """The timing at a shape, and what of its lengths is not the same."""
    known = [*_at(timings, axes), *_at(timings, telling)]
    if used is None or not known:
        return next(iter(known), None), ""
    for timing in known:
        if used.same(timing.axes, axes):
            return timing, ""
    return known[0], used.apart(known[0].axes, axes)


def _telling(
    axes: dict[str, int], working_axes: frozenset[str] | None, used: UsedLengths | None
) -> dict[str, int]:
    """The sizes that tell shapes apart."""
    if used is not None:
        return {name: size for name, size in axes.items() if name not in used.names.room}
    names = axes.keys() if working_axes is None else axes.keys() & working_axes
    return {name: size for name, size in axes.items() if name in names}


def _apart(judged: dict[str, int], seen: dict[str, int]) -> str:
    shared = [name for name in judged if name in seen]
    return ", ".join(f"{name}={judged[name]}" for name in shared if judged[name] != seen[name])


def _unjudged(timings: tuple[Timing, ...], axes: dict[str, int]) -> str:
    """That there is no timing at these sizes, and by what the nearest one differs."""

    def distance(judged: dict[str, int]) -> tuple[int, float]:
        pairs = [(size, axes[name]) for name, size in judged.items() if name in axes]
        apart = [abs(math.log((one + 1) / (other + 1))) for one, other in pairs if one != other]
        return len(apart), sum(apart)

    judged = [one.axes for one in timings if one.axes.keys() & axes.keys()]
    nearest = min(judged, key=distance, default={})
    other = _apart(nearest, axes)
    if not other:
        return "never judged at this shape"
    return f"never judged at {_apart(axes, nearest)}, the nearest is {other}"


def _at(timings: tuple[Timing, ...], axes: dict[str, int]) -> Iterator[Timing]:
    """The timings whose axes are these, as far as both name them; sound ones only."""
    for timing in timings:
        shared = timing.axes.keys() & axes.keys()
        same = shared and all(timing.axes[name] == axes[name] for name in shared)
        if same and timing.speedup_low > 0 and timing.baseline_us > 0:
            yield timing
