"""The strides that guards allow."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from patcher.bench import Language, load_op
from patcher.integrate.formats.hf_sources import package
from patcher.integrate.guards import TensorGuard

LAID_OUT: dict[str, tuple[torch.Tensor, str | None, str | None]] = {
    # what a guard for `rows` says of it, and one for `strided`
    "contiguous": (torch.zeros(3, 4, 8), None, None),
    "padded rows": (torch.zeros(3, 4, 12)[..., :8], None, None),
    "rows of a part": (torch.zeros(3, 6, 8)[:, :4], "rows without one pitch", None),
    "one row of each part": (torch.zeros(3, 6, 8)[:, :1], "rows without one pitch", None),
    "rows before parts": (torch.zeros(4, 3, 8).transpose(0, 1), "rows without one pitch", None),
    "no dense row": (torch.zeros(3, 4, 16)[..., ::2], "not contiguous", "not contiguous"),
    "a pitch of 10": (torch.zeros(3, 4, 10)[..., :8], "not aligned", "not aligned"),
    "one row many times": (
        torch.zeros(3, 1, 8).expand(3, 4, 8),
        "elements that share a place",
        "elements that share a place",
    ),
    "overlapping rows": (
        torch.zeros(256).as_strided((3, 4, 8), (64, 4, 1)),
        "elements that share a place",
        "elements that share a place",
    ),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_layout_allows_its_own_strides_and_no_others(name: str) -> None:
    tensor, as_rows, as_strided = LAID_OUT[name]
    axes = ("parts", "rows", "columns")
    said = [
        TensorGuard("x", axes, "T", mutated=False, layout=layout, alignment=16).misplaced(tensor)
        for layout in ("contiguous", "rows", "strided")
    ]
    assert said[1:] == [as_rows, as_strided]
    assert (said[0] is None) == tensor.is_contiguous()


@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.parametrize("layout", ["contiguous", "rows", "strided"])
def test_an_exported_kernel_refuses_the_same_strides(name: str, layout: Any) -> None:
    contract = load_op("rope_kv_update").contract
    source = package(contract, "cuda", Language.TRITON).files["_op.py"].decode()
    [function] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "_misplaced"
    ]
    names: dict[str, Any] = {}
    exec(ast.unparse(function), names)
    tensor = LAID_OUT[name][0]
    guard = TensorGuard("x", ("a", "b", "c"), "T", mutated=False, layout=layout, alignment=16)
    ours, exported = guard.misplaced(tensor), names["_misplaced"](tensor, layout, 16)
    assert (ours is None) == (exported is None)
    assert str(exported).startswith(("None", "is", "has"))
    assert f"'key_cache': '{contract.tensors[-2].layout}'" in source
