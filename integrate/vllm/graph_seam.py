"""Where patch points rewrite the graph of a model: before vLLM splits it into pieces.

`VllmBackend` calls `split_graph` once for each graph that Dynamo traced, whatever the model, under
every mode of CUDA graphs. The graph is whole there: operators of several layers are side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.swap import SharedPatch

BACKENDS = "vllm.compilation.backends"
WIDEST = "moe_block"
"""The point that rewrites first: others are for parts of what it fuses, and get what it leaves."""

GraphRewrite = Callable[[fx.GraphModule, list[str]], list[str]]
"""Changes a graph in place; takes and returns the operators at which vLLM splits it."""


def graph_rewrite(point: str) -> SharedPatch:
    """The place of a point's `GraphRewrite`; points run in the order in which they were installed,
    but `WIDEST` before the others.

    Args:
        point: the name of the patch point.
    """
    return SharedPatch(sources.module(BACKENDS), "split_graph", point, _rewriting)


def counted_rewrite(
    kernel: Dispatcher, fuse: Callable[[fx.GraphModule], Iterable[str]]
) -> GraphRewrite:
    """A rewrite whose reasons are final, and that leaves where vLLM splits the graph.

    Args:
        kernel: counts the places that `fuse` leaves to the engine.
        fuse: changes a graph in place; gives a reason for each place that it leaves.
    """

    def rewrite(graph: fx.GraphModule, splitting_ops: list[str]) -> list[str]:
        kernel.book.leave_in_graph(fuse(graph))
        return splitting_ops

    return rewrite


def _rewriting(original: Any, parts: dict[str, GraphRewrite]) -> Any:
    def split_graph(graph: fx.GraphModule, splitting_ops: list[str]) -> Any:
        for _, rewrite in sorted(parts.items(), key=lambda item: item[0] != WIDEST):
            splitting_ops = rewrite(graph, splitting_ops)
        return original(graph, splitting_ops)

    return split_graph
