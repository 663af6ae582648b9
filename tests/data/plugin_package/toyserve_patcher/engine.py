"""toyserve as an engine that patcher measures: patches come and go in its loaded model."""

from __future__ import annotations

import copy
import time
from typing import ClassVar

import torch
from torch import Tensor
from toyserve.layers import Decoder

from patcher.bench import UsageError, Workload, preset
from patcher.bench.engines import Decoding, Generation, peak_memory_bytes, random_prompts


class ToyEngine:
    """One model in this process. See `patcher.bench.engines.Engine` for the methods."""

    in_process: ClassVar[bool] = True

    def __init__(self, workload: Workload) -> None:
        known = preset(workload.model)
        if known.architecture != "toyserve" or workload.device != "cpu":
            raise UsageError(
                f"toyserve does not serve {workload.model} on {workload.device}",
                "it serves presets of the architecture toyserve, on a CPU",
            )
        self.workload = workload
        if workload.threads is not None:
            torch.set_num_threads(workload.threads)
        sizes = known.config
        self.hidden, self.vocab_size = sizes["hidden_size"], sizes["vocab_size"]
        self.model: torch.nn.Module = Decoder(
            self.vocab_size, self.hidden, sizes["intermediate_size"], known.layers
        ).eval()
        generator = torch.Generator().manual_seed(workload.seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0.0, self.hidden**-0.5, generator=generator)

    def prompts(self, seed: int) -> Tensor:
        return random_prompts(self.workload, self.vocab_size, seed)

    @torch.inference_mode()
    def prefill(self, prompts: Tensor) -> Decoding:
        begin = time.perf_counter()
        logits, read = self.model(prompts, torch.zeros(len(prompts), self.hidden), 0)
        token = logits[:, -1:].argmax(-1)
        return Decoding((read, prompts.shape[1]), [token], time.perf_counter() - begin)

    @torch.inference_mode()
    def decode(self, decoding: Decoding, steps: int) -> None:
        (read, count), token = decoding.cache, decoding.picked[-1]
        begin = time.perf_counter()
        for _ in range(steps):
            logits, read = self.model(token, read, count)
            token, count = logits[:, -1:].argmax(-1), count + 1
            decoding.picked.append(token)
        decoding.decode_s += time.perf_counter() - begin
        decoding.cache = read, count

    def release(self, decoding: Decoding) -> None:
        decoding.cache = None

    def generate(self, prompts: Tensor, steps: int) -> Generation:
        decoding = self.prefill(prompts)
        self.decode(decoding, steps)
        return Generation(decoding.tokens(), decoding.prefill_s, decoding.decode_s)

    @torch.inference_mode()
    def logits(self, tokens: Tensor, keep: int = 0) -> Tensor:
        found, _ = self.model(tokens, torch.zeros(len(tokens), self.hidden), 0)
        logits: Tensor = found[:, -keep:].float()
        return logits

    @torch.inference_mode()
    def reference_logits(self, tokens: Tensor, keep: int = 0) -> tuple[Tensor, str]:
        wide = copy.deepcopy(self.model).double()
        found, _ = wide(tokens, torch.zeros(len(tokens), self.hidden).double(), 0)
        return found[:, -keep:], "float64 copy of the same weights"

    def routing_entropy_pct(self, prompts: Tensor, steps: int) -> float | None:
        return None  # it has no experts

    def synchronize(self) -> None:
        """Nothing runs beside this thread."""

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes("cpu")

    def close(self) -> None:
        del self.model
