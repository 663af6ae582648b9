"""How often a patched kernel runs in one decode step, shape by shape, and who says so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pydantic import Field

from patcher.bench import Record, Throughput

_SIZE = re.compile(r"(\w+)=(<=)?(\d+)")
"""`tokens=<=256` is a bucket: a receipt names large numbers of rows by the next power of two."""
_EVERY_STEP = 0.5
"""Calls a step from which on a shape belongs to decode: prefill runs once in many steps."""
_COUNTED_APART = 0.1
"""Receipts count warm-ups and untimed steps, too: only a larger difference is told."""
_SEEN_APART = 0.02


class ShapeLaunches(Record):
    """One shape of one op."""

    label: str
    """As receipts name it: `tokens=8 hidden=2880 bfloat16`."""
    axes: dict[str, int]
    bucket: str | None = None
    """An axis of which only a range of sizes is known."""
    dtypes: tuple[str, ...] = ()
    """Of its tensors, each once; empty: not known."""
    per_step: float = Field(ge=0)
    """Launches in one decode step; 0: it does not belong to one."""


class StepLaunches(Record):
    """All shapes of one op in one decode step."""

    op: str
    shapes: tuple[ShapeLaunches, ...]
    source: str
    """Who says how often: the contract, a profile, or the receipts."""
    notes: tuple[str, ...] = ()
    """What they disagree on."""


def patched_steps(throughput: Throughput) -> int:
    """Decode steps of the patched windows, those that are not timed included."""
    windows = {window.pair for window in throughput.windows if window.kind == "ab"}
    return len(windows) * throughput.workload.output_len


def step_launches(
    op: str,
    throughput: Throughput,
    calls: Mapping[str, int],
    *,
    axis: str | None = None,
    contract: float | None = None,
    profile: float | None = None,
) -> StepLaunches | None:
    """Launches of one op in a decode step; None where nothing says how many there are.

    The receipts know the shapes; how many launches there are is said best by a profile, else by the
    contract, else by the receipts.

    Args:
        calls: of the A/B's receipt, by kernel and shape.
        axis: the op's axis that a step's batch is the size of, for where no receipt names shapes.
        contract: calls of a step by patch point and number of layers.
        profile: launches of a step as a profile of the patched engine shows them.
    """
    steps = patched_steps(throughput)
    own = {
        label.removeprefix(f"{op} "): count
        for label, count in calls.items()
        if label.startswith(f"{op} ")
    }
    rates = {label: count / steps for label, count in own.items()} if steps else {}
    decode = {label: rate for label, rate in rates.items() if rate >= _EVERY_STEP}
    counted = sum(decode.values()) or None
    total, source = next(
        (
            (value, words)
            for value, words in (
                (profile, "a profile of the patched engine"),
                (contract, "the contract"),
                (counted, "the receipts"),
            )
            if value
        ),
        (None, ""),
    )
    if total is None:
        return None
    if decode:
        shares = {label: rate / sum(decode.values()) for label, rate in decode.items()}
        shapes = [
            _shape(label, total * shares.get(label, 0.0), throughput.workload.batch)
            for label in own
        ]
    elif axis is not None:
        shapes = [
            ShapeLaunches(
                label=f"{axis}={throughput.workload.batch}",
                axes={axis: throughput.workload.batch},
                per_step=total,
            )
        ]
        source += "; no receipt names a decode step's shapes, so they are taken from the batch"
    else:
        return None
    notes = _disagreements(op, profile, contract, counted)
    return StepLaunches(op=op, shapes=tuple(shapes), source=source, notes=tuple(notes))


def _shape(label: str, per_step: float, batch: int) -> ShapeLaunches:
    dtypes = label.rpartition(" ")[2]
    axes: dict[str, int] = {}
    bucket = None
    for name, range_, size in _SIZE.findall(label):
        if not range_:
            axes[name] = int(size)
        elif int(size) // 2 < batch <= int(size):
            axes[name] = batch  # a decode step has as many rows as sequences
        else:
            bucket = name
    return ShapeLaunches(
        label=label,
        axes=axes,
        bucket=bucket,
        dtypes=() if "=" in dtypes else tuple(dict.fromkeys(dtypes.split("/"))),
        per_step=per_step,
    )


def _disagreements(
    op: str, profile: float | None, contract: float | None, counted: float | None
) -> Iterable[str]:
    if profile and contract and abs(profile / contract - 1) > _SEEN_APART:
        yield f"{op}: {profile:.4g} launches a step in the profile, {contract:.4g} by the contract"
    said = profile or contract
    if said and counted and abs(counted / said - 1) > _COUNTED_APART:
        yield f"{op}: {said:.4g} launches a step, but the receipts count about {counted:.4g}"
