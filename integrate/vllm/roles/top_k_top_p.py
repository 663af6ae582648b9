"""Sampling by top-k and top-p in model runner V1, where vLLM draws its noise with PyTorch.

`TopKTopPSampler.forward_native` filters, divides probabilities by exponential noise and takes the
largest: the op, with the noise as an input. The same numbers are drawn here, in the same order and
from each request's own generator, so that a seed gives what it gave. FlashInfer's sampler, the
default for requests without a seed, and runner V2 make their noise inside of their kernels: they
stay. Neither runner records its sampler in a graph.

Samplers are built before patches go in, with their `forward` bound. So the class gets a `__call__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_LOGITS = "vllm.model_executor.layers.logits_processor"
_OPS = "vllm.v1.sample.ops.topk_topp_sampler"
_SAMPLER = "TopKTopPSampler"
_CALL = "__call__"

FLASHINFER = "sampling by FlashInfer, which makes its own noise"
PROCESSED = "logits or log probabilities of what the filters keep"
RUNNER_V2 = "model runner V2 makes its noise from seeds, inside of its kernel"


class TopKTopPSampler(VllmPoint):
    """The sampler of model runner V1. It is no layer: the one that counts is the last of a model,
    whose logits it is given."""

    name: ClassVar[str] = "sampler.top_k_top_p"
    op: ClassVar[str] = "sample_top_k_top_p"
    tells_tokens: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = (
        "vllm.v1.sample.sampler:Sampler.sample",
        f"{_OPS}:{_SAMPLER}.__init__",
        f"{_OPS}:{_SAMPLER}.forward_cuda",
        f"{_OPS}:{_SAMPLER}.forward_native",
        f"{_OPS}:apply_top_k_top_p",
        f"{_OPS}:apply_top_k_top_p_pytorch",
        f"{_OPS}:empty_exponential_noise_like",
        f"{_OPS}:random_sample",
        f"{_OPS}:sample_with_exponential_noise",
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        place = self._place()
        if _CALL in vars(place.owner):  # the engine's own is that of every module
            raise VerificationError(
                f"{place.label} is already patched", "remove the other patch first"
            )
        engine.must_allow_another("sampler")
        return f"{_OPS}.{_SAMPLER}"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_LOGITS).LogitsProcessor)

    def applies(self, layer: Any) -> str | None:
        return RUNNER_V2 if engine.uses_runner_v2() else None

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = self._place()
        place.install(_replacement(place, kernel))
        self._swaps = [place]

    @staticmethod
    def _place() -> AttributePatch:
        return AttributePatch(getattr(sources.module(_OPS), _SAMPLER), _CALL)


def _replacement(place: AttributePatch, kernel: Dispatcher) -> Any:
    original, kind, ops = place.original, place.owner, sources.module(_OPS)

    def __call__(
        sampler: Any,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        reason = _unlike(sampler, kind, bool(generators) or (k is None and p is None))
        if reason is not None:
            kernel.book.reasons[reason] += 1
            found: tuple[torch.Tensor, torch.Tensor | None] = original(
                sampler, logits, generators, k, p
            )
            return found
        noise, (tokens, vocab) = _noise(logits, generators), logits.shape
        most = logits.new_full((tokens,), vocab, dtype=torch.int32) if k is None else k
        mass = logits.new_ones((tokens,), dtype=torch.float32) if p is None else p
        output = logits.new_zeros((tokens,), dtype=torch.int64)
        if kernel(logits, most, mass, noise, output):
            return output, None
        # the engine's own, with the noise that is drawn: a generator gives it once
        kept = ops.apply_top_k_top_p(logits, k, p)
        chosen: torch.Tensor = ops.sample_with_exponential_noise(
            kept.softmax(dim=-1, dtype=torch.float32), noise
        )
        return chosen, None

    return __call__


def _noise(logits: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """What vLLM's `random_sample` draws: exponential, float32 [tokens, vocab]."""
    noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(generators) != len(noise):
        noise.exponential_()
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    return noise


def _unlike(sampler: Any, kind: Any, filters_alone: bool) -> str | None:
    """Why a call is not one of the contract; None if it is.

    Args:
        sampler: a `TopKTopPSampler`.
        kind: that class.
        filters_alone: whether vLLM leaves the call to PyTorch, though it has FlashInfer.
    """
    forward = getattr(sampler.forward, "__func__", None)
    if forward is kind.forward_cuda:
        if not filters_alone:
            return FLASHINFER
    elif forward is not kind.forward_native:
        return f"sampling by {getattr(forward, '__name__', 'other code')}"
    if sampler.logprobs_mode.startswith("processed"):
        return PROCESSED
    if sampler.use_fp64_gumbel:
        return "noise in float64"
    return "hooks" if sampler._forward_hooks or sampler._forward_pre_hooks else None
