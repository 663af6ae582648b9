"""Find linear layers without quantisation in a graph that vLLM is about to split.

A layer is PyTorch's `linear`, or the operator that the point `linear` installs, which writes a
tensor that the graph allocates. Either is taken over by an operator that computes more.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from patcher.integrate.vllm.roles.graph_reads import (
    METADATA,
    NotFusedError,
    as_node,
    between,
    columns,
    example_of,
    is_reshape,
    label_of,
    operator_name,
    readers,
    reads_later,
)

OTHER_LINEAR = "patcher::linear_"
"""Prefix of the names of the operators that the point `linear` installs: x, the transposed weight,
bias and output, the last written in place."""


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer of a graph."""

    x: fx.Node
    """[tokens, inner]."""
    weight: Any
    bias: Any
    """None, or an empty tensor, for none."""
    result: fx.Node
    """[tokens, outer]: the call, or the tensor that the call writes."""
    call: fx.Node

    @property
    def example(self) -> torch.Tensor:
        """The fake tensor of the result."""
        found: torch.Tensor = self.result.meta["example_value"]
        return found

    def take_out(self) -> tuple[fx.Node, Any]:
        """Take the call out of the graph.

        Returns:
            A tensor in the place of the result, which another operator must write, and the bias,
            empty for none.
        """
        graph, bias = self.result.graph, self.bias
        with graph.inserting_before(self.result):
            if bias is None:
                bias = graph.call_method("new_empty", (self.x, (0,)))
                bias.meta["example_value"] = self.x.meta["example_value"].new_empty((0,))
            if self.call is not self.result:
                transposed = as_node(self.call.args[1])
                graph.erase_node(self.call)
                if not transposed.users:
                    graph.erase_node(transposed)
                return self.result, bias
            # as vLLM writes it; it would take a method `size` for one that gives all sizes
            size = graph.call_function(torch.ops.aten.sym_size.int, (self.x, 0))
            size.meta["example_value"] = self.example.shape[0]
            row = graph.call_method("new_empty", (self.x, (size, self.example.shape[1])))
        row.meta = dict(self.result.meta)
        self.result.replace_all_uses_with(row)
        graph.erase_node(self.result)
        return row, bias


def linear_of(result: fx.Node) -> LinearLayer:
    """The layer whose result a node is.

    Args:
        result: a call, or a tensor that one writes, maybe seen as another shape.

    Raises:
        NotFusedError: it is no such layer.
    """
    result = plain(result)
    calls = [user for user in result.users if operator_name(user).startswith(OTHER_LINEAR)]
    given: tuple[Any, ...] = ()
    call = result
    if result.target is torch.nn.functional.linear:
        given = (*result.args, result.kwargs.get("bias"))[:3]
    elif len(calls) == 1 and len(calls[0].args) == 4 and calls[0].args[3] is result:
        call, given = calls[0], _given(calls[0])
    if not given or not isinstance(given[0], fx.Node):
        raise NotFusedError(f"{label_of(result)} is no linear layer without quantisation")
    x, weight, bias = given
    value, made = example_of(x), example_of(result)
    if value.dim() != 2 or made.dim() != 2 or value.dtype != made.dtype:
        raise NotFusedError("a linear layer of another form")
    return LinearLayer(x, weight, bias, result, call)


def _given(call: fx.Node) -> tuple[Any, ...]:
    """What an operator of the point `linear` is given, with the weight as the layer holds it; none
    if that is not seen."""
    x, transposed, bias = call.args[:3]
    if not isinstance(transposed, fx.Node) or transposed.target != "t":
        return ()
    return x, transposed.args[0], bias


@dataclass(frozen=True)
class Projection:
    """The linear layer that makes query, key and value; see `rope_graph.RotationSource`."""

    layer: LinearLayer

    def give(self, positions: Any, table: Any, name: Any) -> tuple[Any, ...]:
        """x, weight, bias, positions, what is written [tokens, outer], the table and the name."""
        row, bias = self.layer.take_out()
        return self.layer.x, self.layer.weight, bias, positions, row, table, name


def projection_of(
    graph: fx.Graph, parts: tuple[fx.Node, fx.Node, fx.Node], attend: fx.Node, spared: set[fx.Node]
) -> Projection:
    """The projection of query, key and value, if nothing else is between; see `SourceOf`."""
    cuts = [_part_of(part) for part in parts]
    split = as_node(cuts[0].args[0])
    if any(cut.args[0] is not split for cut in cuts):
        raise NotFusedError("query, key and value are parts of different tensors")
    layer = linear_of(as_node(split.args[0]))
    places = [columns(cut.meta["example_value"]) for cut in cuts]
    whole = columns(layer.example)
    if whole is None or any(place is None for place in places):
        raise NotFusedError("query, key and value are not dense parts of one projection")
    first = 0
    for place in places:
        if place is None or place[:2] != (whole[0], first):
            raise NotFusedError("query, key and value are not all of one projection, in this order")
        first = place[2] + 1
    if first != whole[0]:
        raise NotFusedError("a projection to more than query, key and value")
    written = {layer.call, split, *spared}
    if reads_later(graph, layer.result, layer.call, written, "example_value"):
        raise NotFusedError("the projection is read before the rotation, or by others")
    must_keep(layer.x, layer.call, attend)
    return Projection(layer)


def _part_of(node: fx.Node) -> fx.Node:
    """The node that cuts a part out of a tensor.

    Raises:
        NotFusedError: something else is between.
    """
    cut = plain(node)
    whole = cut.args[0] if cut.target is operator.getitem else None
    if not isinstance(whole, fx.Node) or whole.target not in ("split", "chunk", torch.split):
        raise NotFusedError(f"{label_of(cut)} stands between projection and rotation")
    return cut


def plain(node: fx.Node) -> fx.Node:
    """The tensor that a node shows in another shape; itself if it does not."""
    while is_reshape(node):
        node = as_node(node.args[0])
    return node


def must_keep(tensor: fx.Node, begin: fx.Node, end: fx.Node) -> None:
    """Check that a tensor may be read at the end instead of at the beginning.

    Raises:
        NotFusedError: a node in between is given it, and could change it.
    """
    users = set(readers(tensor))
    for node in between(begin, end):
        if node in users and node.target not in METADATA:
            raise NotFusedError(f"{label_of(node)} is given what the linear layer is given")
