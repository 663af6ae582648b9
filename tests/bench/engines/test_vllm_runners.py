"""Forced tokens under both model runners of the real vLLM, on the CPU."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_here import needs_vllm

from patcher import bench
from patcher.bench.engines.vllm_logits import forcing, runner_kind

STEPS = Path(__file__).parents[2] / "support" / "vllm_v2_steps.py"
VOCAB = 31


def test_the_runner_is_told_by_what_it_has() -> None:
    assert runner_kind(SimpleNamespace(input_batch=None, sample=None)) == "V1"
    assert runner_kind(SimpleNamespace(sample=None)) == "V2"
    with pytest.raises(bench.VerificationError, match="neither of vLLM's model runners"):
        runner_kind(SimpleNamespace())


@needs_vllm
def test_runner_v2_decodes_the_forced_tokens() -> None:
    done = subprocess.run([sys.executable, str(STEPS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kind"] == "V2"
    prompts, forced = torch.tensor(found["prompts"]), torch.tensor(found["forced"])

    def after(tokens: torch.Tensor) -> list[int]:
        return ((tokens.sum(dim=1) * 7 + 3) % VOCAB).tolist()

    whole, logits = torch.cat([prompts, forced], dim=1), torch.tensor(found["logits"])
    for step in range(forced.shape[1]):
        assert logits[:, step].argmax(-1).tolist() == after(whole[:, : prompts.shape[1] + step])
    assert logits.max() == 1, "the sampler's forced logits are not those of the model"
    assert found["greedy"][0] == found["greedy"][1]
    free = torch.cat([prompts, torch.tensor(found["greedy"][0])], dim=1)
    assert free[:, -1].tolist() == after(free[:, :-1])
    assert found["left"] == []


@needs_vllm
def test_runner_v2_refuses_more_rows_than_requests() -> None:
    """As speculative decoding has them."""
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    runner = SimpleNamespace(model=model)

    def sample(hidden: torch.Tensor, batch: Any, grammar: Any) -> Any:
        model.compute_logits(hidden)
        return None, torch.ones(1), torch.zeros(1)

    runner.sample = sample
    batch = SimpleNamespace(req_ids=["patcher-0-a"])
    with (
        forcing(runner, torch.tensor([[1, 2]]), 0),
        pytest.raises(bench.PatcherError, match="one row for each request"),
    ):
        runner.sample(torch.zeros(2, VOCAB), batch, None)
    assert runner.sample is sample


@needs_vllm
def test_runner_v1_samples_the_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker import block_table, gpu_input_batch

    for module in (gpu_input_batch, block_table, inspect.getmodule(Sampler)):
        monkeypatch.setattr(module, "PIN_MEMORY", False, raising=False)
    offered = {
        "max_num_reqs": 5,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "device": torch.device("cpu"),
        "vocab_size": VOCAB,
        "block_sizes": [16],
        "kernel_block_sizes": [16],
        "max_num_blocks_per_req": [4],
    }
    known = inspect.signature(gpu_input_batch.InputBatch).parameters
    batch = gpu_input_batch.InputBatch(**{key: offered[key] for key in offered if key in known})
    for name in ("patcher-6-0a1b", "patcher-5-0a1b", "patcher-7-0a1b", "patcher-4-0a1b", "_warmup"):
        batch.add_request(
            gpu_input_batch.CachedRequestState(
                req_id=name,
                prompt_token_ids=[2, 3],
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0),
                generator=None,
                block_ids=([0],),
                num_computed_tokens=0,
                output_token_ids=[],
            )
        )
    batch.refresh_metadata()
    runner: Any = worker.GPUModelRunner.__new__(worker.GPUModelRunner)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    discarded = np.array([False, False, True, False, False])
    runner.model = SimpleNamespace(compute_logits=lambda hidden: hidden.clone())
    vars(runner).update(
        input_batch=batch,
        sampler=Sampler(),
        discard_request_mask=SimpleNamespace(np=discarded),
    )
    assert runner_kind(runner) == "V1"
    stock = logits.argmax(-1).tolist()
    with forcing(runner, torch.tensor([[7, 8], [9, 10], [11, 12]]), 5) as seen:
        for _ in range(3):
            computed = runner.model.compute_logits(logits)
            [*got] = runner._sample(computed, None).sampled_token_ids.flatten().tolist()
            if len(seen[0]) == 1:
                assert got == [9, 7, *stock[2:]], "unread, earlier, of others"
            elif len(seen[0]) == 2:
                assert got == [10, 8, *stock[2:]]
            else:
                assert got == stock, "after the last forced token"
    for index, row in ((0, 1), (1, 0)):
        assert all(each.equal(logits[row]) for each in seen[index])
    assert seen[2] == [], "its prompt is not complete yet"
