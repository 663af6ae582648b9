"""Find experts in a graph that vLLM is about to split, and fuse their sum with the norm after it.

Experts are the operator `vllm::moe_forward`; a norm is vLLM's operator of a residual add and
RMSNorm, or that of the point `add_norm`. Where nothing else reads what the experts return, both
become two operators: the experts without their sum, and the sum, the add and the norm in one.
Everything between, such as an all-reduce, a shared expert, a hook or another reader, is an
operator in the graph, so that pair stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from patcher.integrate.vllm.roles.graph_reads import (
    NotFusedError,
    example_of,
    form_of,
    label_of,
    operator_name,
    reads_later,
    value_of,
)

EXPERTS = "vllm::moe_forward"
SHARED_EXPERTS = "vllm::moe_forward_shared"
MOE_BLOCK = "patcher::moe_block_"
"""Prefix of the names of the operators that the point `moe_block` installs, each with the experts
of a layer in it."""
NORM = "vllm_ir::fused_add_rms_norm"


@dataclass(frozen=True)
class FusedOperators:
    """What a pair of experts and norm becomes."""

    experts: Any
    """Hidden states [tokens, hidden], router logits [tokens, experts], top-k and the layer's name
    to rows [tokens * top_k, hidden] and their map, int32 [tokens, top_k]."""
    sum_to_norm: Any
    """Takes rows, map, residual, weight, output and epsilon; writes residual and output, both
    [tokens, hidden], in place."""
    other_norm: str
    """Prefix of the names of the operators that the point `add_norm` installs: x, residual, weight
    and epsilon, the first two written in place."""


def fuse(
    module: fx.GraphModule,
    operators: FusedOperators,
    top_k_of: Callable[[Any, int], int],
) -> list[str]:
    """Replace each pair of experts and norm, in place.

    Args:
        module: Dynamo's graph.
        operators: what a pair becomes.
        top_k_of: experts a token of a layer, by the layer's name as the operator is given it and
            the place of the call among all experts; raises `NotFusedError` for a layer that the
            operators do not serve.

    Returns:
        A reason for each call of experts that stays vLLM's own.
    """

    def replace(call: fx.Node, index: int) -> None:
        pair = ExpertsAndNorm(call, operators.other_norm)
        pair.replace(operators, top_k_of(value_of(pair.layer_name), index))

    return for_each_call(module, replace)


def for_each_call(
    module: fx.GraphModule, replace: Callable[[fx.Node, int], None], *others: str
) -> list[str]:
    """Fuse something with each call of experts that is not in a block already.

    Args:
        module: Dynamo's graph, changed in place.
        replace: is given the call and its place among all; raises `NotFusedError` to leave it.
        others: prefixes of the names of further operators that are calls of experts.

    Returns:
        A reason for each call that was left.
    """
    reasons: list[str] = []
    calls = [node for node in module.graph.nodes if calls_experts(node, *others)]
    for index, call in enumerate(calls):
        if operator_name(call).startswith(MOE_BLOCK):
            continue
        try:
            replace(call, index)
        except NotFusedError as error:
            reasons.append(str(error))
    module.graph.lint()
    module.recompile()
    return reasons


def calls_experts(node: fx.Node, *others: str) -> bool:
    """Whether a node calls experts, maybe in a block; for `others`, see `for_each_call`."""
    name = operator_name(node)
    return name in (EXPERTS, SHARED_EXPERTS) or name.startswith((MOE_BLOCK, *others))


class ExpertsAndNorm:
    """One call of experts, and the norm that alone reads what it returns."""

    def __init__(self, call: fx.Node, other_norm: str) -> None:
        """Look at the nodes.

        Args:
            call: the experts.
            other_norm: see `FusedOperators.other_norm`.

        Raises:
            NotFusedError: they are no such pair.
        """
        if operator_name(call) == SHARED_EXPERTS:
            raise NotFusedError("shared experts")
        self._call = call
        self._place = {node: index for index, node in enumerate(call.graph.nodes)}
        self._hidden, self._logits, *more, self.layer_name, width = call.args
        if call.kwargs or len(more) != 2 or any(item is not None for item in more):
            raise NotFusedError("experts that are given more than hidden states and logits")
        if width != 0:
            raise NotFusedError("experts of another width")
        self._views = [call, *_whole_views(call)]
        self._x = self._views[-1]
        readers = sorted(self._x.users, key=self._place.__getitem__)
        if not readers:
            raise NotFusedError("experts whose result is not read")
        self.norm = readers[0]
        self.in_place = operator_name(self.norm).startswith(other_norm)
        if not self.in_place and operator_name(self.norm) != NORM:
            raise NotFusedError(f"{label_of(self.norm)} reads the experts' result before a norm")
        x, residual, self.weight, self.epsilon, *part = self.norm.args
        if self.norm.kwargs or x is not self._x or self.weight is None or part not in ([], [None]):
            raise NotFusedError("another kind of norm")
        if not isinstance(residual, fx.Node) or residual.op == "placeholder":
            raise NotFusedError("a residual that belongs to the caller")
        self.residual = residual
        if form_of(residual) != form_of(self._x) or form_of(self._hidden) != form_of(self._x):
            raise NotFusedError("a residual of another shape")
        if not self.in_place:
            self._must_own_its_arguments(readers)

    def _must_own_its_arguments(self, readers: list[fx.Node]) -> None:
        """Check that vLLM gives the norm both tensors to keep, so that they may be written.

        Raises:
            NotFusedError: it does not.
        """
        target = self.norm.target
        given = isinstance(target, torch._ops.OpOverload) and (
            target._overloadname == "maybe_inplace"
        )
        later = self._place[self.norm]
        if not given or len(readers) > 1:
            raise NotFusedError("a norm that leaves its arguments to others")
        if any(self._place[user] > later for user in self.residual.users):
            raise NotFusedError("a norm that leaves its arguments to others")
        if any(user.target is not operator.getitem for user in self.norm.users):
            raise NotFusedError("another kind of norm")
        if reads_later(self.norm.graph, self.residual, self.norm, set(), "example_value"):
            raise NotFusedError("what the norm is given is read later as a part of something else")

    def replace(self, operators: FusedOperators, top_k: int) -> None:
        """Put the fused operators in the place of both nodes."""
        graph, call = self._call.graph, self._call
        like: torch.Tensor = example_of(self._x)
        with graph.inserting_before(call):
            unsummed = graph.call_function(
                operators.experts, (self._hidden, self._logits, top_k, self.layer_name)
            )
            rows = graph.call_function(operator.getitem, (unsummed, 0))
            row_map = graph.call_function(operator.getitem, (unsummed, 1))
        tokens, hidden = like.shape
        rows.meta["example_value"] = like.new_empty((tokens * top_k, hidden))
        row_map.meta["example_value"] = like.new_empty((tokens, top_k), dtype=torch.int32)
        unsummed.meta["example_value"] = (
            rows.meta["example_value"],
            row_map.meta["example_value"],
        )
        with graph.inserting_before(self.norm):
            output = graph.call_function(torch.empty_like, (self.residual,))
            graph.call_function(
                operators.sum_to_norm,
                (rows, row_map, self.residual, self.weight, output, self.epsilon),
            )
        output.meta["example_value"] = torch.empty_like(like)
        self.take_out(output, self.residual)

    def take_out(self, output: fx.Node, total: fx.Node) -> None:
        """Take experts and norm out of the graph.

        Args:
            output: in the place of the normed sum.
            total: in the place of the residual stream after the experts.
        """
        graph, norm = self._call.graph, self.norm
        if self.in_place:
            self._x.replace_all_uses_with(output, lambda user: user is not norm)
            if total is not self.residual:
                last = self._place[norm]
                self.residual.replace_all_uses_with(
                    total, lambda user: self._place.get(user, 0) > last
                )
        for item in list(norm.users):
            item.replace_all_uses_with((output, total)[int(str(item.args[1]))])
            graph.erase_node(item)
        for node in (norm, *reversed(self._views)):
            graph.erase_node(node)


def _whole_views(node: fx.Node) -> Iterator[fx.Node]:
    """The slices of all of a tensor that alone are read of it, each of the one before."""
    while len(node.users) == 1:
        [view] = node.users
        if view.target is not operator.getitem or not _takes_all(view.args[1]):
            return
        if form_of(view) != form_of(node):
            return
        yield view
        node = view


def _takes_all(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is Ellipsis
        or (isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1))
        for item in items
    )
