"""Find plain norms before quantisations in a graph that vLLM is about to split, and fuse both.

The patched quantiser calls `enter` and `leave` around what quantises: vLLM's operator, the one of
the point `quantize_fp8`, or a chain in PyTorch. Both return what they are given. Where x comes
straight from an RMSNorm without a residual that nothing else reads, one operator takes the place of
norm and quantisation. Elsewhere only the marks are taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from patcher.integrate.vllm.roles.graph_reads import (
    NotFusedError,
    as_node,
    between,
    example_of,
    is_the_models,
    items_of,
    label_of,
    operator_name,
    readers,
)
from patcher.integrate.vllm.roles.linear_graph import plain
from patcher.integrate.vllm.roles.qk_norm_rope_graph import NORM, seen_as
from patcher.integrate.vllm.roles.rope_graph import replace_marked

_TAKEN: Mapping[str, str] = {
    "patcher::rms_norm_quant_fp8_": "rms_norm_quant_fp8",
    "patcher::embed_norm_": "embed_norm",
    "patcher::rms_norm_": "norm.plain",
}
"""By prefix of the operators that they install, the points that take norms without a residual; a
prefix comes before those that it begins with."""


def enter(x: torch.Tensor) -> tuple[torch.Tensor]:
    """Mark where a quantisation begins: x, as it was given."""
    return (x,)


def leave(quantised: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mark where a quantisation ends: what it gives, as it was given."""
    return quantised, scales


def left_alone(x: torch.Tensor, reason: str) -> torch.Tensor:
    """Carry to `fuse` why a quantisation is not marked: x, as it was given."""
    return x


MARKS: tuple[Callable[..., Any], ...] = (enter, leave, left_alone)


def fuse(module: fx.GraphModule, operation: Any) -> list[str]:
    """Replace each marked quantisation and the norm before it by one operator.

    Args:
        module: Dynamo's graph, changed in place.
        operation: takes rows [tokens, hidden], the norm's weight [hidden], what it writes in fp8
            [tokens, hidden] and as float32 scales [tokens, groups], and epsilon.

    Returns:
        A reason for each quantisation that stays as it is.
    """
    return replace_marked(module, lambda *marks: _Chain(*marks).replace(operation), MARKS)


def taken_by(users: Iterable[fx.Node]) -> str | None:
    """The point whose operator, among these nodes, computes a norm; None if there is none."""
    for name in map(operator_name, users):
        for prefix, point in _TAKEN.items():
            if name.startswith(prefix):
                return point
    return None


class _Chain:
    """One marked quantisation, and the norm before it."""

    def __init__(self, begin: fx.Node, end: fx.Node) -> None:
        """Look at the nodes.

        Raises:
            NotFusedError: they are no such chain; the graph is unchanged.
        """
        self.begin, self.end = begin, end
        given = as_node(begin.args[0])
        self.shapes = [*seen_as(given)]
        self.norm = norm = plain(given)
        if operator_name(norm) != NORM:
            writing = (user for user in norm.users if norm in user.args[2:])
            if (point := taken_by(writing)) is not None:
                raise NotFusedError(f"{point} has the norm")
            raise NotFusedError(f"{label_of(norm)} makes what is quantised, and no plain norm")
        rows, self.weight, self.epsilon, *part = norm.args
        if norm.kwargs or part not in ([], [None]) or not isinstance(self.weight, fx.Node):
            raise NotFusedError("another kind of norm")
        for reader in readers(norm):
            if reader is not begin:
                other = reader.target in MARKS
                name = "another quantisation" if other else label_of(reader)
                raise NotFusedError(f"{name} reads what the norm makes, too")
        if not is_the_models(self.weight):
            raise NotFusedError("a weight that is computed")
        self.rows = as_node(rows)
        self._must_be_rows(example_of(self.rows), example_of(given))
        self.gone = {*between(begin, end), end}
        for node in self.gone - {end}:
            tensor = isinstance(node.meta.get("example_value"), torch.Tensor)
            if tensor and not self.gone.issuperset(node.users):
                raise NotFusedError("what the quantisation makes is read elsewhere")

    def _must_be_rows(self, rows: torch.Tensor, given: torch.Tensor) -> None:
        """Check that rows are normalised, and are quantised row by row.

        Raises:
            NotFusedError: they are not.
        """
        quantised, scales = (example_of(node) for node in self.end.args)
        shape = str(rows.shape)
        if rows.dim() != 2 or rows.stride(1) != 1 or str(given.shape) != shape:
            raise NotFusedError("a norm of something else than rows")
        wide, groups = int(rows.shape[1]), int(scales.shape[-1])
        by_rows = scales.dim() == 2 and (groups == 1 or scales.stride() == (groups, 1))
        types = quantised.dtype, scales.dtype
        if str(quantised.shape) != shape or not by_rows or wide % groups:
            raise NotFusedError("scales in another layout")
        if types != (torch.float8_e4m3fn, torch.float32):
            raise NotFusedError("numbers or scales of another dtype")
        self.columns = wide, groups

    def replace(self, operation: Any) -> None:
        """Put the operator in the place of the norm."""
        graph, rows = self.norm.graph, self.rows
        inside = [*between(self.begin, self.end)]
        with graph.inserting_before(self.norm):
            # as vLLM writes it; it would take a method `size` for one that gives all sizes
            size = graph.call_function(torch.ops.aten.sym_size.int, (rows, 0))
            size.meta["example_value"] = example_of(rows).shape[0]
            types = torch.float8_e4m3fn, torch.float32
            written = [self._empty(size, *each) for each in zip(self.columns, types, strict=True)]
            graph.call_function(operation, (rows, self.weight, *written, self.epsilon))
        for index, item in items_of(self.end):
            item.replace_all_uses_with(written[index])
            graph.erase_node(item)
        graph.erase_node(self.end)
        for node in reversed(inside):
            if not node.users:
                graph.erase_node(node)
        self.begin.args = (rows,)  # for those who ask for a size
        self.norm.replace_all_uses_with(rows)
        for node in (*self.shapes, self.norm):
            if not node.users:
                graph.erase_node(node)

    def _empty(self, size: fx.Node, columns: int, dtype: torch.dtype) -> fx.Node:
        node = self.norm.graph.call_method(
            "new_empty", (self.rows, (size, columns)), {"dtype": dtype}
        )
        wide = example_of(self.rows)
        node.meta["example_value"] = wide.new_empty((wide.shape[0], columns), dtype=dtype)
        return node
