"""Find norms before experts in a graph that vLLM is about to split, and fuse each with its router.

The experts are given hidden states and the router's logits. Where the hidden states come straight
from a residual add and RMSNorm, and the logits from a linear layer of them, norm and router become
one operator, in the place of the router. The experts stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from patcher.integrate.vllm.roles.experts_graph import EXPERTS, NORM, SHARED_EXPERTS
from patcher.integrate.vllm.roles.graph_reads import (
    METADATA,
    NotFusedError,
    as_node,
    form_of,
    is_reshape,
    items_of,
    label_of,
    operator_name,
    value_of,
)
from patcher.integrate.vllm.roles.linear_graph import linear_of, plain

OTHER_EXPERTS = "patcher::experts_"
"""Prefix of the names of the experts' operators that the point `experts_to_norm` installs: hidden
states, logits, top-k and the layer's name."""


def fuse(
    module: fx.GraphModule,
    operation: Any,
    other_norm: str,
    top_k_of: Callable[[Any, int], int],
) -> list[str]:
    """Replace each norm and router before experts by one operator, in place.

    Args:
        module: Dynamo's graph.
        operation: takes x, residual [tokens, hidden], the norm's weight, weight and bias of the
            router, logits [tokens, experts], top-k and epsilon; writes x, residual and logits.
        other_norm: prefix of the names of the operators that the point `add_norm` installs.
        top_k_of: see `experts_graph.fuse`.

    Returns:
        A reason for each call of experts before which the engine's own norm and router stay.
    """
    graph = module.graph
    reasons: list[str] = []
    calls = [node for node in graph.nodes if _name_place(node) is not None]
    for index, call in enumerate(calls):
        try:
            block = _Block(call, other_norm)
            block.replace(operation, top_k_of(value_of(call.args[_name_place(call) or 0]), index))
        except NotFusedError as error:
            reasons.append(str(error))
    graph.lint()
    module.recompile()
    return reasons


def _name_place(node: fx.Node) -> int | None:
    """Where the layer's name is among the arguments of a call of experts; None if it is none."""
    name = operator_name(node)
    if name in (EXPERTS, SHARED_EXPERTS):
        return 4
    return 3 if name.startswith(OTHER_EXPERTS) else None


class _Block:
    """The norm and the router before one call of experts."""

    def __init__(self, call: fx.Node, other_norm: str) -> None:
        """Look at the nodes.

        Raises:
            NotFusedError: they are no such block; the graph is unchanged.
        """
        self._place = {node: index for index, node in enumerate(call.graph.nodes)}
        self._hidden, logits = plain(as_node(call.args[0])), as_node(call.args[1])
        self._router = linear_of(logits)
        if plain(self._router.x) is not self._hidden:
            raise NotFusedError("a router of something else than the experts are given")
        self._norm = self._norm_of(other_norm)
        x, residual, self._weight, self._epsilon, *part = self._norm.args
        if self._norm.kwargs or self._weight is None or part not in ([], [None]):
            raise NotFusedError("another kind of norm")
        self._x, self._residual = as_node(x), as_node(residual)
        if "placeholder" in (self._x.op, self._residual.op):
            raise NotFusedError("a residual that belongs to the caller")
        if form_of(self._x) != form_of(self._residual) or len(form_of(self._x)) != 3:
            raise NotFusedError("a residual of another shape")
        if self._x is not self._hidden:
            self._must_own_its_arguments()
        self._must_be_read_later()

    def _norm_of(self, other_norm: str) -> fx.Node:
        made = self._hidden
        if made.target is operator.getitem and made.args[1] == 0:
            norm = as_node(made.args[0])
            if operator_name(norm) == NORM:
                return norm
        before = [
            user
            for user in made.users
            if operator_name(user).startswith(other_norm)
            and user.args[0] is made
            and self._place[user] < self._place[self._router.call]
        ]
        if not before:
            raise NotFusedError(f"{label_of(made)} makes what the experts are given, and no norm")
        return before[-1]

    def _must_own_its_arguments(self) -> None:
        """Check that vLLM gives the norm both tensors to keep, so that they may be written."""
        target, later = self._norm.target, self._place[self._norm]
        given = isinstance(target, torch._ops.OpOverload) and (
            target._overloadname == "maybe_inplace"
        )
        users = {*self._x.users, *self._residual.users}
        if not given or any(self._place[user] > later for user in users):
            raise NotFusedError("a norm that leaves its arguments to others")
        if any(user.target is not operator.getitem for user in self._norm.users):
            raise NotFusedError("another kind of norm")

    def _must_be_read_later(self) -> None:
        """Check that nothing needs the norm's results before the router."""
        first, last = self._place[self._norm], self._place[self._router.call]
        made = [item for _, item in items_of(self._norm)] or [self._x, self._residual]
        for node in made:
            for user in _users(node):
                if first < self._place[user] < last:
                    raise NotFusedError(f"{label_of(user)} reads the norm before the router")

    def replace(self, operation: Any, top_k: int) -> None:
        """Put the operator in the place of the router."""
        graph, norm, router = self._norm.graph, self._norm, self._router
        after = router.call.next
        row, bias = router.take_out()
        if norm.users:
            for index, item in items_of(norm):
                item.replace_all_uses_with((self._x, self._residual)[index])
                graph.erase_node(item)
        with graph.inserting_before(after):
            graph.call_function(
                operation,
                (
                    *(self._x, self._residual, self._weight, router.weight, bias, row),
                    *(top_k, self._epsilon),
                ),
            )
        graph.erase_node(norm)


def _users(node: fx.Node) -> list[fx.Node]:
    """Who reads a tensor, as whatever shape; not who asks for a size."""
    found = []
    for user in node.users:
        if is_reshape(user):
            found += _users(user)
        elif user.op != "call_method" or user.target not in METADATA:
            found.append(user)
    return found
