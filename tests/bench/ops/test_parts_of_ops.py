"""Ops over several others: what they run of those is in their digest, and means the same."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import runpy
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patcher.bench import Op, UsageError, load_op, load_ops

BLOCKS = ("add_rms_norm_route", "lm_head_argmax", "moe_block", "qkv_rope_kv_update")
VARIANTS = ("decode_attention_fp8",)
"""Ops that are another one over numbers in fp8."""
JUDGED_WITHOUT = {"moe_matmul_down", "reduce_add_rms_norm"}
"""Their committed verdicts are of digests of their own files alone."""


def run_of_others(op: Op, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files of other ops that its own files run, solutions among them."""
    found = set[str]()
    real, real_spec = runpy.run_path, importlib.util.spec_from_file_location

    library = op.folder.resolve().parent

    def seen(path: str | Path) -> Path:
        file = Path(path).resolve()
        if op.folder.resolve() not in file.parents:
            found.add(str(file.relative_to(library)))
        return file

    def spec(name: str, path: Any = None, **more: Any) -> Any:
        if library in Path(str(path)).resolve().parents:
            seen(path)
        return real_spec(name, path, **more)

    def run(path: str, **more: Any) -> dict[str, Any]:
        if "solutions" in seen(path).parts:
            return defaultdict(lambda: print)  # its kernels need a GPU
        return real(path, **more)

    monkeypatch.setattr(runpy, "run_path", run)
    monkeypatch.setattr(importlib.util, "spec_from_file_location", spec)
    for name in ("reference.py", "inputs.py", "baselines.py"):
        loaded = run(str(op.folder / name))
        runs_files = "run_path" in (op.folder / name).read_text()
        for factory in loaded.get("BASELINES", {}).values() if runs_files else ():
            with contextlib.suppress(ImportError):  # an engine that is not here
                factory("cuda")
    return found


@pytest.mark.parametrize("name", sorted(load_ops().keys() - JUDGED_WITHOUT))
def test_what_an_op_runs_of_others_is_in_its_digest(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = load_op(name)
    assert run_of_others(op, monkeypatch) == set(op.contract.reads)
    assert bool(op.contract.reads) == (name in (*BLOCKS, *VARIANTS))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "moe_block"])
