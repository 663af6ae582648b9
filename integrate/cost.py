"""Measure the cost of dispatch per call and per graph: `python -m patcher.integrate.cost`."""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from patcher.bench.machine.environment import describe
from patcher.integrate.counts import CallCounters, GraphWatch
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds, CallGuards, TensorGuard

CALLS = 500
"""Calls per contender and pair: short enough that other programs rarely interrupt them."""
PAIRS = 1001
"""Pairs of interleaved contenders with alternating order."""
IN_A_GRAPH = 48
"""Calls per graph: the number of residual adds and norms in a decode step of gpt-oss-20b."""


def nothing(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """An empty kernel, so that only dispatch takes time."""


def add(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """Add in place with one launch."""
    residual.add_(input)


def dispatcher(
    device: str, kernel: Callable[..., object], strict: bool, watch: GraphWatch | None = None
) -> Dispatcher:
    """A dispatcher with the guards of `fused_add_rms_norm`: three tensors and a scalar."""
    rows, weight = ("tokens", "hidden"), ("hidden",)
    guards = CallGuards(
        device=device,
        tensors=(
            TensorGuard("input", rows, "T", mutated=True, alignment=16),
            TensorGuard("residual", rows, "T", mutated=True, alignment=16),
            TensorGuard("weight", weight, "T", mutated=False, alignment=16),
        ),
        scalars=(("epsilon", float),),
        dtypes=({"T": torch.bfloat16},),
        axes={"hidden": AxisBounds(multiple_of=8, maximum=16384)},
    )
    result = Dispatcher("add", kernel, guards, CallCounters("id", "d"), strict=strict, watch=watch)
    if watch is not None:
        watch.add(result.book)
    return result


def tensors(device: str) -> tuple[torch.Tensor, ...]:
    """bfloat16 input and residual [8, 2880], and weight [2880]."""
    rows = [torch.ones(8, 2880, dtype=torch.bfloat16, device=device) for _ in range(2)]
    return (*rows, torch.ones(2880, dtype=torch.bfloat16, device=device))


def call_cost(device: str, strict: bool) -> dict[str, Any]:
    """Time per call (ns): the kernel called directly, through dispatch, and the difference."""
    through = dispatcher(device, nothing, strict)
    args = (*tensors(device), 1e-5)
    with torch.inference_mode():
        for _ in range(3):  # guards are checked, then the kernel is proven
            through(*args)
        pairs = []
        for pair in range(PAIRS):
            contenders: list[Callable[..., object]] = [nothing, through]
            order = contenders if pair % 2 else contenders[::-1]
            times = {call: _ns(call, args) for call in order}
            pairs.append((times[nothing], times[through]))
    difference = [slow - fast for fast, slow in pairs]
    return {
        "dispatch": "measuring" if strict else "serving",
        "device": device,
        "pairs": PAIRS,
        "calls": CALLS,
        "direct_ns": _middle([fast for fast, _ in pairs]),
        "dispatched_ns": _middle([slow for _, slow in pairs]),
        "ratio": round(statistics.median(slow / fast for fast, slow in pairs), 1),
        "difference_ns": _middle(difference),
        "difference_ns_quartiles": [round(one) for one in statistics.quantiles(difference)[::2]],
    }


def _ns(call: Callable[..., object], args: tuple[Any, ...]) -> float:
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        call(*args)
    return (time.perf_counter_ns() - begin) / CALLS


def _middle(values: list[float]) -> int:
    return round(statistics.median(values))


def graph_cost() -> dict[str, Any]:
    """Nodes of CUDA graphs of the same calls, direct and through dispatch."""
    watch = GraphWatch([])
    through = dispatcher("cuda", add, strict=False, watch=watch)
    args: tuple[Any, ...] = (*tensors("cuda"), 1e-5)
    nodes = {}
    with watch, torch.inference_mode():
        through.warm(*args)
        for name, call in (("direct", add), ("dispatched", through)):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                for _ in range(IN_A_GRAPH):
                    call(*args)
            nodes[name] = _nodes(graph)
            graph.replay()
        torch.cuda.synchronize()
    return {
        "graph_of_calls": IN_A_GRAPH,
        "nodes": nodes,
        "equal": nodes["direct"] == nodes["dispatched"],
        "counted_in_one_replay": through.book.replayed.total(),
    }


def _nodes(graph: torch.cuda.CUDAGraph) -> int:
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    error = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    if error:
        raise RuntimeError(f"cuGraphGetNodes returned {error}")
    return count.value


def main() -> None:
    """Print one line of JSON per measurement."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(json.dumps({"environment": describe(device).model_dump(mode="json")}))
    for kind in dict.fromkeys(("cpu", device)):
        for strict in (False, True):
            print(json.dumps(call_cost(kind, strict)), flush=True)
    if device == "cuda":
        print(json.dumps(graph_cost()))


if __name__ == "__main__":
    main()
