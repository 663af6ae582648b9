"""What rewrites of an FX graph ask of its nodes: what they call, and which of them read the memory
of a tensor, by the fake tensors of the nodes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

_RESHAPES = {"view", "reshape", "contiguous", "flatten", "unflatten"}
METADATA = {"size", "dim", "numel", "is_contiguous", "new_empty", "sym_size.int"}
"""Methods, and an operator, that ask for a tensor's form alone."""
_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "setitem"}


class NotFusedError(Exception):
    """Nodes stay the engine's own; the message is the reason."""


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a tensor, directly or as another shape; not those that ask for a size."""
    for user in node.users:
        if is_reshape(user) and user.args[0] is node:
            yield from readers(user)
        elif _name(user) not in METADATA:
            yield user


def is_reshape(node: fx.Node) -> bool:
    """Whether a node gives the same elements in the same order, in another shape."""
    if node.op == "call_method":
        return node.target in _RESHAPES
    return node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def reads_later(
    graph: fx.Graph, tensor: fx.Node, after: fx.Node, spared: set[fx.Node], key: str
) -> bool:
    """Whether the elements of a tensor may be read after a node, or belong to the graph's caller.

    Fake tensors tell which nodes share a storage. Parts of one row, such as query, key and value of
    one projection, do not overlap.

    Args:
        graph: the graph.
        tensor: a node of it.
        after: readers before this node do not count.
        spared: readers that do not count.
        key: where the nodes' fake tensors are in `meta`.
    """
    mine = tensor.meta[key]
    storage, later = mine.untyped_storage()._cdata, False
    for node in graph.nodes:
        later = later or node is after
        if later and node not in spared and node is not after and _reads(node, mine, storage, key):
            return True
        if node.op in ("placeholder", "get_attr") and _shares(node, storage, key):
            return True
    return False


def overlap(one: fx.Node, other: fx.Node, key: str) -> bool:
    """Whether two tensors may have elements in common; for `key`, see `reads_later`."""
    mine = one.meta[key]
    shared = _shares(other, mine.untyped_storage()._cdata, key)
    return shared and not _apart(mine, other.meta[key])


def is_the_models(tensor: fx.Node) -> bool:
    """Whether a tensor lies in the memory of one that Dynamo's graph is given."""
    given = (node for node in tensor.graph.nodes if node.op in ("placeholder", "get_attr"))
    return any(overlap(tensor, node, "example_value") for node in given)


def _reads(node: fx.Node, tensor: torch.Tensor, storage: int, key: str) -> bool:
    """Whether a node is given elements of the tensor; making a view is not reading."""
    name = _name(node)
    in_place = name.rstrip("_") + "_" == name or name in _IN_PLACE
    if (_shares(node, storage, key) and not in_place) or name in METADATA:
        return False
    return any(
        _shares(given, storage, key) and not _apart(given.meta[key], tensor)
        for given in node.all_input_nodes
    )


def _name(node: fx.Node) -> str:
    """Of the method, function or operator that a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def _shares(node: fx.Node, storage: int, key: str) -> bool:
    value = node.meta.get(key)
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage are different columns of rows of the same pitch."""
    ours, theirs = columns(one), columns(other)
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return False
    return ours[2] < theirs[1] or theirs[2] < ours[1]


def columns(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """The pitch of a tensor's rows and its first and last column; None unless it is all between."""
    if not tensor.dim():
        return None
    pitch, first = tensor.stride(0), tensor.storage_offset()
    inner = list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    last: Any = first + sum((size - 1) * stride for size, stride in inner)
    if not all(isinstance(each, int) for each in (pitch, first, last)) or last >= pitch:
        return None
    dense = math.prod(size for size, _ in inner) == last - first + 1
    return (pitch, int(first), last) if dense else None


def between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes after the first and before the last."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def items_of(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The users that take an element of a tuple, with its index."""
    return [
        (int(str(user.args[1])), user)
        for user in list(node.users)
        if user.target is operator.getitem and user.args[0] is node
    ]


def operator_name(node: fx.Node) -> str:
    """The operator that a node calls, as `library::name`; otherwise empty."""
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return str(node.target._qualified_op_name)
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket._qualified_op_name)
    return ""


def label_of(node: fx.Node) -> str:
    """A node for people: its operator, function or method."""
    if node.op == "output":
        return "the end of the graph"
    target = node.target
    return operator_name(node) or str(getattr(target, "__name__", target))


def form_of(node: Any) -> tuple[object, ...]:
    """Shape and dtype of a node's tensor, compared as text so that no guard is made."""
    value = example_of(node)
    return (*map(str, value.shape), value.dtype)


def example_of(node: Any) -> Any:
    """The fake tensor that Dynamo kept for a node.

    Raises:
        NotFusedError: it kept none.
    """
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise NotFusedError("a graph without shapes")
    return value


def value_of(argument: Any) -> Any:
    """An operator's argument, or what Dynamo knows of it; of a fake object, the real one."""
    value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
    return getattr(value, "real_obj", value)


def as_node(value: Any) -> fx.Node:
    """The value, which is a node."""
    assert isinstance(value, fx.Node)
    return value