def test_torch_compile_takes_the_eager_chain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the module of every function that it inlines; no code is generated here."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    op = load_op(name)
    point, scalars = op.sweep("cpu").points()[0], [each.value for each in op.contract.scalars]
    values = op.inputs.make(point, torch.Generator().manual_seed(1), "normal")
    found = [
        op.baselines[kind]("cpu")(*(each.clone() for each in values.values()), *scalars)
        for kind in ("torch.compile", "eager")
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_another_file_of_a_part_is_another_op(tmp_path: Path) -> None:
    library = load_op(BLOCKS[0]).folder.parent
    for name in (BLOCKS[0], "fused_add_rms_norm", "linear", "moe_route"):
        shutil.copytree(library / name, tmp_path / name)
    before = Op(tmp_path / BLOCKS[0]).digest
    assert before == load_op(BLOCKS[0]).digest
    inputs = tmp_path / "moe_route" / "inputs.py"
    inputs.write_text(f"{inputs.read_text()}\n")
    assert Op(tmp_path / BLOCKS[0]).digest != before
    inputs.unlink()
    with pytest.raises(UsageError, match=r"reads moe_route/inputs\.py, which is not there"):
        _ = Op(tmp_path / BLOCKS[0]).digest


def in_turn(name: str, given: dict[str, Any]) -> dict[str, Tensor]:
    """The block's result by the references of its parts."""
    part = {each: load_op(each).reference for each in _PARTS[name]}
    if name == "add_rms_norm_route":
        tables = {
            each: given[each]
            for each in (tensor.name for tensor in load_op("moe_route").contract.written)
        }
        norm = part["fused_add_rms_norm"](
            given["input"], given["residual"], given["weight"], given["epsilon"]
        )
        wide = norm["input"], given["router_weight"], given["router_bias"], given["logits"]
        logits = part["linear"](*wide)["output"]
        routed = part["moe_route"](logits.to(given["logits"].dtype), **tables)
        return {**norm, "logits": logits, **routed}
    if name == "moe_block":
        return experts_in_turn(part, given)
    if name == "lm_head_argmax":
        wide = given["x"], given["weight"], given["x"].new_empty(0), given["x"]
        logits = part["linear"](*wide)["output"]
        chosen: dict[str, Tensor] = part["sample_argmax"](logits, given["output"])
        return chosen
    row = part["linear"](given["x"], given["weight"], given["bias"], given["x"])["output"]
    kv = given["key_cache"].shape[2] * given["key_cache"].shape[3]
    query, key, value = row.split([given["query"].shape[1], kv, kv], 1)
    rest = {each: given[each] for each in ("positions", "cos_sin", "slots")}
    caches = {each: given[each] for each in ("key_cache", "value_cache")}
    none = row.new_empty(0)
    found: dict[str, Tensor] = part["rope_kv_update"](
        query=query, key=key, value=value, bias=none, **rest, **caches
    )
    return found


def experts_in_turn(part: dict[str, Any], given: dict[str, Any]) -> dict[str, Tensor]:
    def taken(*names: str, prefix: str = "") -> dict[str, Any]:
        return {name: given[prefix + name] for name in names}

    chosen = given["chosen"]
    start = part["add_rms_norm_route"](
        **taken("input", "residual", "weight", "router_weight", "router_bias", "logits", "epsilon"),
        **{"gather_index": chosen.view(-1), "tile_map": chosen.new_empty(4, chosen.numel())},
    )
    tables = {name: start[name].int() for name in ("histogram", "token_offsets")}
    tables["tile_map"] = chosen
    packed = ("weights", "scales", "bias")
    active = part["moe_matmul_swiglu"](
        **{"x": start["input"], "gather_index": start["gather_index"].int()},
        **taken(*packed, prefix="gate_up_") | tables | taken("alpha", "limit"),
        output=chosen.new_empty(chosen.numel(), given["gate_up_bias"].shape[1] // 2),
    )["output"]
    row_map = start["scatter_index"].int().view(chosen.shape)
    rows = part["moe_matmul_down"](
        **{"x": active, "gate_scales": start["gate_scales"], "row_map": row_map},
        **taken(*packed, prefix="down_") | tables,
        output=chosen.new_empty(chosen.numel(), given["total"].shape[1]),
    )["output"]
    end = part["reduce_add_rms_norm"](
        rows, row_map, start["residual"], given["next_weight"], given["output"], given["epsilon"]
    )
    expert = torch.repeat_interleave(tables["histogram"])[row_map.long()]
    logits, total = start["logits"], end["residual"]
    return {"logits": logits, "chosen": expert.double(), "total": total, "output": end["output"]}


_PARTS = {
    "add_rms_norm_route": ("fused_add_rms_norm", "linear", "moe_route"),
    "lm_head_argmax": ("linear", "sample_argmax"),
    "moe_block": (
        *("add_rms_norm_route", "moe_matmul_swiglu", "moe_matmul_down"),
        "reduce_add_rms_norm",
    ),
    "qkv_rope_kv_update": ("linear", "rope_kv_update"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_reference_of_a_block_is_that_of_its_parts_in_turn(name: str) -> None:
    op = load_op(name)
    point = op.sweep("cpu").points()[2]
    for regime in op.inputs.REGIMES:
        generator = torch.Generator().manual_seed(3)
        given = op.inputs.make(point, generator, regime)
        scalars = {scalar.name: scalar.value for scalar in op.contract.scalars}
        found = op.reference(**given, **scalars)
        expected = in_turn(name, {**given, **scalars})
        assert found.keys() == expected.keys()
        for each, value in expected.items():
            torch.testing.assert_close(found[each], value, rtol=1e-12, atol=1e-12, msg=regime)
