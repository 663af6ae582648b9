"""The head and the greedy choice as one kernel: logits that are never written.

`LogitsProcessor.forward` projects to the vocabulary, and a sampler chooses later: model runner V2
does both in its `sample`, runner V1 in two calls. In a step whose requests all want the largest
logit and nothing else, the head gives a `DeferredLogits`, and the sampler has the kernel choose.
Where anything reads the logits after all (a model that masks some, a grammar), they are computed
as before. The final norm runs in the compiled graph of the model, whose output other code reads,
too: it stays there.

The kernel sums in float32 and chooses before it rounds, the engine after; see the op's contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles import plain_sampling
from patcher.integrate.vllm.roles.deferred_logits import DeferredLogits
from patcher.integrate.vllm.swap import AttributePatch

_LOGITS = "vllm.model_executor.layers.logits_processor"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_UTILS = "vllm.model_executor.layers.utils"
_V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2_RUNNER = "vllm.v1.worker.gpu.model_runner"

READ = "logits that something else reads"

Wanted = Callable[[], str | None]
"""What the step that runs wants of its logits but the largest; see `plain_sampling`."""


class GreedyHead(VllmPoint):
    """The projection to the vocabulary and the argmax, in both model runners. The layer that counts
    is the one that computes a model's logits."""

    name: ClassVar[str] = "lm_head.greedy"
    op: ClassVar[str] = "lm_head_argmax"
    tells_tokens: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = (
        f"{_LOGITS}:LogitsProcessor.__init__",
        f"{_LOGITS}:LogitsProcessor.forward",
        f"{_LOGITS}:LogitsProcessor._apply_head",
        f"{_LOGITS}:LogitsProcessor._get_logits",
        f"{_EMBEDDING}:UnquantizedEmbeddingMethod.apply",
        f"{_UTILS}:dispatch_unquantized_gemm",
        f"{_UTILS}:default_unquantized_gemm",
        f"{_V1_RUNNER}:GPUModelRunner.execute_model",
        f"{_V1_RUNNER}:GPUModelRunner.sample_tokens",
        f"{_V1_RUNNER}:GPUModelRunner._sample",
        f"{plain_sampling.V1}:Sampler.forward",
        f"{plain_sampling.V1}:Sampler.apply_logits_processors",
        f"{plain_sampling.V1}:Sampler.sample",
        f"{plain_sampling.V1}:Sampler.greedy_sample",
        f"{_V2_RUNNER}:GPUModelRunner.sample",
        f"{plain_sampling.V2}:Sampler.add_request",
        f"{plain_sampling.V2}:Sampler.__call__",
        f"{plain_sampling.V2}:Sampler.apply_sampling_params",
        f"{plain_sampling.V2}:Sampler.sample",
        f"{plain_sampling.V2}:Sampler._sample_random",
        *plain_sampling.PARTS,
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        for place in self._places().values():
            place.must_be_the_engines()
        engine.must_allow_another("matmul")
        return f"{_LOGITS}.LogitsProcessor.forward and the samplers of both model runners"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_LOGITS).LogitsProcessor)

    def applies(self, layer: Any) -> str | None:
        if type(layer) is not sources.module(_LOGITS).LogitsProcessor:
            return f"logits by {type(layer).__name__}"
        if engine.serves_lora():
            return "LoRA"
        if layer.logits_as_input:
            return "logits that the model computes itself"
        if layer.soft_cap is not None or layer.scale != 1.0:
            return "logits that are capped or scaled"
        return None

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        places = self._places()
        wanted: ContextVar[Wanted | None] = ContextVar("wanted", default=None)
        original = {name: place.original for name, place in places.items()}
        replacements = {
            "head": self._head(original["head"], kernel, wanted),
            "v1 step": _v1_step(original["v1 step"], wanted),
            "v1 sampler": _v1_sampler(original["v1 sampler"], kernel),
            "v2 step": _v2_step(original["v2 step"], wanted),
            "v2 sampler": _v2_sampler(original["v2 sampler"], kernel),
        }
        for name, place in places.items():
            place.install(replacements[name])
            self._swaps.append(place)

    @staticmethod
    def _places() -> Mapping[str, AttributePatch]:
        module = sources.module
        return {
            "head": AttributePatch(module(_LOGITS).LogitsProcessor, "forward"),
            "v1 step": AttributePatch(module(_V1_RUNNER).GPUModelRunner, "execute_model"),
            "v1 sampler": AttributePatch(module(plain_sampling.V1).Sampler, "forward"),
            "v2 step": AttributePatch(module(_V2_RUNNER).GPUModelRunner, "sample"),
            "v2 sampler": AttributePatch(module(plain_sampling.V2).Sampler, "sample"),
        }

    def _head(self, original: Any, kernel: Dispatcher, wanted: ContextVar[Wanted | None]) -> Any:
        reasons = kernel.book.reasons

        def read() -> None:
            reasons[READ] += 1

        def forward(
            processor: Any, lm_head: Any, hidden_states: torch.Tensor, *rest: Any, **more: Any
        ) -> Any:
            def compute() -> Any:
                return original(processor, lm_head, hidden_states, *rest, **more)

            ask = wanted.get()
            if ask is None:  # no step's own call: a draft, log probabilities of a prompt, a trial
                return compute()
            reason = ask() or self.applies(processor)
            reason = reason or _unlike(processor, lm_head, hidden_states, (*rest, *more.values()))
            if reason is not None:
                reasons[reason] += 1
                return compute()
            weight = lm_head.weight.data[: processor.org_vocab_size]
            return DeferredLogits.of(hidden_states, weight, compute, read)

        return forward


