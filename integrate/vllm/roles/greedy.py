"""Greedy sampling, once a step: where each request of a batch takes its largest logit.

Model runner V1 calls `Sampler.greedy_sample`. Runner V2 samples by `gumbel_sample`, which adds no
noise for a temperature of 0; its `Sampler.sample` knows on the host which requests have that. A
step in which any request samples at random stays with the engine. Neither is recorded in a graph,
and an index is exact, whatever else is in a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_LOGITS = "vllm.model_executor.layers.logits_processor"
_V1 = "vllm.v1.sample.sampler"
_V2 = "vllm.v1.worker.gpu.sample.sampler"
_GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"


class GreedySampler(VllmPoint):
    """The samplers of both model runners. They are no layers: the one that counts is the last of a
    model, whose logits they are given."""

    name: ClassVar[str] = "sampler.greedy"
    op: ClassVar[str] = "sample_argmax"
    tells_tokens: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = (
        f"{_V1}:Sampler.greedy_sample",
        f"{_V2}:Sampler.sample",
        f"{_V2}:Sampler._sample_random",
        f"{_GUMBEL}:gumbel_sample",
        f"{_GUMBEL}:gumbel_block_argmax",
        f"{_GUMBEL}:gumbel_noised_argmax",
        "vllm.v1.worker.gpu.sample.states:SamplingStates.any_greedy",
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        for place in self._places().values():
            place.must_be_the_engines()
        return f"{_V1}.Sampler.greedy_sample and {_V2}.Sampler.sample"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_LOGITS).LogitsProcessor)

    def applies(self, layer: Any) -> str | None:
        return None

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        places = self._places()
        all_greedy: ContextVar[bool | None] = ContextVar("all_greedy", default=None)
        replacements = {
            "greedy_sample": _greedy_sample(places["greedy_sample"].original, kernel),
            "sample": _sample(places["sample"].original, all_greedy),
            "gumbel_sample": _gumbel_sample(places["gumbel_sample"].original, kernel, all_greedy),
        }
        for name, place in places.items():
            place.install(replacements[name])
            self._swaps.append(place)

    @staticmethod
    def _places() -> Mapping[str, AttributePatch]:
        second = sources.module(_V2)
        return {
            "greedy_sample": AttributePatch(sources.module(_V1).Sampler, "greedy_sample"),
            "sample": AttributePatch(second.Sampler, "sample"),
            "gumbel_sample": AttributePatch(second, "gumbel_sample"),
        }


def _chosen(kernel: Dispatcher, logits: torch.Tensor) -> torch.Tensor | None:
    """The index of each row's largest logit, int64 [rows]; None if the kernel does not take it."""
    output = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    return output if kernel(logits, output) else None


def _greedy_sample(original: Any, kernel: Dispatcher) -> Any:
    def greedy_sample(*given: torch.Tensor) -> torch.Tensor:
        logits = given[-1]  # the engine's is static: it may be called with a sampler before it
        chosen = _chosen(kernel, logits)
        if chosen is not None:
            return chosen
        found: torch.Tensor = original(logits)
        return found

    return greedy_sample


def _sample(original: Any, all_greedy: ContextVar[bool | None]) -> Any:
    place = list(inspect.signature(original).parameters).index("idx_mapping_np") - 1

    def sample(sampler: Any, *given: Any, **more: Any) -> Any:
        requests = given[place] if len(given) > place else more["idx_mapping_np"]
        temperatures = sampler.sampling_states.temperature.np[requests]
        before = all_greedy.set(bool((temperatures == 0.0).all()))
        try:
            return original(sampler, *given, **more)
        finally:
            all_greedy.reset(before)

    return sample


def _gumbel_sample(original: Any, kernel: Dispatcher, all_greedy: ContextVar[bool | None]) -> Any:
    reasons = kernel.book.reasons

    def gumbel_sample(logits: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        if all_greedy.get() is not True:
            reasons["a request that samples at random"] += 1
        elif any(more.get(name) is not None for name in _CACHES):
            reasons["logits that are kept for a draft"] += 1
        elif (chosen := _chosen(kernel, logits)) is not None:
            return chosen
        found: torch.Tensor = original(logits, *given, **more)
        return found

    return gumbel_sample


_CACHES = "logits_cache", "output_processed_logits"
