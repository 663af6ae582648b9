"""Hugging Face transformers with its defaults: eager forward, dynamic cache, greedy decode."""

from __future__ import annotations

import gc
import importlib.metadata
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from packaging.version import Version

from patcher.bench.engines import (
    Decoding,
    Generation,
    causal_model,
    entropy_pct,
    peak_memory_bytes,
    random_prompts,
)
from patcher.bench.engines.architecture import must_fit_cpu
from patcher.bench.engines.expert_selection import selections
from patcher.bench.engines.higher_precision import blocks_of, nothing_narrows, upcast_in_turn
from patcher.bench.errors import MissingError, PatcherError, UsageError
from patcher.bench.workload import Workload, fit_context

OLDEST = Version("5.17")


class TransformersEngine:
    """One model in this process. See `patcher.bench.engines.Engine` for the methods."""

    in_process: ClassVar[bool] = True

    def __init__(self, workload: Workload) -> None:
        _check_machine(workload)
        self.workload = workload
        self.device = torch.device(workload.device)
        if workload.threads is not None:
            torch.set_num_threads(workload.threads)
        self.model = _load_model(workload)
        text = self.model.config.get_text_config(decoder=True)
        self.vocab_size: int = text.vocab_size
        fit_context(workload, getattr(text, "max_position_embeddings", None))
        self._decoded = False

    @staticmethod
    def check_model(workload: Workload) -> None:
        """See `patcher.bench.engines.causal_model.check_model`."""
        _check_machine(workload)
        causal_model.check_model(workload)

    def prompts(self, seed: int) -> torch.Tensor:
        return random_prompts(self.workload, self.vocab_size, seed)

    @torch.inference_mode()
    def prefill(self, prompts: torch.Tensor) -> Decoding:
        tokens = prompts.to(self.device)
        self.synchronize()
        begin = time.perf_counter()
        with self._first():
            output = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1)
            token = output.logits[:, -1:].argmax(-1)
            self.synchronize()
            took_s = time.perf_counter() - begin
            if not self._decoded and output.logits.isnan().any():
                raise UsageError(
                    f"the logits of {self.workload.model} are not numbers",
                    "check its config.json and its weights, or give another --dtype",
                )
        return Decoding(self._state(output), [token], took_s)

    @torch.inference_mode()
    def decode(self, decoding: Decoding, steps: int) -> None:
        state, token = decoding.cache, decoding.picked[-1]
        self.synchronize()
        begin = time.perf_counter()
        with self._first():
            for _ in range(steps):
                output = self.model(input_ids=token, use_cache=True, **state)
                token = output.logits[:, -1:].argmax(-1)
                decoding.picked.append(token)
            self.synchronize()
        self._decoded = True
        decoding.decode_s += time.perf_counter() - begin

    @contextmanager
    def _first(self) -> Iterator[None]:
        """Until it has decoded once, which is before anything is measured, what transformers raises
        is said in one sentence: what it builds may not run.

        Raises:
            UsageError: the model does not run.
        """
        if self._decoded:
            yield
            return
        with causal_model.refused(f"run {self.workload.model}, a {type(self.model).__name__}"):
            yield

    def _state(self, output: Any) -> dict[str, Any]:
        """What the next step is given, by name: keys and values, or Mamba's state."""
        from transformers.generation.utils import ALL_CACHE_NAMES

        name = next((name for name in ALL_CACHE_NAMES if output.get(name) is not None), None)
        if name is None:
            raise UsageError(
                f"{type(self.model).__name__} keeps nothing between steps, so it does not decode",
                "give a causal language model; one like BERT needs is_decoder in its config.json",
            )
        return {name: output[name]}

    def release(self, decoding: Decoding) -> None:
        decoding.cache = None

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        decoding = self.prefill(prompts)
        self.decode(decoding, steps)
        return Generation(decoding.tokens(), decoding.prefill_s, decoding.decode_s)

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor, keep: int = 0) -> torch.Tensor:
        output = self.model(input_ids=tokens.to(self.device), use_cache=False, logits_to_keep=keep)
        return cast(torch.Tensor, output.logits[:, -keep:].float().cpu())

    @torch.inference_mode()
    def reference_logits(self, tokens: torch.Tensor, keep: int = 0) -> tuple[torch.Tensor, str]:
        """Logits in higher precision: each block is upcast, exactly, while it runs."""
        wide = torch.float64 if self.workload.dtype == "float32" else torch.float32
        # tokens, not what is embedded of them: some models route by the token, too
        ids, blocks = tokens.to(self.device), blocks_of(self.model)
        embedding = self.model.get_input_embeddings()
        widen = embedding.register_forward_hook(lambda *call: call[-1].to(wide))
        try:
            with upcast_in_turn(blocks, wide), nothing_narrows(self.model, wide):
                output = self.model(input_ids=ids, use_cache=False, logits_to_keep=keep)
        finally:
            widen.remove()
        name = str(wide).removeprefix("torch.")
        return output.logits[:, -keep:].cpu(), f"{name} upcast of the same weights"

    @torch.inference_mode()
    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        """See `patcher.bench.engines.Measurable`; experts are told which of them a token goes to.

        Where none are, it is None: in Llama 4 each expert computes every token.
        """
        layers = [
            module
            for module in self.model.modules()
            if type(module).__name__.endswith("Experts") and hasattr(module, "num_experts")
        ]
        if not layers:
            return None
        with selections(layers, prompts.shape[0]) as counts:
            self.generate(prompts, steps)
        told = [count for count in counts if count is not None]
        if not all(bool(count.any()) for count in told):
            raise PatcherError("experts of the model were never called in decode")
        return statistics.mean(entropy_pct(count[None]) for count in told) if told else None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.device.type)

    def close(self) -> None:
        del self.model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _check_machine(workload: Workload) -> None:
    try:
        version = Version(importlib.metadata.version("transformers"))
    except importlib.metadata.PackageNotFoundError:
        raise MissingError(
            "transformers is not installed", "pip install 'transformers>=5.17'"
        ) from None
    if version < OLDEST:
        raise MissingError(
            f"transformers {version} is older than {OLDEST}", "pip install 'transformers>=5.17'"
        )
    if workload.device == "cuda" and not torch.cuda.is_available():
        raise MissingError(
            "no CUDA device for this workload", "run it on a GPU host, or use --device cpu"
        )
    if workload.device == "cpu":
        must_fit_cpu(workload.model)


def _load_model(workload: Workload) -> Any:
    if workload.weights == "random":
        return causal_model.random_model(workload).eval()
    return causal_model.loaded_model(workload).eval()
