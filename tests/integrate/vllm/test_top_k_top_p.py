"""Sampling by top-k and top-p in vLLM's model runner V1: the same tokens from the same seeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import config, needs_vllm, patched, shipped

from patcher.bench import VerificationError
from patcher.integrate.survey import survey
from patcher.integrate.vllm import engine
from patcher.integrate.vllm.points import POINTS
from patcher.integrate.vllm.roles.top_k_top_p import FLASHINFER, PROCESSED, RUNNER_V2

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

POINT = "sampler.top_k_top_p"
ROWS, VOCAB, SEEDS = 6, 700, 12
K = torch.tensor([VOCAB, 1, 5, 40, VOCAB, 300], dtype=torch.int32)
P = torch.tensor([0.9, 1.0, 0.5, 1.0, 1.0, 0.05])
LABEL = f"sample_top_k_top_p tokens={ROWS} vocab={VOCAB} float32/int32/int64"


def logits() -> torch.Tensor:
    return 3 * torch.randn(ROWS, VOCAB + 4)[:, :VOCAB]  # a padded vocabulary


def kernel_of() -> Any:
    return shipped("sample_top_k_top_p", F=torch.float32, I=torch.int32, J=torch.int64)


@pytest.fixture
def ops(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the sampler, with vLLM's filters in PyTorch: those in Triton need a GPU."""
    from vllm.v1.sample.ops import topk_topp_sampler as found

    monkeypatch.setattr(found, "HAS_TRITON", False)
    return found


def sampler_of(ops: Any, forward: str = "forward_native", **settings: Any) -> Any:
    """A sampler as vLLM builds it on a GPU, with or without FlashInfer."""
    made = ops.TopKTopPSampler(**settings)
    made.forward = getattr(made, forward)
    return made


