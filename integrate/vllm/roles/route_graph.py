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

from patcher.integrate.vllm.roles.experts_graph import NORM, for_each_call
from patcher.integrate.vllm.roles.graph_reads import (
    NotFusedError,
    as_node,
    form_of,
    items_of,
    label_of,
    operator_name,
    readers,
    reads_later,
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

    def replace(call: fx.Node, index: int) -> None:
        block = NormAndRouter(call, other_norm)
        block.replace(operation, top_k_of(value_of(call.args[_name_place(call)]), index))

    return for_each_call(module, replace, OTHER_EXPERTS)


def _name_place(call: fx.Node) -> int:
    """Where the layer's name is among the arguments of a call of experts."""
    return 3 if operator_name(call).startswith(OTHER_EXPERTS) else 4


class NormAndRouter:
    """The norm and the router before one call of experts."""

    def __init__(self, call: fx.Node, other_norm: str) -> None:
        """Look at the nodes.

        Args:
            call: the experts.
            other_norm: prefix of the names of the operators that the point `add_norm` installs.

        Raises:
            NotFusedError: they are no such block; the graph is unchanged.
        """
        self._place = {node: index for index, node in enumerate(call.graph.nodes)}
        self._hidden, logits = plain(as_node(call.args[0])), as_node(call.args[1])
        self.router = linear_of(logits)
        if plain(self.router.x) is not self._hidden:
            raise NotFusedError("a router of something else than the experts are given")
        self.norm = self._norm_of(other_norm)
        x, residual, self.weight, self.epsilon, *part = self.norm.args
        if self.norm.kwargs or self.weight is None or part not in ([], [None]):
            raise NotFusedError("another kind of norm")
        self.x, self.residual = as_node(x), as_node(residual)
        if "placeholder" in (self.x.op, self.residual.op):
            raise NotFusedError("a residual that belongs to the caller")
        if form_of(self.x) != form_of(self.residual) or len(form_of(self.x)) != 3:
            raise NotFusedError("a residual of another shape")
        if self.x is not self._hidden:
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
            and self._place[user] < self._place[self.router.call]
        ]
        if not before:
            raise NotFusedError(f"{label_of(made)} makes what the experts are given, and no norm")
        return before[-1]

    def _must_own_its_arguments(self) -> None:
        """Check that vLLM gives the norm both tensors to keep, so that they may be written."""
        target, later = self.norm.target, self._place[self.norm]
        given = isinstance(target, torch._ops.OpOverload) and (
            target._overloadname == "maybe_inplace"
        )
        both = self.x, self.residual
        users = {user for each in both for user in each.users}
        if not given or any(self._place[user] > later for user in users):
            raise NotFusedError("a norm that leaves its arguments to others")
        if any(
            reads_later(self.norm.graph, each, self.norm, set(), "example_value") for each in both
        ):
            raise NotFusedError("what the norm is given is read later as a part of something else")
        if any(user.target is not operator.getitem for user in self.norm.users):
            raise NotFusedError("another kind of norm")

    def made(self, index: int) -> list[fx.Node]:
        """The nodes that are a result of the norm: 0 for the normed sum, 1 for the sum."""
        items = items_of(self.norm)
        return [item for at, item in items if at == index] or [(self.x, self.residual)[index]]

    def _must_be_read_later(self) -> None:
        """Check that nothing needs the norm's results before the router."""
        first, last = self._place[self.norm], self._place[self.router.call]
        for node in (*self.made(0), *self.made(1)):
            for user in readers(node):
                if first < self._place[user] < last:
                    raise NotFusedError(f"{label_of(user)} reads the norm before the router")

    def replace(self, operation: Any, top_k: int) -> None:
        """Put the operator in the place of the router."""
        graph, router = self.norm.graph, self.router
        after = router.call.next
        row, bias = router.take_out()
        with graph.inserting_before(after):
            graph.call_function(
                operation,
                (
                    *(self.x, self.residual, self.weight, router.weight, bias, row),
                    *(top_k, self.epsilon),
                ),
            )
        self.take_out()

    def take_out(self) -> None:
        """Take the norm out of the graph; what it was given is in the place of its results."""
        for index, item in items_of(self.norm):
            item.replace_all_uses_with((self.x, self.residual)[index])
            self.norm.graph.erase_node(item)
        self.norm.graph.erase_node(self.norm)
