"""What one call of a patched kernel saves, from the micro-benchmark of its shape."""

from __future__ import annotations

from dataclasses import dataclass

from patcher.bench import Evaluation, Timing
from patcher.reconciling.launches import ShapeLaunches


@dataclass(frozen=True)
class Saving:
    """Microseconds that one call saves, negative if it costs, with a 95 % interval."""

    us: float
    low_us: float
    high_us: float
    note: str
    caveats: tuple[str, ...] = ()


def saving(
    evaluation: Evaluation,
    shape: ShapeLaunches,
    dtypes: tuple[str, ...],
    replayed: bool | None,
    working_axes: frozenset[str] | None = None,
) -> Saving | str:
    """The saving at a shape, or why it is not known: another shape's figure is not taken for it.

    Args:
        dtypes: of the timed sweep.
        replayed: whether the engine's calls ran in CUDA graphs, as the timed ones did.
        working_axes: `Contract.working_axes`. A timing that differs in other axes alone, as in the
            blocks of a cache of which a call writes a few rows, counts, and the note says so; None:
            all axes tell.
    """
    if shape.bucket is not None:
        return f"the receipt names a range of sizes of {shape.bucket} only"
    timing = _at(evaluation.timings, shape.axes)
    if timing is None and working_axes is not None:
        timing = _at(evaluation.timings, _only(shape.axes, working_axes))
    if timing is None:
        return "never judged at this shape"
    if dtypes and shape.dtypes and set(dtypes) != set(shape.dtypes):
        return f"judged with {'/'.join(dtypes)} only"
    baseline, speedup = timing.baseline_us, timing.speedup
    note = f"against {evaluation.baseline or 'the strongest baseline'}"
    caveats: tuple[str, ...] = ()
    if other := _apart(timing.axes, shape.axes):
        note += f"; judged at {other}"
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
    )


_UNKNOWN = "whether the engine ran it in one was not recorded"


def _only(axes: dict[str, int], named: frozenset[str]) -> dict[str, int]:
    return {name: size for name, size in axes.items() if name in named}


def _apart(judged: dict[str, int], seen: dict[str, int]) -> str:
    shared = [name for name in judged if name in seen]
    return ", ".join(f"{name}={judged[name]}" for name in shared if judged[name] != seen[name])


def _at(timings: tuple[Timing, ...], axes: dict[str, int]) -> Timing | None:
    """The timing whose axes are these, as far as both name them; a sound one only."""
    for timing in timings:
        shared = timing.axes.keys() & axes.keys()
        same = shared and all(timing.axes[name] == axes[name] for name in shared)
        if same and timing.speedup_low > 0 and timing.baseline_us > 0:
            return timing
    return None
