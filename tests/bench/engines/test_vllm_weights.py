"""Random weights for layers of the real vLLM, in the formats of its checkpoints, on the CPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_here import config, needs_vllm

from patcher import bench
from patcher.bench.engines import served_weights, vllm_weights
from patcher.bench.engines.random_weights import STD

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

HIDDEN = 256


def randomise(model: torch.nn.Module, seed: int) -> None:
    served_weights.randomise(model, seed, vllm_weights.layer_types())


def spread(values: torch.Tensor) -> Any:
    """To compare with one wanted: what powers of two as scales allow is within a third."""
    return pytest.approx(float(values.float().std()), rel=0.35)


def test_each_layer_has_the_spread_of_its_place(config: Any) -> None:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import (
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = QKVParallelLinear(HIDDEN, 64, 4, 2)
            self.attention_output = RowParallelLinear(HIDDEN, HIDDEN)
            self.gate = ReplicatedLinear(HIDDEN, 8, bias=False)
            self.gate.e_score_correction_bias = torch.nn.Parameter(torch.ones(8))
            self.input_layernorm, self.k_norm = RMSNorm(HIDDEN), RMSNorm(64)
            self.other_norm, self.plain_norm = GemmaRMSNorm(HIDDEN), torch.nn.LayerNorm(HIDDEN)
            self.k_scale = torch.nn.Parameter(torch.tensor(-1.0))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte_table = VocabParallelEmbedding(512, HIDDEN)
            self.layers = torch.nn.ModuleList([Layer(), Layer()])
            self.lm_head = ParallelLMHead(512, HIDDEN)

    model = Model()
    randomise(model, 3)
    first = model.layers[0]
    assert spread(model.wte_table.weight) == 1
    assert spread(model.lm_head.weight) == STD
    assert spread(first.qkv_proj.weight) == STD
    assert spread(first.gate.weight) == STD
    assert spread(first.attention_output.weight) == STD / 2
    for ones in (first.input_layernorm.weight, first.k_norm.weight, first.plain_norm.weight):
        assert ones.eq(1).all()
    balance = first.gate.e_score_correction_bias
    for zeros in (first.other_norm.weight, first.plain_norm.bias, balance):
        assert zeros.eq(0).all()
    assert first.k_scale == -1, "vLLM's word for a scale that no checkpoint gave"
    logits = torch.randn(500, HIDDEN) @ first.gate.weight.float().T
    picked = torch.bincount(logits.topk(2).indices.flatten(), minlength=8)
    assert picked.min() > 40, "routing is spread out"
    before = {name: each.clone() for name, each in model.named_parameters()}
    randomise(model, 3)
    assert all(each.equal(before[name]) for name, each in model.named_parameters())
    randomise(model, 4)
    assert not model.lm_head.weight.equal(before["lm_head.weight"])


@pytest.mark.parametrize("block", [None, [128, 128]])
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_fp8_matrices_have_scales_to_match(
    block: Any, scheme: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization import fp8

    if block and scheme == "static":
        pytest.skip("blocks are quantised dynamically")
    # the choice of a kernel needs a GPU; the parameters are those that vLLM makes
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: None)
    monkeypatch.setitem(
        vars(config), "model_config", SimpleNamespace(dtype=torch.bfloat16, quantization=None)
    )
    quantisation = fp8.Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme=scheme, weight_block_size=block
    )
    quantisation.packed_modules_mapping = {}
    model = torch.nn.Module()
    layer = RowParallelLinear(HIDDEN, 384, bias=False, quant_config=quantisation)
    model.add_module("layers", torch.nn.ModuleList([layer]))
    randomise(model, 0)
    assert layer.weight.dtype == torch.float8_e4m3fn
    wide = layer.weight.float()
    assert wide.isfinite().all()
    assert wide.unique().numel() > 100
    if block:
        scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        scale = layer.weight_scale.reshape(1, 1)
        assert (getattr(layer, "input_scale", None) is not None) == (scheme == "static")
    assert spread(wide * scale) == STD / math.sqrt(2)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_matrices_have_scales_to_match(
    bits: int, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import auto_gptq

    class Kernel:
        def __init__(self, *given: Any, **names: Any) -> None: ...

    monkeypatch.setattr(auto_gptq, "choose_mp_linear_kernel", lambda *_: Kernel)
    monkeypatch.setattr(auto_gptq, "verify_marlin_supported", lambda **_: None, raising=False)
    quantisation = auto_gptq.AutoGPTQConfig(bits, 128, False, True, False, {}, {}, ["up_proj"])
    quantisation.packed_modules_mapping = {}
    layer = ReplicatedLinear(
        HIDDEN, 128, bias=False, quant_config=quantisation, prefix="model.layers.0.up_proj"
    )
    model = torch.nn.ModuleDict({"up_proj": layer})
    randomise(model, 0)
    shifts = torch.arange(0, 32, bits)
    codes = (layer.qweight[:, None] >> shifts[None, :, None]) & (2**bits - 1)
    codes = codes.flatten(0, 1) - 2 ** (bits - 1)
    assert codes.shape == (HIDDEN, 128)
    assert codes.unique().numel() == 2**bits, "the sign bit of each word too"
    assert spread(codes * layer.scales.repeat_interleave(128, 0)) == STD
    if hasattr(layer, "g_idx"):
        assert layer.g_idx.tolist() == [0] * 128 + [1] * 128


def parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("exponents", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4_experts_have_scales_to_match(exponents: torch.dtype) -> None:
    """The parameters are as `Mxfp4MoEMethod.create_weights` names them."""
    experts = torch.nn.Module()
    for name in ("w13", "w2"):
        experts.register_parameter(f"{name}_weight", parameter(2, 64, 128, dtype=torch.uint8))
        scale = parameter(2, 64, 8, dtype=exponents)
        experts.register_parameter(f"{name}_weight_scale", scale)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([experts])})
    randomise(model, 0)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    for name, wanted in (("w13", STD), ("w2", STD / math.sqrt(2))):
        packed = experts.get_parameter(f"{name}_weight").int()
        codes = values[torch.stack([packed & 15, packed >> 4], -1).flatten(-2)]
        scale = experts.get_parameter(f"{name}_weight_scale").view(torch.uint8).float()
        made = codes * (2 ** (scale - 127)).repeat_interleave(32, -1)
        assert spread(made) == wanted
    if exponents == torch.uint8:  # those of the figures that were published
        assert experts.get_parameter("w13_weight_scale").unique().tolist() == [120]


def test_formats_that_are_not_known_are_named_with_a_fix() -> None:
    def refused(**parameters: torch.nn.Parameter) -> str:
        model = torch.nn.ModuleDict({"up_proj": torch.nn.Module()})
        for name, each in parameters.items():
            model["up_proj"].register_parameter(name, each)
        with pytest.raises(bench.UsageError) as caught:
            randomise(model, 0)
        assert "--weights hub" in caught.value.hint
        return caught.value.message

    byte, eight = parameter(4, 8, dtype=torch.uint8), parameter(4, 1, dtype=torch.float8_e4m3fn)
    assert "up_proj.weight_scale, which is a scale that has a scale" in refused(
        weight=byte, weight_scale=eight
    )
    assert "no matrix" in refused(lonely_scale=parameter(4, dtype=torch.float32))
    assert "which is int64" in refused(weight_shape=parameter(2, dtype=torch.int64))
    assert "its layer does not tell" in refused(
        qweight=parameter(4, 8, dtype=torch.int32), scales=parameter(1, 8, dtype=torch.float16)
    )
    meta = torch.nn.Parameter(torch.zeros(2, 2, device="meta"), requires_grad=False)
    assert "while it is loaded" in refused(weight=meta)


def test_the_loader_is_in_the_registry_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor import model_loader

    monkeypatch.setattr(
        model_loader,
        "_LOAD_FORMAT_TO_MODEL_LOADER",
        dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER),
    )
    vllm_weights.register_loader()
    loader = model_loader.get_model_loader(LoadConfig(load_format=vllm_weights.LOAD_FORMAT))
    model = torch.nn.Linear(32, 64)
    loader.load_weights(model, SimpleNamespace(seed=3))
    assert spread(model.weight) == STD
