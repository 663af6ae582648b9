"""Find rotations in a graph that vLLM is about to split, and fuse each with its KV write.

The patched rotation calls `enter` and `leave` around vLLM's own code. Both return what they are
given. In Dynamo's graph they mark where a rotation begins and ends, so `fuse` needs to know neither
the model nor how vLLM rotates. Where the rotated tensors go straight into the KV write and the
attention, the nodes between the marks are replaced by one operator. Elsewhere only the marks are
taken out, and the graph is the one that vLLM would have had. A compiler that knows nothing of the
marks traces through them to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import fx

from patcher.integrate.vllm.roles.graph_reads import (
    METADATA,
    NotFusedError,
    as_node,
    between,
    columns,
    is_reshape,
    items_of,
    operator_name,
    overlap,
    readers,
    reads_later,
)

WRITE = "vllm::unified_kv_cache_update"
ATTEND = "vllm::unified_attention_with_output"


def enter(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mark where a rotation begins: both tensors, as they were given."""
    return query, key


def leave(
    rotated_query: torch.Tensor,
    rotated_key: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mark where a rotation ends: both rotated tensors, as they were given."""
    return rotated_query, rotated_key


def left_alone(query: torch.Tensor, reason: str) -> torch.Tensor:
    """Carry to `fuse` why a rotation is not marked: the query, as it was given."""
    return query


MARKS: tuple[Callable[..., Any], ...] = (enter, leave, left_alone)


class RotationSource(Protocol):
    """What a rotation is fused with besides the KV write: where its tensors come from."""

    def give(self, positions: Any, table: Any, name: Any) -> tuple[Any, ...]:
        """Take its nodes out of the graph and return the operator's arguments."""
        ...


SourceOf = Callable[
    [fx.Graph, tuple[fx.Node, fx.Node, fx.Node], fx.Node, set[fx.Node]], RotationSource
]
"""Takes the graph; query, key and value before the rotation; the attention, before which the
operator will be; and the nodes that read them and will go, or will read what the operator wrote.
Raises `NotFusedError`, and then leaves the graph as it was."""


def fuse(
    module: fx.GraphModule,
    operation: Any,
    refusal: Callable[[Any], str | None],
    source_of: SourceOf | None = None,
) -> list[str]:
    """Replace each marked rotation and its KV write by one operator, and take out all marks.

    Args:
        module: Dynamo's graph, changed in place.
        operation: takes positions [tokens], query [tokens, q_heads, head_dim], key and value
            [tokens, kv_heads, head_dim], the table and the layer's name; rotates query in place,
            writes the KV cache and returns a tensor that the attention depends on.
            With `source_of`, it takes what that gives.
        refusal: why the attention layer of that name cannot use it, or None.
        source_of: finds what the operator computes before the rotation, if it does.

    Returns:
        A reason for each rotation that stays vLLM's own.
    """
    graph = module.graph
    return replace_marked(
        module, lambda begin, end: _Rotation(graph, begin, end).fuse(operation, refusal, source_of)
    )


def replace_marked(
    module: fx.GraphModule,
    replace: Callable[[fx.Node, fx.Node], None],
    marks: tuple[Callable[..., Any], ...] = MARKS,
) -> list[str]:
    """Replace what is marked, and take out all marks.

    The marks of what stays are taken out last, so that they are seen while others are judged.

    Args:
        module: Dynamo's graph, changed in place.
        replace: takes the marks of a beginning and an end, and takes that of the end out. Raises
            `NotFusedError`, and then leaves the graph as it was.
        marks: of a beginning, of an end, and of what is left alone; by default of rotations.

    Returns:
        A reason for each place that stays vLLM's own.
    """
    first, _, left = marks
    graph = module.graph
    reasons: list[str] = []
    begin: fx.Node | None = None
    stay: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in marks:
            continue
        if node.target is left:
            reasons.append(str(node.args[1]))
            stay.append(node)
        elif node.target is first:
            begin = node
        elif begin is not None:
            try:
                replace(begin, node)
            except NotFusedError as error:
                reasons.append(str(error))
                stay += [begin, node]
            else:
                take_out(graph, begin)
            begin = None
    for mark in stay:
        if mark.target is left:
            mark.replace_all_uses_with(as_node(mark.args[0]))
            graph.erase_node(mark)
        else:
            take_out(graph, mark)
    graph.lint()
    module.recompile()
    return reasons


def keep_in_place(graph: fx.Graph, operation: Any) -> None:
    """Let the operator work in place again in a graph that AOTAutograd made functional.

    Otherwise Inductor copies query and key before each call, since the value lies in the same
    buffer and is read later. vLLM's own pass does the same for the operators that it knows.

    Args:
        graph: an ATen graph, changed in place.
        operation: the operator, as an overload.
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    for node in list(graph.nodes):
        if node.target is not auto_functionalized or node.args[0] is not operation:
            continue
        given = {1: as_node(node.kwargs["query"]), 2: as_node(node.kwargs["key"])}
        items = dict(items_of(node))
        restored: dict[fx.Node, fx.Node] = {}
        for index in sorted(given.keys() & items):
            for reader in readers(items[index]):
                buffer = _restored(reader, given[index], restored)
                if buffer is not None:
                    restored[reader] = buffer
        spared = {*items.values(), *restored}
        if any(reads_later(graph, tensor, node, spared, "val") for tensor in given.values()):
            continue
        with graph.inserting_before(node):
            call = graph.call_function(operation, kwargs=dict(node.kwargs))
        call.meta = dict(items[0].meta) if 0 in items else {}
        for now, buffer in restored.items():
            now.replace_all_uses_with(buffer)
        for index, item in items.items():
            item.replace_all_uses_with(given.get(index, call))
            graph.erase_node(item)
        for now in reversed(restored):
            graph.erase_node(now)
        graph.erase_node(node)


def _restored(node: fx.Node, tensor: fx.Node, before: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The buffer that a node would give, if the tensor were changed where it lies.

    Args:
        node: reads what became of the tensor. If the tensor is some columns of a buffer, it is a
            `slice_scatter` that puts them back into the buffer.
        tensor: the tensor as it was given.
        before: what this function said of earlier nodes.
    """
    if node.target is not torch.ops.aten.slice_scatter.default:
        return None
    buffer = before.get(as_node(node.args[0]), as_node(node.args[0]))
    value = buffer.meta["val"]
    place = columns(torch.ops.aten.slice.Tensor(value, *node.args[2:]))
    mine = tensor.meta["val"]
    same = value.untyped_storage()._cdata == mine.untyped_storage()._cdata
    return buffer if same and place is not None and place == columns(mine) else None


class _Rotation:
    """One marked rotation, and the nodes that it is fused with."""

    def __init__(self, graph: fx.Graph, begin: fx.Node, end: fx.Node) -> None:
        self.graph, self.begin, self.end = graph, begin, end
        self.query, self.key = map(as_node, begin.args)
        self.positions, self.table = end.args[2:]

    def fuse(
        self,
        operation: Any,
        refusal: Callable[[Any], str | None],
        source_of: SourceOf | None,
    ) -> None:
        """Fuse it, and take out its end.

        Raises:
            NotFusedError: it does not fit; the graph is unchanged.
        """
        write, attend = self._consumers(refusal)
        query, key = as_node(attend.args[0]), as_node(attend.args[1])
        value, name = as_node(attend.args[2]), attend.args[4]
        spared = {self.begin, self.end, write, attend, *between(self.begin, self.end)}
        for tensor in (self.query, self.key):
            if reads_later(self.graph, tensor, self.end, spared, "example_value"):
                raise NotFusedError("the tensors before the rotation are used again")
        tensors = (self.query, self.key, value)
        if any(overlap(*pair, "example_value") for pair in combinations(tensors, 2)):
            raise NotFusedError("query, key and value share memory")
        shapes = _heads(self.query, query), _heads(self.key, key)
        source = None if source_of is None else source_of(self.graph, tensors, attend, spared)

        with self.graph.inserting_before(attend):
            raw = [
                self.graph.call_method("view", (plain, *shape))
                for plain, shape in zip((self.query, self.key), shapes, strict=True)
            ]
            args = (self.positions, *raw, value, self.table, name)
            if source is not None:
                args = source.give(self.positions, self.table, name)
            call = self.graph.call_function(operation, args)
        call.meta = dict(write.meta)
        for view, plain, rotated in zip(raw, (self.query, self.key), (query, key), strict=True):
            tensor = plain.meta["example_value"].view(*shapes[raw.index(view)])
            view.meta = {**rotated.meta, "example_value": tensor}
            _use_instead(rotated, view)
        for index, item in items_of(self.end):
            _use_instead(item, (self.query, self.key)[index])
        write.replace_all_uses_with(call)
        self.graph.erase_node(write)
        for node in reversed([*between(self.end, attend)]):
            if is_reshape(node) and not node.users:
                self.graph.erase_node(node)
        take_out(self.graph, self.end)
        # vLLM's own rotation, whether it works in place or not
        for node in reversed([*between(self.begin, call)]):
            if node in spared and not node.users:
                self.graph.erase_node(node)

    def _consumers(self, refusal: Callable[[Any], str | None]) -> tuple[fx.Node, fx.Node]:
        """The KV write and the attention that alone use what was rotated.

        Raises:
            NotFusedError: there are none, or `refusal` refuses their layer.
        """
        queries, keys = (
            {reader for at, item in items_of(self.end) if at == index for reader in readers(item)}
            for index in (0, 1)
        )
        writes = [node for node in keys if operator_name(node) == WRITE]
        attends = [node for node in queries if operator_name(node) == ATTEND]
        for write in writes:  # what is done for a cache in fp8 stands before attention
            if (reason := refusal(write.args[-1])) is not None:
                raise NotFusedError(reason)
        if len(writes) != 1 or len(attends) != 1:
            raise NotFusedError("no KV write and attention follow the rotation")
        [write], [attend] = writes, attends
        if queries != {attend} or keys != {write, attend} or set(write.users) != {attend}:
            raise NotFusedError("the rotated query or key is used more than once")
        given = (*attend.args[1:3], *attend.args[4:])
        if write.args != given or attend.kwargs.get("kv_cache_dummy_dep") is not write:
            raise NotFusedError("KV write and attention are given different tensors")
        return write, attend


def _heads(plain: fx.Node, rotated: fx.Node) -> tuple[int, int, int]:
    """The shape by which what is not rotated becomes [tokens, heads, head_dim] without a copy.

    Raises:
        NotFusedError: it would need a copy.
    """
    tensor, like = plain.meta["example_value"], rotated.meta["example_value"]
    heads, size = like.shape[-2:]
    dense = tensor.stride(-1) == 1 and (tensor.dim() == 2 or tensor.stride(-2) == size)
    if like.dim() != 3 or tensor.dim() not in (2, 3) or not dense:
        raise NotFusedError("the tensors before the rotation are not dense rows")
    return -1, heads, size


def _use_instead(rotated: fx.Node, plain: fx.Node) -> None:
    """Let KV write and attention, and those who only ask for a shape, use another node."""
    rotated.replace_all_uses_with(
        plain, lambda user: user.target in METADATA or operator_name(user) in (WRITE, ATTEND)
    )


def take_out(graph: fx.Graph, mark: fx.Node) -> None:
    """Let the users of a mark use what it was given."""
    for index, item in items_of(mark):
        item.replace_all_uses_with(as_node(mark.args[index]))
        graph.erase_node(item)
    graph.erase_node(mark)
