"""What the requests of a step want of its logits, beyond the largest of each row.

Both of vLLM's model runners know it on the host, before the logits are computed.
"""

from __future__ import annotations

from typing import Any

from patcher.integrate.vllm import sources

V1 = "vllm.v1.sample.sampler"
V2 = "vllm.v1.worker.gpu.sample.sampler"
_PROCESSORS = "vllm.v1.sample.logits_processor.builtin"

AT_RANDOM = "a request that samples at random"
CHANGED = "logits that a request changes"
LOGPROBS = "log probabilities"
GRAMMAR = "a grammar"
DRAFTS = "tokens of a draft"
ANOTHER = "another sampler"
NANS = "counts of NaN"
SPREAD = "sampling that ranks share"

PARTS = (
    f"{_PROCESSORS}:LogitBiasLogitsProcessor.apply",
    f"{_PROCESSORS}:MinTokensLogitsProcessor.apply",
    "vllm.v1.worker.gpu.sample.states:SamplingStates.add_request",
    "vllm.v1.worker.gpu.sample.states:SamplingStates.max_num_logprobs",
    "vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState.add_request",
    "vllm.v1.worker.gpu.sample.penalties:PenaltiesState.add_request",
    "vllm.v1.worker.gpu.sample.bad_words:BadWordsState.add_request",
)


def wanted_of_v1(metadata: Any) -> str | None:
    """What a step wants in model runner V1, by its `SamplingMetadata`; None for the largest."""
    if not metadata.all_greedy:
        return AT_RANDOM
    if metadata.max_num_logprobs is not None or metadata.logprob_token_ids:
        return LOGPROBS
    holder = metadata.thinking_budget_state_holder
    changed = (
        not metadata.no_penalties
        or metadata.allowed_token_ids_mask is not None
        or bool(metadata.bad_words_token_ids)
        or (holder is not None and holder.has_tracked_requests())
        or any(map(_may_change, metadata.logitsprocs.non_argmax_invariant))
    )
    return CHANGED if changed else None


def _may_change(processor: Any) -> bool:
    """Whether a processor may change logits in this step; one of a user always may."""
    module = sources.module(_PROCESSORS)
    if type(processor) is module.LogitBiasLogitsProcessor:
        return bool(processor.biases)
    if type(processor) is module.MinTokensLogitsProcessor:
        return bool(processor.min_toks)
    return True


def wanted_of_v2(runner: Any, batch: Any, grammar: Any) -> str | None:
    """What a step wants in model runner V2; None for the largest.

    Args:
        runner: the runner whose `sample` is called.
        batch: its `InputBatch`.
        grammar: its `GrammarOutput`; None for none.
    """
    sampler, requests = runner.sampler, batch.idx_mapping_np
    if getattr(runner, "batch_sharder", None) is not None:
        return SPREAD
    if type(sampler) is not sources.module(V2).Sampler:
        return ANOTHER
    if sampler.compute_nans:
        return NANS
    if batch.num_draft_tokens:
        return DRAFTS
    if grammar is not None:
        return GRAMMAR
    states = sampler.sampling_states
    if not (states.temperature.np[requests] == 0.0).all():
        return AT_RANDOM
    tokens = sampler.logprob_token_ids_state.max_num_token_ids(requests)
    none = sources.module(V2).NO_LOGPROBS
    if tokens or states.max_num_logprobs(requests) != none or _returns_mask(sampler):
        return LOGPROBS
    return CHANGED if _changes(sampler, requests) else None


def _returns_mask(sampler: Any) -> bool:
    return bool(getattr(sampler, "return_sampling_mask", False))


def _changes(sampler: Any, requests: Any) -> bool:
    """Whether a request has penalties, a bias, bad words, a budget or a processor of its own.

    From 0.28.0 on, the sampler keeps that; before, each kind of change does.
    """
    known = getattr(sampler, "needs_logits_processing", None)
    if known is not None:
        return bool(known[requests].any())
    kinds = (
        sampler.logit_bias_state.use_logit_bias,
        sampler.penalties_state.use_penalty,
        sampler.bad_words_state.num_bad_words.np,
    )
    return any(bool(kind[requests].any()) for kind in kinds)
