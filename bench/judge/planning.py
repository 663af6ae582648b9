"""How many sets of buffers a point is judged on: what a set weighs decides.

Small sets come in numbers, so that a block of calls is long enough to be timed. A set that is
larger than any cache is cold by itself, and a few are enough to have calls that are made and one
that may not be.
"""

from __future__ import annotations

import torch

from patcher.bench.errors import UsageError
from patcher.bench.judge.blob import Layout
from patcher.bench.judge.cases import shapes_tried, tensors_of
from patcher.bench.judge.memory_file import CAPACITY
from patcher.bench.ops.contract import Point, Sweep
from patcher.bench.ops.op import Op

SETS = {"cpu": 16, "cuda": 32}
"""Buffer sets of a block."""
MAX_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 16 << 20}
FEWEST_SETS = 4
LARGE_BYTES = 64 << 20
"""A set of this size does not stay in a GPU's second-level cache (50 MB on an H200)."""
FEWEST_LARGE = 3
SOAKED = 16
"""Calls a block after the timed ones."""
SOAKED_BYTES = 1 << 30
"""What such a block holds at most."""
FEWEST_CALLS = 200
"""Checked calls of an op with large sets, whose thousand would take a minute."""
_COPIES = 6
"""Of a block on the device: buffers and what they held after each call in both runners, the judge's
own, and room for what is right."""


def block_sets(op: Op, point: Point, device: str) -> int:
    """Of a timed block."""
    plan = tensors_of(op, point)
    fewest = FEWEST_LARGE if plan.set_bytes > LARGE_BYTES else FEWEST_SETS
    fitting = max(min(SETS[device], MAX_BLOCK_BYTES[device] // plan.set_bytes), fewest)
    return min(fitting, CAPACITY // plan.sent_bytes)


def soaked_sets(plan: Layout) -> int:
    """Of a block of calls that are checked and not timed."""
    most = min(SOAKED_BYTES // plan.set_bytes, CAPACITY // plan.sent_bytes)
    return max(min(SOAKED, most), 1)


def soaked_calls(op: Op, sweep: Sweep, wanted: int) -> int:
    """Checked calls of a candidate that passes: as many as wanted, of large sets fewer. What a set
    weighs decides, and not how long the calls take, which a candidate may choose.
    """
    large = any(tensors_of(op, point).set_bytes > LARGE_BYTES for point in sweep.points())
    return min(wanted, FEWEST_CALLS) if large else wanted


def require_fits(op: Op, sweep: Sweep, device: str) -> None:
    """Before anything is built.

    Raises:
        UsageError: a point of the sweep, or a hidden shape, is too large to be judged.
    """
    for point in shapes_tried(op, sweep):
        plan = tensors_of(op, point)
        if FEWEST_LARGE * plan.sent_bytes > CAPACITY:
            raise UsageError(
                f"{op.name} at {point.label()} is too large to be judged: "
                f"{plan.sent_bytes / 2**30:.2f} GiB go to each call, and the judge sends "
                f"{CAPACITY / 2**30:g} GiB for {FEWEST_LARGE} calls",
                "take a sweep of smaller sizes; or, of a large tensor that is only read and of "
                'which any bits will do, say values = "bits" in op.toml: it is not sent',
            )
        if device == "cuda":
            _require_memory(op, point, plan)


def _require_memory(op: Op, point: Point, plan: Layout) -> None:
    needed = _COPIES * block_sets(op, point, "cuda") * plan.set_bytes
    whole = int(torch.cuda.get_device_properties(0).total_memory)
    if needed > whole:
        raise UsageError(
            f"{op.name} at {point.label()} is too large for this GPU: judging it takes about "
            f"{needed / 2**30:.0f} GiB of its {whole / 2**30:.0f}",
            "take a sweep of smaller sizes, or a GPU with more memory",
        )
