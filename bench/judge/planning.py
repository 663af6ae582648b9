"""Number of buffer sets per point, by the size of a set.

Many small sets make a block of calls long enough to be timed. A set larger than any cache is cold
anyway. Then a few sets suffice: some that are called, and one that must stay untouched.
"""

from __future__ import annotations

import math

import torch

from patcher.bench.errors import UsageError
from patcher.bench.judge.blob import Layout
from patcher.bench.judge.cases import shapes_tried, tensors_of
from patcher.bench.judge.memory_file import CAPACITY
from patcher.bench.ops.contract import Point, Sweep
from patcher.bench.ops.op import Op

SETS = {"cpu": 32, "cuda": 32}
"""Most buffer sets of a timed block."""
MAX_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 16 << 20}
"""Size limit of a timed block, unless the fewest sets are larger."""
FEWEST_SETS = 4
"""Fewest sets of a timed block."""
LARGE_BYTES = 64 << 20
"""Size above which a set does not fit a GPU's L2 cache (50 MB on an H200)."""
FEWEST_LARGE = 3
"""Fewest sets of a timed block of large sets."""
SOAKED = 16
"""Most calls of a block after timing, which is checked and not timed."""
SOAKED_BYTES = 1 << 29
"""Size limit of such a block."""
FEWEST_CALLS = 200
"""Number of checked calls of an op with large sets; a thousand would take a minute."""
_COPIES = 8
"""Copies of a block on the device: buffers and their contents after each call in both runners, the
judge's own, its bytes as they were sent and as they came back, and the expected values."""


def block_sets(op: Op, point: Point, device: str) -> int:
    """Number of buffer sets of a timed block at a point."""
    plan = tensors_of(op, point)
    fewest = FEWEST_LARGE if plan.set_bytes > LARGE_BYTES else FEWEST_SETS
    fitting = max(min(SETS[device], MAX_BLOCK_BYTES[device] // plan.set_bytes), fewest)
    return min(fitting, CAPACITY // plan.carried_bytes)


def soaked_sets(plan: Layout) -> int:
    """Number of buffer sets of a block that is checked and not timed."""
    most = min(SOAKED_BYTES // plan.set_bytes, CAPACITY // plan.carried_bytes)
    return max(min(SOAKED, most), 1)


def soaked_calls(op: Op, sweep: Sweep, wanted: int) -> int:
    """Number of checked calls of a passing candidate: `wanted`, or fewer for large sets.

    It depends on the size of a set, not on the time of a call, which the candidate could choose.
    """
    large = any(tensors_of(op, point).set_bytes > LARGE_BYTES for point in sweep.points())
    return min(wanted, FEWEST_CALLS) if large else wanted


def require_fits(op: Op, sweep: Sweep, device: str) -> None:
    """Check that every point fits into memory and has something to do, before anything is built.

    Raises:
        UsageError: a point of the sweep or a hidden shape is too large, or nothing of it is timed.
    """
    results = [tensor for tensor in op.contract.tensors if tensor.access != "read"]
    for point in sweep.points():
        if not any(math.prod(op.contract.shape(tensor, point)) for tensor in results):
            raise UsageError(
                f"{op.name} at {point.label()} has nothing to do: what it writes is empty",
                "choose a sweep with sizes above 0",
            )
    for point in shapes_tried(op, sweep):
        plan = tensors_of(op, point)
        every = [tensor.name for tensor in op.contract.tensors]
        # to see it right in every regime
        once = tensors_of(op, point, changed=every).carried_bytes
        timed = point.dtypes == sweep.dtypes
        if max(FEWEST_LARGE * plan.carried_bytes if timed else 0, once) > CAPACITY:
            calls = "1 call" if once > CAPACITY else f"{FEWEST_LARGE} calls"
            each = once if once > CAPACITY else plan.carried_bytes
            raise UsageError(
                f"{op.name} at {point.label()} is too large to be judged: "
                f"{each / 2**30:.2f} GiB go to or from each call, and the judge moves "
                f"{CAPACITY / 2**30:g} GiB for {calls}",
                "choose a sweep with smaller sizes; or, if a large read-only tensor may hold any "
                'bits, set its values = "bits" in op.toml, so that it is not sent',
            )
        if device == "cuda" and timed:
            _require_memory(op, point, plan)


def _require_memory(op: Op, point: Point, plan: Layout) -> None:
    needed = _COPIES * block_sets(op, point, "cuda") * plan.set_bytes
    whole = int(torch.cuda.get_device_properties(0).total_memory)
    if needed > whole:
        raise UsageError(
            f"{op.name} at {point.label()} is too large for this GPU: judging it takes about "
            f"{needed / 2**30:.0f} GiB of its {whole / 2**30:.0f}",
            "choose a sweep with smaller sizes, or a GPU with more memory",
        )
