"""Random weights for layers of the real vLLM, in the formats of its checkpoints, on the CPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_gpu import awq_codes, awq_matrix
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


def awq(bits: int = 4, group: int = 64) -> Any:
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

    made = AutoAWQConfig(bits, group, True, False)
    made.packed_modules_mapping = {}
    return made


class StandardKernel:
    """A kernel behind vLLM's choice of one, which gets AWQ's words in GPTQ's order."""

    def __init__(self, settings: Any, w_q_param_name: str, **names: str) -> None:
        self.group = settings.group_size

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4)
        codes = ((layer.qweight[:, None] >> shifts[:, None]) & 15).flatten(0, 1)
        zeros = ((layer.qzeros[:, None] >> shifts[:, None]) & 15).flatten(0, 1).t()
        wide = codes - zeros.repeat_interleave(self.group, 0)
        return x @ (wide * layer.scales.repeat_interleave(self.group, 0)).to(x)


@pytest.mark.parametrize("method", ["AutoAWQLinearMethod", "AutoAWQMarlinLinearMethod"])
def test_awq_matrices_have_zeros_and_scales_to_match(
    method: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of vLLM's layouts: as a checkpoint has it, and what other kernels have of that."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization import auto_awq

    def gemm(x: Any, qweight: Any, scales: Any, qzeros: Any, packed: int) -> torch.Tensor:
        result: torch.Tensor = x @ awq_matrix(qweight, scales, qzeros).to(x)
        return result

    monkeypatch.setattr(_custom_ops, "awq_gemm", gemm)
    monkeypatch.setattr(auto_awq, "verify_marlin_supported", lambda **_: None)
    monkeypatch.setattr(auto_awq, "choose_mp_linear_kernel", lambda *_: StandardKernel)
    kind = getattr(auto_awq, method)
    monkeypatch.setattr(
        auto_awq.AutoAWQConfig, "get_quant_method", lambda self, *_, **__: kind(self)
    )

    def of(quantisation: Any) -> Any:
        layer = RowParallelLinear(
            HIDDEN,
            384,
            bias=False,
            quant_config=quantisation,
            params_dtype=torch.bfloat16,
            return_bias=False,
        )
        model = torch.nn.Module()
        model.add_module("layers", torch.nn.ModuleList([layer]))
        randomise(model, 5)
        return layer

    layer, plain = of(awq()), of(None)
    codes, zeros = awq_codes(layer.qweight), awq_codes(layer.qzeros)
    assert (codes.shape, zeros.shape) == ((HIDDEN, 384), (HIDDEN // 64, 384))
    assert codes.unique().numel() == 16, "the sign bit of each word too"
    assert zeros.eq(8).all(), "in the middle of what codes can be"
    matrix = awq_matrix(layer.qweight, layer.scales, layer.qzeros)
    assert spread(matrix) == STD / math.sqrt(2)
    assert matrix.mean().abs() < 0.2 * matrix.std()
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer.quant_method.process_weights_after_loading(layer)
    found, expected = layer(x), plain(x)
    torch.testing.assert_close(found, x @ matrix.bfloat16())
    assert found.isfinite().all()
    assert spread(found) == float(expected.float().std())


@pytest.mark.parametrize("method", ["auto_awq:AutoAWQMoEMethod", "moe_wna16:MoeWNA16Method"])
def test_awq_experts_have_zeros_and_scales_to_match(
    method: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other kernels are of bytes, and have the output before the input."""
    from vllm.platforms import current_platform

    from patcher.integrate.vllm import sources

    # older versions ask a GPU how much memory a kernel needs
    units = classmethod(lambda *_: 1)
    monkeypatch.setattr(type(current_platform), "num_compute_units", units)
    kind = sources.part(f"vllm.model_executor.layers.quantization.{method}")
    made = kind.__new__(kind)
    made.moe, made.input_dtype = SimpleNamespace(w13_num_shards=2), None
    in_bytes = method.startswith("moe_wna16")
    settings = {"weight_bits": 4, "bit8_pack_factor": 2, "group_size": 64, "has_zp": True}
    settings["linear_quant_method"] = "awq"
    made.quant_config = SimpleNamespace(**settings) if in_bytes else awq()
    experts = torch.nn.Module()
    experts.quant_method = made  # type: ignore[assignment]
    made.create_weights(
        layer=experts,
        num_experts=3,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=128,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *_: None,
    )
    randomise(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([experts])}), 0)
    for name, wanted, shape in (
        ("w13", STD, (3, HIDDEN, 2 * 128)),
        ("w2", STD / math.sqrt(2), (3, 128, HIDDEN)),
    ):
        parts = (
            experts.get_parameter(f"{name}_{part}") for part in ("qweight", "scales", "qzeros")
        )
        if in_bytes:
            words, scales, zeros = parts
            codes = torch.stack([words & 15, words >> 4], -1).flatten(-2)
            offset = torch.stack([zeros & 15, zeros >> 4], -2).flatten(-3, -2)
            scales, offset = (each.repeat_interleave(64, -1) for each in (scales, offset))
            matrix = ((codes.int() - offset.int()) * scales).mT
        else:
            matrix = awq_matrix(*parts)
        assert matrix.shape == shape
        assert matrix.unique().numel() == 16
        assert spread(matrix) == wanted
        assert matrix.float().mean().abs() < 0.2 * wanted


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
