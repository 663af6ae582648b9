"""Find norms of heads before rotations in a graph that vLLM is about to split, and fuse both.

Query and key, before a rotation that `rope_graph` marks, must each come straight from an RMSNorm of
their heads. The rows that the norms are given are then normalised and rotated in place by one
operator, before whatever reads the rotated tensors, be it attention or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from patcher.integrate.vllm.roles.graph_reads import (
    NotFusedError,
    as_node,
    between,
    example_of,
    form_of,
    is_reshape,
    is_the_models,
    items_of,
    label_of,
    operator_name,
    overlap,
    readers,
    reads_later,
    value_of,
)
from patcher.integrate.vllm.roles.linear_graph import plain
from patcher.integrate.vllm.roles.rope_graph import MARKS, replace_marked, take_out

NORM = "vllm_ir::rms_norm"
_VALUE = "example_value"


def fuse(module: fx.GraphModule, operation: Any) -> list[str]:
    """Replace each marked rotation and the norms before it by one operator.

    Args:
        module: Dynamo's graph, changed in place.
        operation: takes query [tokens, q_heads * head_dim] and key [tokens, kv_heads * head_dim],
            both written in place, their norms' weights [head_dim], cosines and sines
            [tokens, head_dim], and epsilon.

    Returns:
        A reason for each rotation that stays vLLM's own.
    """
    return replace_marked(module, lambda begin, end: _Block(begin, end).replace(operation))


class _Normed:
    """Query or key: rows of heads, and their norm."""

    def __init__(self, given: fx.Node, begin: fx.Node) -> None:
        """Look at what a rotation is given.

        Raises:
            NotFusedError: it is no norm of heads.
        """
        self.shapes = [*seen_as(given)]
        """The other shapes in which the rotation is given what the norm makes, the last first."""
        self.norm = norm = plain(given)
        if operator_name(norm) != NORM:
            raise NotFusedError(f"{label_of(norm)} makes what is rotated, and no norm")
        heads, weight, self.epsilon, *part = norm.args
        if norm.kwargs or part not in ([], [None]) or not isinstance(weight, fx.Node):
            raise NotFusedError("another kind of norm")
        for reader in readers(norm):
            if reader is not begin:
                name = "another rotation" if reader.target in MARKS else label_of(reader)
                raise NotFusedError(f"{name} reads what the norm makes, too")
        self.heads, self.weight = as_node(heads), weight
        self.rows = plain(self.heads)
        rows, each, gain = map(example_of, (self.rows, heads, weight))
        self.tokens, self.size = str(rows.shape[0]), each.shape[-1]
        if each.dim() != 3 or gain.shape != (self.size,):
            raise NotFusedError("a norm of something else than heads")
        seen = [str(example_of(node).shape[0]) for node in (self.heads, *self.shapes)]
        if rows.dim() != 2 or rows.stride(1) != 1 or {*seen} != {self.tokens}:
            raise NotFusedError("heads that are not parts of dense rows")
        if gain.dtype != rows.dtype or not is_the_models(weight):
            raise NotFusedError("a weight that is computed, or of another dtype")

    def must_fit(self, rotated: fx.Node) -> None:
        """Check that the rows can take the place of what was rotated.

        Raises:
            NotFusedError: they cannot, or would have to be copied for those who read it.
        """
        value, waiting = example_of(rotated), [rotated]
        whole = value.dim() == 3 and value.shape[2] == self.size
        while waiting:
            node = waiting.pop()
            if str(example_of(node).shape[0]) != self.tokens:
                raise NotFusedError("rotated tensors that are read in another shape")
            waiting += [user for user in node.users if is_reshape(user)]
        if not whole and form_of(rotated) != form_of(self.rows):
            raise NotFusedError("rotated tensors of another shape")

    def instead_of(self, rotated: fx.Node) -> fx.Node:
        """The rows in the shape of what was rotated, without a copy."""
        value = example_of(rotated)
        if value.dim() == 2:
            return self.rows
        shape = (-1, *value.shape[1:])
        return _made(self.rows.graph.call_method("view", (self.rows, *shape)))


class _Block:
    """One marked rotation, and the norms before it."""

    def __init__(self, begin: fx.Node, end: fx.Node) -> None:
        """Look at the nodes.

        Raises:
            NotFusedError: they are no such block; the graph is unchanged.
        """
        self.begin, self.end, self.graph = begin, end, begin.graph
        self.positions, self.table = as_node(end.args[2]), as_node(end.args[3])
        self.parts = [_Normed(as_node(given), begin) for given in begin.args]
        query, key = self.parts
        _, table = map(example_of, (self.positions, self.table))
        if not query.size == key.size == table.shape[-1]:
            raise NotFusedError("a norm of something else than heads")
        if query.tokens != key.tokens:
            raise NotFusedError("query and key of different tokens")
        if value_of(query.epsilon) != value_of(key.epsilon):
            raise NotFusedError("norms of query and key with an epsilon each")
        if overlap(query.rows, key.rows, _VALUE):
            raise NotFusedError("query and key share memory")
        self.gone = {query.norm, key.norm, begin, *between(begin, end), end}
        for part in self.parts:
            if reads_later(self.graph, part.rows, part.norm, self.gone, _VALUE):
                raise NotFusedError("the tensors before the norms are used again")
        for index, item in items_of(end):
            self.parts[index].must_fit(item)

    def replace(self, operation: Any) -> None:
        """Put the operator in the place of the rotation's end."""
        graph, (query, key) = self.graph, self.parts
        with graph.inserting_before(self.end):
            positions = _made(graph.call_method("flatten", (self.positions,)))
            table = _made(graph.call_method("index_select", (self.table, 0, positions)))
            dtype = example_of(query.rows).dtype
            if example_of(table).dtype != dtype:  # as vLLM rounds it
                table = _made(graph.call_method("to", (table, dtype)))
            given = query.rows, key.rows, query.weight, key.weight, table, query.epsilon
            graph.call_function(operation, given)
            for index, item in items_of(self.end):
                item.replace_all_uses_with(self.parts[index].instead_of(item))
                graph.erase_node(item)
        inside = [*between(self.begin, self.end)]
        take_out(graph, self.end)
        for node in reversed(inside):
            if node in self.gone and not node.users:
                graph.erase_node(node)
        if not self.begin.users:  # else someone asks it for a size
            self.begin.args = query.rows, key.rows
        for part in self.parts:
            part.norm.replace_all_uses_with(part.heads)
            for node in (*part.shapes, part.norm, *seen_as(part.heads)):
                if not node.users:
                    graph.erase_node(node)


def seen_as(node: fx.Node) -> Iterator[fx.Node]:
    """A node and those before it, as long as each shows another in another shape."""
    while is_reshape(node):
        yield node
        node = as_node(node.args[0])


def _made(node: fx.Node) -> fx.Node:
    """A call of a tensor's method, with the fake tensor that it gives."""
    tensor, *given = [getattr(each, "meta", {}).get(_VALUE, each) for each in node.args]
    node.meta[_VALUE] = getattr(tensor, str(node.target))(*given)
    return node