def _unlike(
    processor: Any, lm_head: Any, hidden: torch.Tensor, rest: tuple[Any, ...]
) -> str | None:
    """Why a head's logits are no plain product with all of its weight; None if they are.

    Args:
        processor: the `LogitsProcessor`.
        lm_head: the head's layer.
        hidden: what it is given.
        rest: what else `forward` is given: a bias, and whether ranks keep their parts.
    """
    method = getattr(lm_head, "quant_method", None)
    if type(method) is not sources.module(_EMBEDDING).UnquantizedEmbeddingMethod:
        return f"weights by {type(method).__name__}"
    if engine.gemm_of(method) not in engine.plain_gemms():
        return "another matmul of linear_backend"
    if any(each is not None and each is not False for each in rest):
        return "a head with a bias"
    if lm_head.tp_size > 1:
        return "a vocabulary that ranks share"
    head_dtype = getattr(processor, "head_dtype", None)
    if head_dtype is not None and head_dtype != hidden.dtype:
        return "a head of another dtype"
    plain = hidden.dim() == 2 and lm_head.weight.dim() == 2
    return None if plain else "a head that is no matrix"


def _chosen(kernel: Dispatcher, logits: DeferredLogits) -> torch.Tensor | None:
    """The index of each row's largest logit, int64 [rows]; None if they were read, or if the kernel
    does not take them."""
    if not logits.untouched:
        return None
    hidden = logits.hidden
    output = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    return output if kernel(hidden, logits.weight, output) else None


def _v1_step(original: Any, wanted: ContextVar[Wanted | None]) -> Any:
    def execute_model(runner: Any, scheduler_output: Any, *given: Any, **more: Any) -> Any:
        def ask() -> str | None:  # once the step's requests are in the batch
            if scheduler_output.has_structured_output_requests:
                return plain_sampling.GRAMMAR
            if scheduler_output.scheduled_spec_decode_tokens:
                return plain_sampling.DRAFTS
            return plain_sampling.wanted_of_v1(runner.input_batch.sampling_metadata)

        before = wanted.set(ask)
        try:
            return original(runner, scheduler_output, *given, **more)
        finally:
            wanted.reset(before)

    return execute_model


def _v1_sampler(original: Any, kernel: Dispatcher) -> Any:
    module = sources.module(plain_sampling.V1)
    kind = module.Sampler

    def forward(
        sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *rest: Any, **more: Any
    ) -> Any:
        if isinstance(logits, DeferredLogits):
            # what the step wants may have changed since the head was called
            plain = type(sampler) is kind and not rest and not more
            reason = plain_sampling.wanted_of_v1(sampling_metadata)
            reason = reason or (None if plain else plain_sampling.ANOTHER)
            if reason is not None:
                kernel.book.reasons[reason] += 1
            elif (chosen := _chosen(kernel, logits)) is not None:
                return module.SamplerOutput(
                    sampled_token_ids=chosen.to(torch.int32).unsqueeze(-1), logprobs_tensors=None
                )
            logits = logits.compute()
        return original(sampler, logits, sampling_metadata, *rest, **more)

    return forward


def _v2_step(original: Any, wanted: ContextVar[Wanted | None]) -> Any:
    def sample(runner: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        def ask() -> str | None:
            return plain_sampling.wanted_of_v2(runner, input_batch, grammar_output)

        before = wanted.set(ask)
        try:
            return original(runner, hidden_states, input_batch, grammar_output)
        finally:
            wanted.reset(before)

    return sample


def _v2_sampler(original: Any, kernel: Dispatcher) -> Any:
    def sample(sampler: Any, logits: torch.Tensor, *given: Any, **more: Any) -> Any:
        if isinstance(logits, DeferredLogits):
            if (chosen := _chosen(kernel, logits)) is not None:
                return chosen, logits
            logits = logits.compute()
        return original(sampler, logits, *given, **more)

    return sample
