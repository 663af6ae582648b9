"""Expert selection in vLLM's own layers of experts, on the CPU; the kernels are doubles."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_here import config, needs_vllm

from patcher import bench
from patcher.bench.engines import vllm_routing

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

EXPERTS, TOP_K, HIDDEN = 4, 2, 16


def most(hidden_states: Any, gating_output: torch.Tensor, topk: int, renormalize: bool) -> Any:
    """Routing in plain PyTorch."""
    weights, selected = gating_output.softmax(-1).topk(topk)
    return weights, selected.int()


@pytest.fixture(params=[False, True], ids=["modular", "monolithic"])
def layer(request: pytest.FixtureRequest, config: Any) -> Iterator[Any]:
    """A layer as models build it, with kernels that get the selection, or select themselves."""
    from vllm.model_executor.layers.fused_moe import layer
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    class Kernels(FusedMoEMethodBase):  # type: ignore[misc]  # vllm is untyped here
        is_monolithic = request.param

        def create_weights(self, layer: Any, *args: Any, **sizes: Any) -> None: ...

        def get_fused_moe_quant_config(self, layer: Any) -> None: ...

        def maybe_roundup_sizes(self, hidden: int, inner: int, *rest: Any) -> tuple[int, int]:
            return hidden, inner

        def apply(self, layer: Any, x: torch.Tensor, *rest: Any, **selection: Any) -> torch.Tensor:
            return 2 * x

        def apply_monolithic(self, layer: Any, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
            return 2 * x

    quantisation = SimpleNamespace(
        get_quant_method=lambda layer, prefix: Kernels(layer.moe_config),
        packed_modules_mapping={},
        online_quantization_config=None,
    )
    make = getattr(layer, "FusedMoEFactory", None) or layer.FusedMoE
    yield make(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=8,
        params_dtype=torch.float32,
        prefix=f"model.layers.{request.param:d}.mlp.experts",
        custom_routing_function=most,
        quant_config=quantisation,
    )
    config.compilation_config.static_forward_context.clear()


class Engine:
    """Calls the layer in prefill and in each step of decode, as a model does."""

    requests = 0

    def __init__(self, config: Any, layer: Any, logits: torch.Tensor) -> None:
        self.config, self.logits = config, logits
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 1), layer)
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: self.model))

    def on_workers(self, function: Any, *arguments: Any) -> list[Any]:
        return [function(self.worker, *arguments)]

    def generate(self, prompts: torch.Tensor, steps: int) -> None:
        from vllm.forward_context import set_forward_context

        layer = self.model[1]
        with set_forward_context(None, self.config):
            layer(torch.ones(prompts.numel(), HIDDEN), torch.randn(prompts.numel(), EXPERTS))
            for _ in range(steps):
                hidden = torch.ones(len(prompts), HIDDEN)
                assert layer(hidden, self.logits).equal(2 * hidden)


def test_selections_of_decode_are_counted(config: Any, layer: Any) -> None:
    prompts = torch.zeros(3, 5, dtype=torch.long)
    even = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3], [2, 0, 1, 3]])
    one = torch.tensor([[3.0, 2, 1, 0]]).expand(3, -1)
    engine: Any = Engine(config, layer, even)
    with vllm_routing.selections([layer], 3) as counts:
        engine.generate(prompts, 2)
    assert counts[0].tolist() == [4, 2, 2, 4]
    spread = vllm_routing.routing_entropy_pct(engine, prompts, 2)
    narrow = vllm_routing.routing_entropy_pct(Engine(config, layer, one), prompts, 2)  # type: ignore[arg-type]
    assert spread is not None
    assert 95 < spread < 97
    assert narrow == pytest.approx(50), "two of four experts"
    assert "_apply_quant_method" not in vars(layer)


def test_a_layer_that_decode_never_calls_is_loud(config: Any, layer: Any) -> None:
    engine: Any = Engine(config, layer, torch.zeros(3, EXPERTS))
    with pytest.raises(bench.PatcherError, match="never called"):
        vllm_routing.routing_entropy_pct(engine, torch.zeros(3, 5, dtype=torch.long), 0)
    engine.model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert vllm_routing.routing_entropy_pct(engine, torch.zeros(3, 5), 1) is None
