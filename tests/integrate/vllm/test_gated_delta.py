"""The step of decode of vLLM's gated delta layers, with doubles for its Triton kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import config, needs_vllm, patched, shipped

from patcher import bench
from patcher.bench.judge.call_recording import read_recording
from patcher.bench.judge.contract_observation import observe
from patcher.integrate.recorders import recorder
from patcher.integrate.survey import survey

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

OP = bench.load_op("gated_delta_decode")
TOKENS, SLOTS, HEADS, VALUES, DIM = 3, 6, 2, 4, 16


FLOATS = dict.fromkeys("TSF", torch.float32)


class Recorder:
    """In the place of vLLM's Triton kernel, which needs a GPU."""

    def __init__(self) -> None:
        self.calls = 0

    def __getitem__(self, grid: Any) -> Any:
        def run(**given: Any) -> None:
            self.calls += 1

        return run


@pytest.fixture
def module(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    import sys

    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as found

    monkeypatch.setattr(found, "causal_conv1d_update", lambda x, *rest, **more: x)
    function = found.fused_recurrent_gated_delta_rule_packed_decode
    home = sys.modules[function.__module__]
    monkeypatch.setattr(home, f"{function.__name__}_kernel", Recorder())
    for name, result in (("next_power_of_2", 16), ("cdiv", 1)):
        monkeypatch.setattr(home.triton, name, lambda *_, it=result: it, raising=False)
    return SimpleNamespace(layer=found, kernel=getattr(home, f"{function.__name__}_kernel"))


def layer_of(module: Any) -> Any:
    """What is left of a layer without its projections; its cache has a convolution's state, too."""
    layer = module.layer.QwenGatedDeltaNetAttention.__new__(module.layer.QwenGatedDeltaNetAttention)
    torch.nn.Module.__init__(layer)
    layer.A_log = torch.nn.Parameter(torch.randn(VALUES), requires_grad=False)
    layer.dt_bias = torch.nn.Parameter(torch.randn(VALUES), requires_grad=False)
    layer.conv1d = SimpleNamespace(weight=torch.zeros(1, 1, 4), bias=None)
    layer.activation, layer.head_k_dim = "silu", DIM
    layer.enable_packed_recurrent_decode = True
    whole = torch.randn(SLOTS, 40 + VALUES * DIM * DIM)
    layer.kv_cache = whole[:, :40].unsqueeze(-1), whole[:, 40:].view(SLOTS, VALUES, DIM, DIM)
    return layer


def step(layer: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    metadata = SimpleNamespace(non_spec_state_indices_tensor=slots, num_actual_tokens=TOKENS)
    out = torch.full((TOKENS + 1, VALUES, DIM), 7.0)  # a graph has a token more
    layer._forward_core_decode_non_spec(
        **{name: each.clone() for name, each in given.items()},
        core_attn_out=out,
        attn_metadata=metadata,
    )
    return out


def inputs() -> dict[str, torch.Tensor]:
    widths = {"mixed_qkv": (2 * HEADS + VALUES) * DIM, "a": VALUES, "b": VALUES}
    return {name: torch.randn(TOKENS + 1, width) for name, width in widths.items()}


@feature("`enforce_eager`, mode NONE", "right", "gated_delta")
def test_a_step_of_decode_is_one_call(module: Any) -> None:
    layer, given, kernel = layer_of(module), inputs(), shipped(OP.name, I=torch.int32, **FLOATS)
    before = layer.kv_cache[1].clone()
    made = {name: each[:TOKENS] for name, each in given.items()}
    expected = OP.reference(
        state=before.flatten(1),
        qkv=made.pop("mixed_qkv"),
        **made,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        slots=torch.tensor([4, 0, 2]),
        out=torch.empty(TOKENS, VALUES * DIM),
    )
    with patched("gated_delta", kernel) as point:
        out = step(layer, given)
        seen = survey(point, kernel.guards, [layer])
        assert (seen.taken, seen.total) == (1, 1)
        layer.enable_fused_gdn_spec_decode = True
        assert point.applies(layer) == "decode fused with its gate and norm"
    assert sum(kernel.book.calls.values()) == 1
    assert module.kernel.calls == 0
    torch.testing.assert_close(
        out[:TOKENS].flatten(1).double(), expected["out"], rtol=1e-4, atol=1e-5
    )
    assert out[TOKENS].eq(7).all(), "what is no token of the step"
    state = layer.kv_cache[1].flatten(1).double()
    torch.testing.assert_close(state[[2, 4]], expected["state"][[2, 4]], rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.kv_cache[1][[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def test_an_engine_that_computes_something_else_refutes_the_contract(
    module: Any, tmp_path: Path
) -> None:
    """The double of vLLM's kernel computes nothing."""
    layer, given, file = layer_of(module), inputs(), tmp_path / "calls.safetensors"
    with recorder("vllm", "gated_delta", file) as found:
        out = step(layer, given)
    assert (found.seen, found.record().left_out, module.kernel.calls) == (1, {}, 1)
    _, [call] = read_recording(file, OP.contract)
    assert call.inputs["qkv"].equal(given["mixed_qkv"][:TOKENS])
    assert call.outputs["out"].equal(out[:TOKENS].flatten(1))
    assert call.outputs["state"].equal(layer.kv_cache[1].flatten(1))
    assert observe(file).refuted


@feature("a cache whose slots are not dense", "falls back", "gated_delta")
def test_other_calls_are_the_engines_own_and_counted(module: Any) -> None:
    layer, given, kernel = layer_of(module), inputs(), shipped(OP.name, I=torch.int32, **FLOATS)
    function = vars(module.layer)["fused_recurrent_gated_delta_rule_packed_decode"]
    with patched("gated_delta", kernel):
        layer.head_k_dim = 4
        step(layer, given)
        layer.head_k_dim = DIM
        conv, state = layer.kv_cache
        layer.kv_cache = conv, torch.randn(SLOTS, VALUES, DIM, 2 * DIM)[..., :DIM]
        step(layer, given)
        layer.kv_cache = conv, state.double()
        step(layer, given)
    reasons = dict(kernel.book.fallbacks)
    assert reasons.pop("another scale") == reasons.pop("a state that is not dense") == 1
    [(reason, count)] = reasons.items()
    assert (reason.startswith("dtype float64/"), count) == (True, 1)
    assert module.kernel.calls == 3
    assert vars(module.layer)["fused_recurrent_gated_delta_rule_packed_decode"] is function
