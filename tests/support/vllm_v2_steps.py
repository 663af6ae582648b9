"""Forced tokens under the real model runner V2 of vLLM, on the CPU: prints what came of it as JSON.

A program of its own: Triton interprets the runner's kernels only in a process where that was set
before vLLM was imported. Real are `GPUModelRunner.sample` and `postprocess_sampled`, the sampler,
the requests' state and the batch. Doubles: pinned memory, which needs a GPU, and the model, whose
logits are a function of all tokens that the runner wrote down for a request.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # Triton without a driver

import numpy as np
import torch
import vllm_doubles  # noqa: F401
from vllm.config import DeviceConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils import torch_utils
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from patcher.bench.engines import Decoding, Generation
from patcher.bench.engines.vllm_logits import runner_kind, served_logits

VOCAB, PROMPT, BATCH, LONGEST = 31, 5, 3, 64
BUDGET = 7
"""Prompt tokens read in a step, so that some requests get no token in it."""


class Unpinned(ModuleType):
    """PyTorch, but memory is not pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 7 + 3) % VOCAB


class Model:
    def compute_logits(self, sums: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((sums * 7 + 3) % VOCAB, VOCAB).bfloat16()


def taken(function: Any, **offered: Any) -> Any:
    """Call a function with those of the arguments that it has in this version."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in offered.items() if name in known})


class Engine:
    """Schedules requests, each in steps of the real runner."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        self.state = RequestState(BATCH, LONGEST, 32, 0, VOCAB, cpu)
        sampler = taken(
            Sampler,
            vllm_config=VllmConfig(device_config=DeviceConfig(device="cpu")),
            max_num_reqs=BATCH,
            vocab_size=VOCAB,
            device=cpu,
            req_states=self.state,
        )
        self.runner: Any = GPUModelRunner.__new__(GPUModelRunner)
        parts = {
            "model": Model(),
            "sampler": sampler,
            "req_states": self.state,
            "is_last_pp_rank": True,
            "model_state": SimpleNamespace(postprocess_state=lambda *_: None),
            "batch_sharder": None,
            "rejection_sampler": None,
        }
        vars(self.runner).update(parts)
        self.worker = SimpleNamespace(model_runner=self.runner, is_driver_worker=True)
        self.requests = 0
        self.computed: dict[str, int] = {}

    def on_workers(self, function: Any, *arguments: Any) -> list[Any]:
        return [function(self.worker, *arguments)]

    def prefill(self, prompts: torch.Tensor) -> Decoding:
        names = []
        for prompt in prompts.tolist():
            names.append(f"patcher-{self.requests}-0a1b2c3d")
            self.requests += 1
            self.computed[names[-1]] = 0
            taken(
                self.state.add_request,
                req_id=names[-1],
                prompt_len=PROMPT,
                all_token_ids=prompt,
                num_computed_tokens=0,
                max_tokens=LONGEST - PROMPT,
            )
            taken(
                self.runner.sampler.add_request,
                req_idx=self.state.req_id_to_index[names[-1]],
                prompt_len=PROMPT,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=20),
            )
        self.state.apply_staged_writes()
        self.runner.sampler.apply_staged_writes()
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while not all(tokens.values()):
            self.step(tokens)
        return Decoding(tokens, [self.column(tokens, 0)], 0.0)

    def decode(self, decoding: Decoding, steps: int) -> None:
        goal = len(decoding.picked) + steps
        while min(map(len, decoding.cache.values())) < goal:
            self.step(decoding.cache)
        decoding.picked += [self.column(decoding.cache, i) for i in range(goal - steps, goal)]

    def release(self, decoding: Decoding) -> None:
        for name in decoding.cache:
            self.state.remove_request(name)

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        decoding = self.prefill(prompts)
        self.decode(decoding, steps)
        self.release(decoding)
        return Generation(decoding.tokens(), 0.0, 0.0)

    @staticmethod
    def column(tokens: dict[str, list[int]], index: int) -> torch.Tensor:
        return torch.tensor([[each[index]] for each in tokens.values()])

    def step(self, tokens: dict[str, list[int]]) -> None:
        left, scheduled = BUDGET, {}
        for name in sorted(tokens, reverse=True):  # not in the order in which they came
            unread = max(PROMPT - self.computed[name], 0)
            count = min(unread, left) if unread else 1
            left -= count if unread else 0
            if count:
                scheduled[name] = count
        names = list(scheduled)
        rows = np.array([self.state.req_id_to_index[name] for name in names])
        counts = np.array([*scheduled.values()], dtype=np.int32)
        made = InputBatch.make_dummy(len(names), int(counts.sum()), InputBuffers(8, 64, "cpu"))
        mapping = torch.from_numpy(rows)
        starts = torch.from_numpy(np.concatenate([[0], counts.cumsum()])).int()
        computed = np.array([self.computed[name] for name in names], dtype=np.int32)
        lengths = torch.from_numpy(computed + counts)
        batch = replace(
            made,
            req_ids=names,
            idx_mapping=mapping,
            idx_mapping_np=rows,
            expanded_idx_mapping=mapping,
            num_scheduled_tokens=counts,
            query_start_loc=starts,
            query_start_loc_np=starts.numpy(),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            logits_indices=starts[1:].long() - 1,
        )
        known = self.state.all_token_ids.gpu
        totals = self.state.total_len.gpu
        hidden = torch.zeros(int(counts.sum()), dtype=torch.long)
        for row, place in enumerate(batch.logits_indices.tolist()):
            hidden[place] = known[rows[row], : totals[rows[row]]].sum()
        with torch.inference_mode():
            output, num_sampled, num_rejected = self.runner.sample(hidden, batch, None)
            self.runner.postprocess_sampled(
                batch.idx_mapping, output.sampled_token_ids, num_sampled, num_rejected, starts
            )
        for row, name in enumerate(names):
            self.computed[name] += int(counts[row])
            got = output.sampled_token_ids[row, : num_sampled[row]].tolist()
            tokens[name] += got
            if got:  # what the next step begins with
                assert self.state.last_sampled_tokens[rows[row]].tolist() == got


def main() -> None:
    buffer_utils.torch = Unpinned("torch")
    torch_utils.PIN_MEMORY = False
    buffer_utils.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    engine = Engine()
    prompts = torch.randint(0, VOCAB, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    before = engine.generate(prompts, 3).tokens
    forced = torch.tensor([[4, 9, 1, 30], [0, 0, 2, 8], [5, 6, 7, 8]])
    logits = served_logits(engine, prompts, forced)
    after = engine.generate(prompts, 3).tokens
    json.dump(
        {
            "kind": runner_kind(engine.runner),
            "prompts": prompts.tolist(),
            "greedy": [before.tolist(), after.tolist()],
            "forced": forced.tolist(),
            "logits": logits.tolist(),
            "left": [name for name in ("sample",) if name in vars(engine.runner)]
            + list(vars(engine.runner.model)),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
