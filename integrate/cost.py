"""Measure the cost of dispatch per call and per graph: `python -m patcher.integrate.cost`.

A call in an engine's compiled code goes through the dispatcher's operator. Its cost is measured
over layers with matmuls of several shapes, whose calls follow each other as in a model.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
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


LAYERS = 30
MATMULS = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outer and inner sizes of the matmuls of a layer of SmolLM2-135M, in the order of its calls."""
MOST_TOKENS = 32
"""Of the guards; a call with more falls back."""


def no_matmul(
    x: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor, output: torch.Tensor
) -> None:
    """An empty matmul, of the patch and of the engine."""


def by_rows(
    x: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The contract's arguments from those of the operator of vLLM's point `linear`."""
    return x, columns.t(), bias, output


def operator_cost(device: str, tokens: int) -> dict[str, Any]:
    """Time per call (ns) of the operator that vLLM's point `linear` puts into compiled code, beyond
    a direct call of an empty function, over all layers of a model in turn.

    Args:
        device: of the tensors.
        tokens: rows of x; above `MOST_TOKENS` each call falls back.
    """
    guards = CallGuards(
        device=device,
        tensors=(
            TensorGuard("x", ("tokens", "inner"), "T", mutated=False, layout="rows", alignment=16),
            TensorGuard("weight", ("outer", "inner"), "T", mutated=False, alignment=16),
            TensorGuard("bias", ("biased",), "T", mutated=False),
            TensorGuard("output", ("tokens", "outer"), "T", mutated=True, alignment=16),
        ),
        scalars=(),
        dtypes=({"T": torch.bfloat16},),
        axes={"tokens": AxisBounds(maximum=MOST_TOKENS)},
    )
    through = Dispatcher("cost", no_matmul, guards, CallCounters("id", "cost"), strict=False)
    operator = through.op(no_matmul, by_rows)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    calls = [
        (zeros(tokens, inner), zeros(outer, inner).t(), zeros(0), zeros(tokens, outer))
        for _ in range(LAYERS)
        for outer, inner in MATMULS
    ]
    try:
        with torch.inference_mode():
            for _ in range(3):
                _ns_in_turn(operator, calls)
            pairs = []
            for pair in range(PAIRS):
                order = [no_matmul, operator] if pair % 2 else [operator, no_matmul]
                times = {call: _ns_in_turn(call, calls) for call in order}
                pairs.append((times[no_matmul], times[operator]))
    finally:
        through.close()
    difference = [slow - fast for fast, slow in pairs]
    return {
        "operator": "linear, 4 shapes in turn",
        "device": device,
        "tokens": tokens,
        "falls_back": dict(through.book.fallbacks),
        "pairs": PAIRS,
        "calls": len(calls),
        "direct_ns": _middle([fast for fast, _ in pairs]),
        "operator_ns": _middle([slow for _, slow in pairs]),
        "difference_ns": _middle(difference),
        "difference_ns_quartiles": [round(one) for one in statistics.quantiles(difference)[::2]],
    }


def _ns_in_turn(call: Callable[..., object], calls: Sequence[tuple[torch.Tensor, ...]]) -> float:
    begin = time.perf_counter_ns()
    for args in calls:
        call(*args)
    return (time.perf_counter_ns() - begin) / len(calls)


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
        for tokens in (8, 2 * MOST_TOKENS):
            print(json.dumps(operator_cost(kind, tokens)), flush=True)
    if device == "cuda":
        print(json.dumps(graph_cost()))


if __name__ == "__main__":
    main()
