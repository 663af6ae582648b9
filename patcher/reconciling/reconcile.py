"""Does the kernels' own gain explain the whole model's? Row by row, and what is left, in words.

A gain that nothing explains is suspicious, and one that is missing is worth a look: both are said,
neither decides. The rows are what each patched kernel should save in a decode step (its micro gain
times its launches) and what other rows of the profile moved by; their sum stands against the gain
of the A/B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from patcher.bench import SCHEMA_VERSION, Comparison, Evaluation, Record, Throughput
from patcher.hotspot import Profile
from patcher.reconciling.launches import ShapeLaunches, StepLaunches
from patcher.reconciling.micro import Saving, saving
from patcher.reconciling.row_changes import moved_rows, overlap_caveat
from patcher.reconciling.used_lengths import UsedLengths


class GainRow(Record):
    """One part of the sum; times are what one decode step saves, negative if it costs."""

    name: str
    kind: Literal["kernel", "moved"]
    """`kernel`: a patched kernel by its micro-benchmark; `moved`: a row of the profile."""
    shape: str = ""
    launches: float | None = None
    """In one decode step."""
    saved_us: float | None
    """None: it was never judged at this shape. What is `apart` was judged at other lengths: it is
    shown and not counted."""
    low_us: float | None = None
    """95 % interval; None of what one profile shows before and one after."""
    high_us: float | None = None
    counted: bool = True
    """Whether it is part of the sum."""
    note: str = ""


class Reconciliation(Record):
    """Micro gain times launches, and what else moved, against the measured gain."""

    schema_version: int = SCHEMA_VERSION
    step_us: float
    """One decode step of the baseline, from the A/B."""
    measured_us: float
    """What a step got shorter by."""
    measured_low_us: float
    measured_high_us: float
    measured_pct: float
    """The gain in tokens per second that this is."""
    rows: tuple[GainRow, ...] = ()
    expected_us: float | None = None
    """Sum of the counted rows; None where there is none."""
    expected_low_us: float | None = None
    expected_high_us: float | None = None
    expected_pct: float | None = None
    unexplained_pct: float | None = None
    """Measured gain less the expected one; negative: some of the expected is missing."""
    unexplained_low_pct: float | None = None
    unexplained_high_pct: float | None = None
    explained: bool | None = None
    """Whether the intervals allow that nothing is left; None: it cannot be told."""
    left_out: tuple[str, ...] = ()
    """Launches of patches that the sum lacks, each with the reason."""
    caveats: tuple[str, ...] = ()
    """What the rows do not know."""
    said: str
    """The result in a sentence."""


@dataclass(frozen=True)
class PatchedKernel:
    """What is known of one patched kernel."""

    evaluation: Evaluation
    launches: StepLaunches | None
    dtypes: tuple[str, ...] = ()
    """Of the timed sweep, each once; empty: not known."""
    further: tuple[tuple[Evaluation, tuple[str, ...]], ...] = ()
    """The same of verdicts over other sweeps."""
    replayed: bool | None = None
    """Whether its launches ran in CUDA graphs."""
    pdl: bool = False
    """Whether it takes part in programmatic dependent launch."""
    working_axes: frozenset[str] | None = None
    """`Contract.working_axes`; None: all axes tell shapes apart."""
    used: UsedLengths | None = None
    """Of an op over a paged cache, what served requests use of it."""
    owns: Callable[[str], bool] = lambda name: False
    """Whether a profile's kernel of that name is it, or did its work before."""


def reconcile(
    kernels: Sequence[PatchedKernel],
    throughput: Throughput,
    before: Profile | None = None,
    after: Profile | None = None,
) -> Reconciliation:
    """Hold the sum of the rows against the measured gain.

    Args:
        before: a profile of the unpatched engine.
        after: one of the patched engine; with both, rows that moved otherwise take part.
    """
    found = throughput.comparison
    # tokens of one step over tokens per second
    step_us = throughput.workload.batch / found.baseline_tokens_per_s * 1e6
    rows: list[GainRow] = []
    left_out: list[str] = []
    caveats: list[str] = []
    for kernel in kernels:
        own, missing, said = _kernel_rows(kernel, throughput)
        rows += own
        left_out += missing
        caveats += said
    if before is not None and after is not None:
        ops = [kernel.evaluation.op for kernel in kernels]
        moved, said = moved_rows(
            before, after, ops, step_us, lambda name: any(one.owns(name) for one in kernels)
        )
        rows += [GainRow(kind="moved", **vars(one)) for one in moved]
        caveats += said
    caveats += overlap_caveat(after or before)
    return _summed(rows, found, step_us, tuple(left_out), tuple(dict.fromkeys(caveats)))


def _kernel_rows(
    kernel: PatchedKernel, throughput: Throughput
) -> tuple[list[GainRow], list[str], list[str]]:
    """Its rows, what of it is not in the sum, and caveats."""
    op, launches = kernel.evaluation.op, kernel.launches
    if launches is None:
        return [], [f"{op}: how often it runs in a decode step was not recorded"], []
    rows: list[GainRow] = []
    caveats = list(launches.notes)
    uncounted: dict[str, float] = {}
    for shape in launches.shapes:
        if shape.per_step == 0:
            rows.append(_outside(op, shape.label))
            continue
        one = _saving(kernel, shape)
        if isinstance(one, str):
            rows.append(_unjudged(op, shape, one))
        else:
            rows.append(_row(op, shape, one))
            caveats += one.caveats
        if why := one if isinstance(one, str) else one.apart:
            uncounted[why] = uncounted.get(why, 0.0) + shape.per_step
    left_out = [f"{op}, {each:.4g} launches a step: {why}" for why, each in uncounted.items()]
    if kernel.pdl:
        caveats.append(
            f"{op} takes part in programmatic dependent launch: it begins before the kernel "
            "ahead of it ends, so a step need not get shorter by what it saves alone"
        )
    here, there = kernel.evaluation.environment, throughput.environment
    if here is not None and here.device != there.device:
        caveats.append(f"{op} was timed on {here.device}, the model on {there.device}")
    return rows, left_out, caveats


