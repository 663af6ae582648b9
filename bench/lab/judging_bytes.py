"""`python -m patcher.bench.lab bytes`: bytes that judging large ops moves, and the time of a block.

Bytes follow from the layout. Seconds are measured for one block of input sets at the largest sweep
point, on a GPU if there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from patcher.bench.judge.cases import Secrets, correctness_cases, expect, tensors_of
from patcher.bench.judge.planning import LARGE_BYTES, block_sets
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.regimes import changed
from patcher.bench.judge.sets import CallSets
from patcher.bench.judge.timed_arm import fresh
from patcher.bench.judge.trial import AFTER
from patcher.bench.ops.op import Op, load_ops

PAIRS = 6
BOTH = 1 + PAIRS + 4
"""Blocks per point on a GPU that both arms run: warm-up, pairs, single calls."""
ONE = 2 + 2 + 4
"""Blocks that one arm runs: first calls, verified, cold and eager. Four of them are the candidate's
and are returned."""


def judging_bytes() -> None:
    for op in load_ops().values():
        if not any(sweep.device == "cuda" for sweep in op.contract.sweeps):
            continue
        points = op.sweep("cuda").points()
        if tensors_of(op, points[-1]).set_bytes > LARGE_BYTES:
            _print_bytes(op)
            _print_seconds(op, "cuda" if torch.cuda.is_available() else "cpu")


def _print_bytes(op: Op) -> None:
    sweep = op.sweep("cuda")
    cases = correctness_cases(op, sweep, Secrets(1))
    once = [
        (1, tensors_of(op, each.point, each.placed, changed=changed(op, each.regime, each.only)))
        for each in (*cases, *cases[:AFTER])
    ]
    once += [(3, tensors_of(op, point)) for point in (sweep.points()[0], sweep.points()[-1])]
    drawn = sent = returned = 0
    for sets, plan in once:
        drawn += sets * plan.set_bytes
        sent += sets * plan.sent_bytes
        returned += sets * plan.returned_bytes
    for point in sweep.points():
        plan, sets = tensors_of(op, point), block_sets(op, point, "cuda")
        drawn += (BOTH + ONE) * sets * plan.set_bytes
        sent += (2 * BOTH + ONE) * sets * plan.sent_bytes
        returned += (BOTH + 4) * sets * plan.returned_bytes
    point = sweep.points()[-1]
    plan, sets = tensors_of(op, point), block_sets(op, point, "cuda")
    sizes = (plan.set_bytes, plan.sent_bytes, plan.returned_bytes)
    print(
        f"{op.name}, {point.label()}: a set is {_mb(sizes[0])}, of which {_mb(sizes[1])} are sent "
        f"and {_mb(sizes[2])} come back; {sets} sets a block"
    )
    print(
        f"{op.name}: one verdict over {len(sweep.values)} points with {PAIRS} pairs draws "
        f"{_mb(drawn)} on the device, sends {_mb(sent)}, takes {_mb(returned)} back",
        flush=True,
    )


def _print_seconds(op: Op, device: str) -> None:
    sweep, draw = op.sweep("cuda"), Secrets(1)
    point = sweep.points()[-1]
    stock = _step(op, "stock of bits", lambda: RandomPool(op, sweep, device, draw))
    cases = fresh(op, point, block_sets(op, point, "cuda"), draw)
    sets: CallSets = _step(op, "draw, mix, pack", lambda: CallSets.made(op, cases, device, stock))
    _step(op, "digests", lambda: [sets.digests(values, 1) for values in sets.inputs])
    if device == "cuda":  # a CPU takes a minute
        _step(op, "reference", lambda: expect(op, cases[0], sets.inputs[0]), " (of one call)")


def _step(op: Op, name: str, step: Callable[[], Any], note: str = "") -> Any:
    begin = time.perf_counter()
    result = step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"{op.name}: {name:16s} {time.perf_counter() - begin:7.3f} s{note}", flush=True)
    return result


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
