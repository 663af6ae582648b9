"""How evenly a mixture of experts in vLLM selects its experts.

Every such layer is a `MoERunner` that has a router, whatever the model and the format of its
weights, as read in vLLM 0.25.1 to 0.33.0. Some kernels select experts themselves, so the layer's
router is asked once more, with the logits that the layer got.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from patcher.bench.engines import entropy_pct
from patcher.bench.engines.vllm_workers import Running, on_each
from patcher.bench.errors import PatcherError

_INTERFACE = "vllm.model_executor.layers.fused_moe.runner.moe_runner_interface"


def routing_entropy_pct(engine: Running, prompts: torch.Tensor, steps: int) -> float | None:
    """Mean entropy of expert selection in decode, in percent of uniform.

    Args:
        engine: an engine that runs without compilation and graphs, which would not call layers.
        prompts: token ids, int64 of shape [batch, input_len].
        steps: number of decode steps.

    Returns:
        The entropy; None if no layer of the model is a mixture of experts of vLLM's.

    Raises:
        PatcherError: a layer was never called in decode.
    """
    if not engine.on_workers(_number_of_layers)[0]:
        return None
    with on_each(engine, selecting, prompts.shape[0]) as workers:
        engine.generate(prompts, steps)
    counts = workers[0]
    if not all(bool(count.any()) for count in counts):
        raise PatcherError("a router of the model was never called in decode")
    return statistics.mean(entropy_pct(count[None]) for count in counts)


def _layers(worker: Any) -> list[Any]:
    interface = importlib.import_module(_INTERFACE).MoERunnerInterface
    model = worker.model_runner.get_model()
    return [module for module in model.modules() if isinstance(module, interface)]


def _number_of_layers(worker: Any) -> int:
    return len(_layers(worker))


@contextmanager
def selecting(worker: Any, tokens: int) -> Iterator[list[torch.Tensor]]:
    """As `selections`, of all layers of a worker's model."""
    with selections(_layers(worker), tokens) as counts:
        yield counts


@contextmanager
def selections(layers: list[Any], tokens: int) -> Iterator[list[torch.Tensor]]:
    """Count how often each layer selects each of its experts.

    Args:
        layers: `MoERunner`s.
        tokens: only calls with so many tokens count: one of each sequence in decode.

    Yields:
        Of each layer, float32 of shape [experts] on the CPU.
    """
    counts = [torch.zeros(layer.moe_config.num_experts) for layer in layers]
    for layer, count in zip(layers, counts, strict=True):
        layer._apply_quant_method = _counting(layer, count, tokens)
    try:
        yield counts
    finally:
        for layer in layers:
            del layer._apply_quant_method


def _counting(layer: Any, count: torch.Tensor, tokens: int) -> Any:
    original = layer._apply_quant_method

    def apply(
        hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **more: Any
    ) -> Any:
        if len(router_logits) == tokens:
            _, selected = layer.router.select_experts(
                hidden_states, router_logits, input_ids=more.get("input_ids")
            )
            ids = selected.flatten().cpu().long()
            known = ids[(ids >= 0) & (ids < len(count))]  # others are no experts with weights
            count.add_(torch.bincount(known, minlength=len(count)))
        return original(hidden_states, router_logits, *args, **more)

    return apply
