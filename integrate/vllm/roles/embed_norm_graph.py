"""Find the look-up of embeddings and the first norm in a graph that vLLM is about to split.

The first layer keeps the embeddings as its residual and normalises them. Where that is all that
happens to them up to the norm, one operator writes both. What a rank adds to its part of a table,
LoRA, a factor of the model, or embeddings of pictures put in between are other readers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from patcher.integrate.vllm.roles.graph_reads import (
    METADATA,
    NotFusedError,
    as_node,
    between,
    example_of,
    form_of,
    is_the_models,
    label_of,
    operator_name,
    overlap,
    readers,
)
from patcher.integrate.vllm.roles.norm_quant_graph import taken_by
from patcher.integrate.vllm.roles.qk_norm_rope_graph import NORM, seen_as

NONE_HERE = "a graph without a look-up of embeddings"


def fuse(module: fx.GraphModule, operation: Any) -> list[str]:
    """Replace a look-up and the norm that reads it by one operator.

    Args:
        module: Dynamo's graph, changed in place.
        operation: takes ids [tokens], the table [vocab, hidden], the norm's weight [hidden], what
            it writes: the embeddings and the normalised ones [tokens, hidden], and epsilon.

    Returns:
        A reason for each look-up that stays vLLM's own, or for a graph that has none.
    """
    graph = module.graph
    reasons: list[str] = []
    found = [node for node in graph.nodes if node.target is torch.nn.functional.embedding]
    for node in found:
        try:
            _LookUp(node).replace(operation)
        except NotFusedError as error:
            reasons.append(str(error))
    graph.lint()
    module.recompile()
    return reasons if found else [NONE_HERE]


class _LookUp:
    """One look-up, and the first norm of what it gives."""

    def __init__(self, node: fx.Node) -> None:
        """Look at the nodes.

        Raises:
            NotFusedError: they are no such pair; the graph is unchanged.
        """
        self.node, self.graph = node, node.graph
        ids, table, *more = (*node.args, *node.kwargs.values())
        if len(node.args) < 2 or any(more):
            raise NotFusedError("another kind of look-up")
        cast, self.table = as_node(ids), as_node(table)
        self.ids = _before_a_cast(cast)
        if example_of(self.ids).dim() != 1 or example_of(self.table).dim() != 2:
            raise NotFusedError("ids in another shape")
        reading = list(readers(node))
        norms = [reader for reader in reading if operator_name(reader) == NORM]
        if not norms:
            if (point := taken_by(reading)) is not None:
                raise NotFusedError(f"{point} has the norm")
            names = ", ".join(dict.fromkeys(map(label_of, reading))) or "nothing"
            raise NotFusedError(f"{names} reads the embeddings, and no plain norm")
        self.norm = norm = norms[0]
        rows, self.weight, self.epsilon, *part = norm.args
        if norm.kwargs or part not in ([], [None]) or not isinstance(self.weight, fx.Node):
            raise NotFusedError("another kind of norm")
        if form_of(rows) != form_of(node):
            raise NotFusedError("a norm of something else than rows")
        if not is_the_models(self.weight) or not is_the_models(self.table):
            raise NotFusedError("a weight that is computed")
        self.shapes = [*seen_as(as_node(rows))]
        for other in between(node if cast is self.ids else cast, norm):
            if other in reading:
                raise NotFusedError(f"{label_of(other)} reads the embeddings before the norm")
            # the norm's place is where they will be read
            shared = (overlap(self.ids, each, "example_value") for each in other.all_input_nodes)
            if other is not node and other.target not in METADATA and any(shared):
                raise NotFusedError(f"{label_of(other)} is given the ids before the norm")

    def replace(self, operation: Any) -> None:
        """Put the operator in the place of the norm."""
        graph, cast = self.graph, as_node(self.node.args[0])
        with graph.inserting_before(self.node):
            # as vLLM writes it; it would take a method `size` for one that gives all sizes
            size = graph.call_function(torch.ops.aten.sym_size.int, (self.ids, 0))
            size.meta["example_value"] = example_of(self.ids).shape[0]
            residual, output = (self._empty(size) for _ in range(2))
        with graph.inserting_before(self.norm):
            given = self.ids, self.table, self.weight, residual, output, self.epsilon
            graph.call_function(operation, given)
        self.norm.replace_all_uses_with(output)
        self.node.replace_all_uses_with(residual)
        for node in (self.norm, *self.shapes, self.node, cast):
            if not node.users and node.op.startswith("call_"):
                graph.erase_node(node)

    def _empty(self, size: fx.Node) -> fx.Node:
        table, ids = example_of(self.table), example_of(self.ids)
        hidden = int(table.shape[1])
        node = self.graph.call_method("new_empty", (self.table, (size, hidden)))
        node.meta["example_value"] = table.new_empty((ids.shape[0], hidden))
        return node


def _before_a_cast(ids: fx.Node) -> fx.Node:
    """The ids as they were before they were made int64, which a look-up in PyTorch wants; ids that
    were int64 by then as well."""
    if ids.op != "call_method" or ids.target != "long" or len(ids.args) != 1:
        return ids
    given = as_node(ids.args[0])
    return given if example_of(given).dtype in (torch.int32, torch.int64) else ids
