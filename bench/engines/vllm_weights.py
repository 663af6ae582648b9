"""vLLM's loader of random weights; see `patcher.bench.engines.served_weights`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from patcher.bench.engines.served_weights import LayerTypes, randomise
from patcher.bench.errors import UsageError

LOAD_FORMAT = "patcher_random"
RANDOM_WEIGHTS = "PATCHER_RANDOM_WEIGHTS"
"""Environment variable that makes a vLLM process register that format."""
_LAYERS = "vllm.model_executor.layers"


def refuse_dummy(arguments: Mapping[str, Any]) -> None:
    """Reject vLLM's dummy weights, whose speed is not representative.

    Raises:
        UsageError: the arguments select dummy weights.
    """
    if str(arguments.get("load_format")).rsplit(".", 1)[-1].lower() == "dummy":
        raise UsageError(
            "vLLM's dummy weights are near zero: all tokens pick the same experts, decode reads a "
            "fraction of the model, and the faster backend can even change",
            "use --weights random, whose routing is spread out",
        )


def register_loader() -> None:
    """Register the loader `LOAD_FORMAT` in vLLM's public registry. The plugin registers it in
    vLLM's other processes if `RANDOM_WEIGHTS` is set.
    """
    loading: Any = importlib.import_module("vllm.model_executor.model_loader")
    base: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader")

    class RandomLoader(base.BaseModelLoader):  # type: ignore[misc]  # vllm is untyped here
        def download_model(self, model_config: Any) -> None:
            """Do nothing: random weights need no download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            randomise(model, int(model_config.seed), layer_types())

    loading.register_model_loader(LOAD_FORMAT)(RandomLoader)


def layer_types() -> LayerTypes:
    """vLLM's classes."""
    embedding: Any = importlib.import_module(f"{_LAYERS}.vocab_parallel_embedding")
    linear: Any = importlib.import_module(f"{_LAYERS}.linear")
    layernorm: Any = importlib.import_module(f"{_LAYERS}.layernorm")
    return LayerTypes(
        embedding=embedding.VocabParallelEmbedding,
        head=embedding.ParallelLMHead,
        adds=linear.RowParallelLinear,
        gemma_norm=layernorm.GemmaRMSNorm,
    )
