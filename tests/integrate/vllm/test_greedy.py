"""Greedy sampling in the samplers of both of vLLM's model runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import config, needs_vllm, patched, shipped

from patcher.integrate.survey import survey

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

ROWS, VOCAB = 4, 1500


def logits() -> torch.Tensor:
    return torch.randn(ROWS, VOCAB + 4)[:, :VOCAB]  # a padded vocabulary


@feature("model runner V1", "right", "sampler.greedy")
def test_runner_v1_takes_the_kernel_and_else_the_engines_argmax(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import sampler

    monkeypatch.setattr(sampler, "current_platform", SimpleNamespace(is_cpu=lambda: False), False)
    given, kernel = logits(), shipped("sample_argmax", T=torch.float32, I=torch.int64)
    own = sampler.Sampler.greedy_sample(given)
    with patched("sampler.greedy", kernel):
        assert torch.equal(sampler.Sampler().greedy_sample(given), own)
        assert torch.equal(sampler.Sampler.greedy_sample(given), own)
        assert dict(kernel.book.calls) == {f"sample_argmax tokens=4 vocab={VOCAB} float32/int64": 2}
        assert torch.equal(sampler.Sampler.greedy_sample(given.double()), own)
        assert dict(kernel.book.fallbacks) == {"dtype float64/int64": 1}
    assert isinstance(vars(sampler.Sampler)["greedy_sample"], staticmethod)


class GumbelKernel:
    """In the place of vLLM's Triton kernel, which needs a GPU: noise where there is a
    temperature."""

    def __getitem__(self, grid: Any) -> Any:
        def run(local: torch.Tensor, _: int, top: torch.Tensor, *rest: Any, **more: Any) -> None:
            tensors = [each for each in rest if isinstance(each, torch.Tensor)]
            [given] = [each for each in tensors if each.dim() == 2]
            [temperature] = [
                each for each in tensors if each.dtype == torch.float32 and each is not given
            ]
            for row in range(len(given)):
                noise = temperature[row] * torch.arange(VOCAB)
                for block in range(local.shape[1]):
                    part = (given[row] + noise)[block * 1024 : (block + 1) * 1024]
                    top[row, block], where = part.max(0)
                    local[row, block] = block * 1024 + where

        return run


@feature("model runner V2", "right", "sampler.greedy")
def test_runner_v2_takes_the_kernel_where_every_request_is_greedy(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import inspect

    import numpy as np
    from vllm.v1.worker.gpu.sample import gumbel, sampler

    monkeypatch.setattr(gumbel, "_gumbel_sample_kernel", GumbelKernel())
    monkeypatch.setattr(gumbel.triton, "cdiv", lambda a, b: -(-a // b), raising=False)
    own = sampler.Sampler.__new__(sampler.Sampler)
    own.use_flashinfer = own.use_xpu_sampler = own.use_fp64_gumbel = False
    own.logprobs_mode = "raw_logprobs"
    own.apply_sampling_params = lambda given, *rest, **more: given
    temperature = np.zeros(ROWS, dtype=np.float32)
    versions = inspect.signature(sampler.apply_top_k_top_p).parameters
    own.sampling_states = SimpleNamespace(
        temperature=SimpleNamespace(np=temperature, gpu=torch.from_numpy(temperature)),
        seeds=SimpleNamespace(gpu=torch.zeros(ROWS, dtype=torch.int64)),
        get_top_k_top_p=lambda *_: (None,) * (3 if "has_topp_only_rows" in versions else 2),
        any_greedy=lambda requests: bool((temperature[requests] == 0).any()),
        any_explicit_seed=lambda _: False,
    )
    given, kernel = logits(), shipped("sample_argmax", T=torch.float32, I=torch.int64)
    named = {
        **{"logits": given, "idx_mapping_np": np.arange(ROWS), "return_logprobs": False},
        **dict.fromkeys(("idx_mapping", "expanded_idx_mapping", "pos"), torch.arange(ROWS)),
    }
    order = list(inspect.signature(sampler.Sampler.sample).parameters)[1:]

    def sample() -> torch.Tensor:
        sampled, processed = own.sample(*(named.get(name) for name in order))
        assert processed is given
        result: torch.Tensor = sampled
        return result

    greedy = sample()
    assert torch.equal(greedy, given.argmax(1))
    temperature[2] = 1.0
    mixed = sample()
    assert mixed[2] != greedy[2]
    with patched("sampler.greedy", kernel) as point:
        assert torch.equal(sample(), mixed)
        temperature[2] = 0.0
        assert torch.equal(sample(), greedy)
        # a draft model's own call is outside of a step's sampling
        own_call = {"temperature": torch.zeros(ROWS), "apply_temperature": False}
        if "is_drafting" in inspect.signature(gumbel.gumbel_sample).parameters:
            own_call["is_drafting"] = True
        rows = dict.fromkeys(("expanded_idx_mapping", "seed", "pos"), torch.arange(ROWS))
        assert torch.equal(sampler.gumbel_sample(given, **rows, **own_call), greedy)
        assert sum(kernel.book.calls.values()) == 1
        assert dict(kernel.book.fallbacks) == {"a request that samples at random": 2}
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        seen = survey(point, kernel.guards, [LogitsProcessor(VOCAB), torch.nn.Linear(2, 2)])
        assert (seen.taken, seen.total) == (1, 1)
    assert torch.equal(sample(), greedy)