def draws(
    sampler: Any,
    given: torch.Tensor,
    k: torch.Tensor | None = K,
    p: torch.Tensor | None = P,
    seeded: tuple[int, ...] = (),
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What some seeds give, each with the state of all generators after."""
    found = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        generators = {row: torch.Generator().manual_seed(100 * seed + row) for row in seeded}
        tokens, _ = sampler(given.clone(), generators, k, p)
        states = [torch.get_rng_state(), *(each.get_state() for each in generators.values())]
        found.append((tokens, torch.cat(states)))
    return found


def assert_equal(
    mine: list[tuple[torch.Tensor, torch.Tensor]], own: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for one, other in zip(mine, own, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1]), "the generators' states"


@feature("model runner V1", "right", POINT)
@pytest.mark.parametrize(
    ("k", "p"), [(K, P), (K, None), (None, P), (None, None)], ids=["both", "k", "p", "none"]
)
def test_the_kernel_gives_the_tokens_that_vllm_draws(
    ops: Any, k: torch.Tensor | None, p: torch.Tensor | None
) -> None:
    sampler, given, kernel = sampler_of(ops), logits(), kernel_of()
    own = draws(sampler, given, k, p)
    assert len({tuple(tokens.tolist()) for tokens, _ in own}) > 1, "it draws"
    with patched(POINT, kernel):
        assert_equal(draws(sampler, given, k, p), own)
    assert dict(kernel.book.calls) == {LABEL: SEEDS}
    assert not kernel.book.fallbacks
    assert_equal(draws(sampler, given, k, p), own)
    assert dict(kernel.book.calls) == {LABEL: SEEDS}


@feature("requests with seeds of their own", "right", POINT)
@pytest.mark.parametrize("seeded", [(2,), (0, 3, 5), tuple(range(ROWS))])
def test_a_seed_of_a_request_gives_what_it_gave(ops: Any, seeded: tuple[int, ...]) -> None:
    given, kernel = logits(), kernel_of()
    # vLLM leaves such calls to PyTorch, though it has FlashInfer
    for sampler in (sampler_of(ops), sampler_of(ops, "forward_cuda")):
        own = draws(sampler, given, seeded=seeded)
        with patched(POINT, kernel):
            assert_equal(draws(sampler, given, seeded=seeded), own)
            # where the kernel refuses, nothing is drawn twice
            assert_equal(draws(sampler, given, K.long(), seeded=seeded), own)
    assert dict(kernel.book.calls) == {LABEL: 2 * SEEDS}
    assert dict(kernel.book.fallbacks) == {"dtype float32/int64/int64": 2 * SEEDS}


@feature("FlashInfer's sampler", "falls back", POINT)
def test_what_flashinfer_samples_is_left_to_it(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, given, kernel = sampler_of(ops, "forward_cuda"), logits(), kernel_of()
    theirs = torch.arange(ROWS)
    monkeypatch.setattr(ops, "flashinfer_sample", lambda *given, **more: theirs)
    with patched(POINT, kernel):
        for k, p in ((K, P), (K, None), (None, P)):
            assert sampler(given.clone(), {}, k, p)[0] is theirs
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {FLASHINFER: 3}
        # what it does not filter is PyTorch's
        sampler(given.clone(), {}, None, None)
        assert dict(kernel.book.calls) == {LABEL: 1}


@feature("log probabilities of processed logits", "falls back", POINT)
@feature("noise in float64", "falls back", POINT)
def test_other_samplers_are_the_engines_own_and_counted(ops: Any) -> None:
    given, kernel = logits(), kernel_of()
    modes = "processed_logits", "processed_logprobs"
    samplers = [
        *(sampler_of(ops, logprobs_mode=mode) for mode in modes),
        sampler_of(ops, use_fp64_gumbel=True),
        sampler_of(ops),
    ]
    samplers[-1].register_forward_hook(lambda *_: None)
    own = [draws(each, given) for each in samplers]
    with patched(POINT, kernel):
        for sampler, expected in zip(samplers, own, strict=True):
            assert_equal(draws(sampler, given), expected)
        kept = samplers[0](given.clone(), {}, K, P)[1]
        assert kept is not None
        assert kept[1].isfinite().sum() == 1
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {
        PROCESSED: 2 * SEEDS + 1,
        "noise in float64": SEEDS,
        "hooks": SEEDS,
    }


def test_a_sampler_of_another_device_is_the_engines_own(ops: Any) -> None:
    sampler, given, kernel = sampler_of(ops), logits(), kernel_of()
    answer = torch.zeros(ROWS, dtype=torch.int64), None

    def forward_other(self: Any, *given: Any) -> Any:
        return answer

    sampler.forward = forward_other.__get__(sampler)
    with patched(POINT, kernel):
        assert sampler(given, {}, K, P) is answer
        sampler.forward = lambda *given: answer
        assert sampler(given, {}, K, P) is answer
    assert dict(kernel.book.fallbacks) == {
        "sampling by forward_other": 1,
        "sampling by other code": 1,
    }


@feature("greedy and random requests in one batch", "right", POINT)
def test_vllms_sampler_comes_to_it_though_it_was_built_before(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import sampler as module

    monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: False), False)
    whole, given, kernel = module.Sampler(), logits(), kernel_of()
    whole.topk_topp_sampler.forward = whole.topk_topp_sampler.forward_native
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.3, 0.0, 0.9])
    metadata = SimpleNamespace(
        **{"all_greedy": False, "all_random": False, "temperature": temperature},
        **{"generators": {}, "top_k": K, "top_p": P, "max_num_logprobs": None},
        logitsprocs=SimpleNamespace(argmax_invariant=[]),
    )

    def sample() -> torch.Tensor:
        torch.manual_seed(3)
        tokens: torch.Tensor = whole.sample(given.clone(), metadata)[0]
        return tokens

    own = sample()
    with patched(POINT, kernel):
        assert torch.equal(sample(), own)
    assert dict(kernel.book.calls) == {LABEL: 1}
    assert torch.equal(own[[1, 4]], given[[1, 4]].argmax(1))
    assert "__call__" not in vars(ops.TopKTopPSampler)


@feature("model runner V2", "falls back", POINT)
def test_runner_v2_is_left_to_the_engine(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    kernel, layers = kernel_of(), [LogitsProcessor(VOCAB), torch.nn.Linear(2, 2)]
    with patched(POINT, kernel) as point:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        assert survey(point, kernel.guards, layers).taken == 1
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        seen = survey(point, kernel.guards, layers)
        assert (seen.taken, dict(seen.refused)) == (0, {RUNNER_V2: 1})


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_where_batches_must_not_matter_it_stays_out(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "batch_invariant", lambda: True)
    with pytest.raises(VerificationError, match="requires vLLM's own sampler"):
        POINTS[POINT]().find()
