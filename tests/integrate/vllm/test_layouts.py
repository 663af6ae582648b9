"""Tensors as the installed vLLM lays them out: what contracts and their guards make of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import needs_vllm

from patcher import bench
from patcher.bench.runner.loading import load
from patcher.integrate.activation import contract_guards
from patcher.integrate.guards import TensorGuard
from patcher.integrate.vllm import engine

BLOCKS, BLOCK, HEADS, HEAD_DIM, LAYERS = 5, 16, 2, 16, 3
ROPE = bench.load_op("rope_kv_update")
MATMULS = {"moe_matmul_swiglu": (5760, 2880), "moe_matmul_down": (2880, 2880)}
"""Columns and depth of gpt-oss's expert matmuls."""

pytestmark = needs_vllm


def guard(op: str, name: str) -> TensorGuard:
    guards = contract_guards(bench.load_op(op).contract, "cuda", [])
    return next(each for each in guards.tensors if each.name == name)


def caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, torch.Tensor]]:
    """A layer's KV cache, bfloat16, in each layout that this vLLM's FlashAttention may have."""
    if find_spec("vllm.v1.kv_cache_layout") is not None:
        from vllm.v1 import kv_cache_interface as interface
        from vllm.v1.kv_cache_layout import KVCacheLayout

        spec = interface.FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16
        )
        for layout in KVCacheLayout:
            strides = interface.compute_layout_strides(spec, BLOCKS, LAYERS, layout)
            content = 2 * HEAD_DIM * 2  # bytes of a key and a value
            raw = torch.zeros(LAYERS * BLOCKS * HEADS * BLOCK * content, dtype=torch.int8)
            layers = raw.as_strided((LAYERS, BLOCKS, HEADS, BLOCK, content), strides)
            yield layout.name, layers[1].view(torch.bfloat16)
        return
    from vllm.v1.attention.backends import flash_attn

    backend = flash_attn.FlashAttentionBackend
    shape = backend.get_kv_cache_shape(BLOCKS, BLOCK, HEADS, HEAD_DIM)
    for layout in ("NHD", "HND"):
        monkeypatch.setattr(flash_attn, "get_kv_cache_layout", lambda layout=layout: layout)
        order = backend.get_kv_cache_stride_order()
        memory = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16)
        yield layout, memory.permute([order.index(axis) for axis in range(len(order))])
        order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        sizes = (LAYERS, *shape)
        memory = torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16)
        whole = memory.permute([order.index(axis) for axis in range(len(order))])
        yield f"{layout}, all layers of a block together", whole[1]


@feature("`VLLM_KV_CACHE_LAYOUT`, packed caches", "right", "rope_kv")
def test_the_contract_takes_the_kv_cache_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    point = bench.Point(
        axes={
            **{"tokens": 7, "q_heads": 4, "kv_heads": HEADS, "head_dim": HEAD_DIM},
            **{"positions": 64, "blocks": BLOCKS, "block_size": BLOCK, "biased": 0},
        },
        dtypes={"T": "bfloat16", "C": "bfloat16", "P": "int64"},
    )
    solution = ROPE.folder / "solutions" / "cpu_torch" / "rope_kv_update.py"
    kernel = load(str(solution), "python", ROPE.name)
    made = ROPE.inputs.make(point, torch.Generator().manual_seed(0), "normal")
    expected = {name: value.clone() for name, value in made.items()}
    kernel(*expected.values())
    seen = []
    for layout, cache in caches(monkeypatch):
        found = engine.kv_caches(cache, HEAD_DIM)
        assert found is not None, layout
        for name, view in zip(("key_cache", "value_cache"), found, strict=True):
            assert guard(ROPE.name, name).misplaced(view) is None, layout
            view.copy_(made[name])
        given = {name: value.clone() for name, value in made.items()}
        kernel(*[*given.values()][:-2], *found)
        for name, view in zip(("key_cache", "value_cache"), found, strict=True):
            assert torch.equal(view, expected[name]), layout
        assert torch.equal(given["query"], expected["query"])
        seen.append(layout)
    assert len(seen) >= 4


@pytest.mark.parametrize("op", MATMULS)
def test_the_contract_takes_mxfp4_weights_as_vllm_processes_them(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, depth = MATMULS[op]
    contract = bench.load_op(op).contract
    weights, scales = swizzled(columns, depth, monkeypatch)
    narrow = engine.scale_rows(scales, depth)
    sizes = {"hidden": depth, "inner": columns // 2}
    if op == "moe_matmul_down":
        sizes = {"hidden": columns, "inner": depth}
    point = bench.Point(
        axes={"tokens": 1, "top_k": 1, "experts": 2, **sizes}, dtypes={"U": "uint8"}
    )
    for name, tensor in (("weights", weights.storage.data.mT), ("scales", narrow)):
        [spec] = [each for each in contract.tensors if each.name == name]
        assert tensor.shape == contract.shape(spec, point)
        assert guard(op, name).misplaced(tensor) is None
    numbers = bench.load_op(op).folder / "solutions" / "cpu_torch" / f"{op}.py"
    kernel: Any = load(str(numbers), "python", op)
    unfold = kernel.__globals__["numbers"]
    found = unfold(weights.storage.data.mT[1], narrow[1], columns)
    assert torch.equal(found, unfold(weights.storage.data.mT[1], narrow[1].contiguous(), columns))
    # code 2 is 1, and the scale of column n at k is 2^(n % 3 + k // 32 % 2 - 4)
    n, k = torch.arange(columns).unsqueeze(1), torch.arange(depth)
    assert torch.equal(found, torch.exp2((n % 3 + k // 32 % 2 - 4).float()))


def swizzled(columns: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Weights of two experts after vLLM's own `_swizzle_mxfp4`, as on an H100."""
    import vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe  # noqa: F401
    from vllm.model_executor.layers.quantization.utils import mxfp4_utils
    from vllm.platforms import current_platform

    layouts: Any = importlib.import_module("triton_kernels.tensor_details.layout")
    monkeypatch.setattr(layouts, "cuda_capability_geq", lambda major, minor=0: major <= 9)
    monkeypatch.setattr(mxfp4_utils, "is_torch_equal_or_newer", lambda *_: True, raising=False)
    told = {
        "is_cuda": lambda *_: True,
        "is_rocm": lambda *_: False,
        "is_device_capability": lambda wanted, *_: wanted in (90, (9, 0)),
        "is_device_capability_family": lambda *_: False,
    }
    for name, answer in told.items():
        monkeypatch.setattr(current_platform, name, answer, raising=False)
    weights = torch.full((2, columns, depth // 2), 0x22, dtype=torch.uint8)
    n, k = torch.arange(columns).unsqueeze(1), torch.arange(depth // 32)
    scales = (123 + n % 3 + k % 2).to(torch.uint8).expand(2, -1, -1).contiguous()
    packed, _, scale = mxfp4_utils._swizzle_mxfp4(weights, scales)
    return packed, scale