def _saving(kernel: PatchedKernel, shape: ShapeLaunches) -> Saving | str:
    """By the first verdict that knows the shape, else one at other lengths, or why the first of all
    does not."""
    judged = ((kernel.evaluation, kernel.dtypes), *kernel.further)
    found = [
        saving(evaluation, shape, dtypes, kernel.replayed, kernel.working_axes, kernel.used)
        for evaluation, dtypes in judged
    ]
    known = [one for one in found if isinstance(one, Saving)]
    return next((one for one in known if not one.apart), (known or found)[0])


def _outside(op: str, label: str) -> GainRow:
    return GainRow(
        name=op,
        kind="kernel",
        shape=label,
        launches=0.0,
        saved_us=None,
        counted=False,
        note="does not run in every decode step: prefill, or another batch",
    )


def _unjudged(op: str, shape: ShapeLaunches, why: str) -> GainRow:
    return GainRow(
        name=op,
        kind="kernel",
        shape=shape.label,
        launches=shape.per_step,
        saved_us=None,
        counted=False,
        note=why,
    )


def _row(op: str, shape: ShapeLaunches, one: Saving) -> GainRow:
    return GainRow(
        name=op,
        kind="kernel",
        shape=shape.label,
        launches=shape.per_step,
        saved_us=shape.per_step * one.us,
        low_us=shape.per_step * one.low_us,
        high_us=shape.per_step * one.high_us,
        counted=not one.apart,
        note=one.note,
    )


def _summed(
    rows: list[GainRow],
    found: Comparison,
    step_us: float,
    left_out: tuple[str, ...],
    caveats: tuple[str, ...],
) -> Reconciliation:
    measured = [
        step_us * (1 - 1 / (1 + gain / 100))
        for gain in (found.gain_pct, found.gain_low_pct, found.gain_high_pct)
    ]
    base = {
        "step_us": step_us,
        "measured_us": measured[0],
        "measured_low_us": measured[1],
        "measured_high_us": measured[2],
        "measured_pct": found.gain_pct,
        "rows": tuple(rows),
        "left_out": left_out,
        "caveats": caveats,
    }
    counted = [row for row in rows if row.counted and row.saved_us is not None]
    if not any(row.kind == "kernel" for row in counted):
        why = [*left_out, *caveats] or ["no patched kernel was timed at a shape of the decode step"]
        return Reconciliation.model_validate({**base, "said": f"not reconciled: {'; '.join(why)}"})
    # intervals of one kernel's shapes share what they are wrong by, so their ends are added
    expected = sum(row.saved_us or 0.0 for row in counted)
    low = sum(_or(row.low_us, row.saved_us) for row in counted)
    high = sum(_or(row.high_us, row.saved_us) for row in counted)
    gains = [_gain(saved, step_us) for saved in (expected, low, high)]
    left = found.gain_pct - gains[0]
    # the A/B and the micro-benchmark are independent: their errors add up as squares
    left_low = left - math.hypot(found.gain_pct - found.gain_low_pct, gains[2] - gains[0])
    left_high = left + math.hypot(found.gain_high_pct - found.gain_pct, gains[0] - gains[1])
    explained: bool | None = left_low <= 0 <= left_high
    if explained and left_high - left_low > 2 * abs(gains[0]):
        explained = None  # these intervals would allow that the kernels gain nothing, too
    said = _said(explained, found.gain_pct, gains[0], left, left_low, left_high)
    if left_out:
        said += f"; not in that promise: {'; '.join(left_out)}"
        if explained:
            explained = None  # what is left out saves or costs something, too
    return Reconciliation.model_validate(
        {
            **base,
            "expected_us": expected,
            "expected_low_us": low,
            "expected_high_us": high,
            "expected_pct": gains[0],
            "unexplained_pct": left,
            "unexplained_low_pct": left_low,
            "unexplained_high_pct": left_high,
            "explained": explained,
            "said": said,
        }
    )


def _or(value: float | None, otherwise: float | None) -> float:
    return next(one for one in (value, otherwise, 0.0) if one is not None)


def _gain(saved_us: float, step_us: float) -> float:
    """Percent more tokens per second, for a step that much shorter; at most a thousandfold."""
    return 100 * (step_us / max(step_us - saved_us, step_us / 1000) - 1)


def _said(
    explained: bool | None, measured: float, expected: float, left: float, low: float, high: float
) -> str:
    span = f"{left:+.2f} % [{low:+.2f}, {high:+.2f}]"
    if explained is False and left < 0:
        return f"expected {expected:.2f} %, measured {measured:.2f} %: {span} is missing"
    if explained is False:
        return f"explained {expected:.2f} of {measured:.2f} %; {span} is not explained"
    held = f"expected {expected:.2f} %, measured {measured:.2f} %: the difference, {span}, "
    if explained is None:
        return held + "is known too roughly to tell"
    return held + "is no more than the intervals allow"
