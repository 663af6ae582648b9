"""Find whole blocks of experts in a graph that vLLM is about to split, and make each one operator.

A block is a norm and a router before experts, as `route_graph` takes them, and the norm after them,
as `experts_graph` does, where nothing else reads what is between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from patcher.integrate.vllm.roles.experts_graph import (
    ExpertsAndNorm,
    calls_experts,
    for_each_call,
)
from patcher.integrate.vllm.roles.graph_reads import (
    NotFusedError,
    between,
    label_of,
    readers,
    reads_later,
    value_of,
)
from patcher.integrate.vllm.roles.route_graph import OTHER_EXPERTS, NormAndRouter


def fuse(
    module: fx.GraphModule,
    operation: Any,
    other_norm: str,
    top_k_of: Callable[[Any, int], int],
) -> list[str]:
    """Replace each block by one operator, in place.

    Args:
        module: Dynamo's graph.
        operation: takes x and residual [tokens, hidden], the first norm's weight, weight and bias
            of the router, the second norm's weight, logits [tokens, experts], epsilon and the
            layer's name; may write x and logits, and gives the normed and the plain residual
            stream after the experts.
        other_norm: prefix of the names of the operators that the point `add_norm` installs.
        top_k_of: see `experts_graph.fuse`.

    Returns:
        A reason for each call of experts whose block stays the engine's own.
    """

    def replace(call: fx.Node, index: int) -> None:
        block = _Block(call, other_norm)
        top_k_of(value_of(block.end.layer_name), index)
        block.replace(operation)

    return for_each_call(module, replace)


class _Block:
    """One call of experts with what is before and after it."""

    def __init__(self, call: fx.Node, other_norm: str) -> None:
        """Look at the nodes.

        Raises:
            NotFusedError: they are no such block; the graph is unchanged.
        """
        self.end = ExpertsAndNorm(call, other_norm)
        self.start = NormAndRouter(call, other_norm)
        if self.end.residual not in self.start.made(1):
            raise NotFusedError("another residual stream before the experts than after them")
        if value_of(self.start.epsilon) != value_of(self.end.epsilon):
            raise NotFusedError("an epsilon before the experts and another one after them")
        if any(calls_experts(node, OTHER_EXPERTS) for node in between(call, self.end.norm)):
            # vLLM may count calls to know a layer, and the block is called where its end is
            raise NotFusedError("other experts run before the norm after these")
        self._call = call
        self._must_be_read_by_none_else()

    def _must_be_read_by_none_else(self) -> None:
        """Check that what is between the two norms is needed there alone.

        Raises:
            NotFusedError: it is not.
        """
        graph, start, end = self._call.graph, self.start, self.end
        place = {node: index for index, node in enumerate(graph.nodes)}
        first, last = place[start.norm], place[end.norm]
        ours = {start.router.call, self._call, end.norm}
        inner = [*start.made(0), start.router.result]
        for node in (*inner, *start.made(1)):
            # the residual stream goes on after the block
            until = len(place) if node in inner else last
            for user in readers(node):
                if user not in ours and first < place[user] < until:
                    raise NotFusedError(f"{label_of(user)} reads what is inside the block")
        # what is written in place may have been seen in part, or as another shape, before
        seen = [(start.x, start.norm, ours)] if start.made(0) == [start.x] else []
        if end.in_place:
            seen.append((end.residual, end.norm, set(end.residual.users)))
        if any(reads_later(graph, *each, "example_value") for each in seen):
            raise NotFusedError("parts of the residual stream are read elsewhere")

    def replace(self, operation: Any) -> None:
        """Put the operator in the place of the norm after the experts."""
        graph, start, end = self.end.norm.graph, self.start, self.end
        row, bias = start.router.take_out()
        given = start.x, start.residual, start.weight, start.router.weight, bias
        with graph.inserting_before(end.norm):
            made = graph.call_function(
                operation, (*given, end.weight, row, start.epsilon, end.layer_name)
            )
            output = graph.call_function(operator.getitem, (made, 0))
            total = graph.call_function(operator.getitem, (made, 1))
        like: torch.Tensor = start.x.meta["example_value"]
        for node in (output, total):
            node.meta["example_value"] = like.new_empty(like.shape)
        made.meta["example_value"] = output.meta["example_value"], total.meta["example_value"]
        end.take_out(output, total)
        start.take_out()
