"""Hugging Face transformers with its defaults: eager forward, dynamic cache, greedy decode."""

from __future__ import annotations

import gc
import importlib.metadata
import time
from inspect import signature
from typing import Any, ClassVar, cast

import torch
from packaging.version import Version

from patcher.bench.engines import (
    Decoding,
    Generation,
    entropy_pct,
    peak_memory_bytes,
    random_prompts,
)
from patcher.bench.engines.architecture import must_fit_cpu, text_config
from patcher.bench.engines.random_weights import spread_of
from patcher.bench.engines.upcast import blocks, offset_of, upcast_in_turn, wide_parts
from patcher.bench.errors import MissingError, UsageError
from patcher.bench.workload import Workload, fit_context, weights_id

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
        text = self.model.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        fit_context(workload, getattr(text, "max_position_embeddings", None))

    def prompts(self, seed: int) -> torch.Tensor:
        return random_prompts(self.workload, self.vocab_size, seed)

    @torch.inference_mode()
    def prefill(self, prompts: torch.Tensor) -> Decoding:
        tokens = prompts.to(self.device)
        self.synchronize()
        begin = time.perf_counter()
        output = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        self.synchronize()
        return Decoding(_cache_of(output), [token], time.perf_counter() - begin)

    @torch.inference_mode()
    def decode(self, decoding: Decoding, steps: int) -> None:
        cache, token = decoding.cache, decoding.picked[-1]
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            output = self.model(input_ids=token, **cache, use_cache=True)
            cache, token = _cache_of(output), output.logits[:, -1:].argmax(-1)
            decoding.picked.append(token)
        self.synchronize()
        decoding.cache = cache
        decoding.decode_s += time.perf_counter() - begin

    def release(self, decoding: Decoding) -> None:
        decoding.cache = None

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        decoding = self.prefill(prompts)
        self.decode(decoding, steps)
        return Generation(decoding.tokens(), decoding.prefill_s, decoding.decode_s)

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor, keep: int = 0) -> torch.Tensor:
        output = self.model(input_ids=tokens.to(self.device), use_cache=False, logits_to_keep=keep)
        return cast(torch.Tensor, output.logits.float().cpu())

    @torch.inference_mode()
    def reference_logits(self, tokens: torch.Tensor, keep: int = 0) -> tuple[torch.Tensor, str]:
        """Logits in higher precision: each block is upcast while it runs, and then cast back.

        Both casts are exact.
        """
        wide = torch.float64 if self.workload.dtype == "float32" else torch.float32
        with wide_parts(self.model, wide), upcast_in_turn(blocks(self.model), wide):
            output = self.model(
                input_ids=tokens.to(self.device), use_cache=False, logits_to_keep=keep
            )
        name = str(wide).removeprefix("torch.")
        return output.logits.cpu(), f"{name} upcast of the same weights"

    @torch.inference_mode()
    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        layers = [module for module in self.model.modules() if _takes_selections(module)]
        if not layers:
            return None
        counts = torch.zeros(len(layers), int(layers[0].num_experts))

        def hook(index: int) -> Any:
            def count(_module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
                picked = next((named[name] for name in _SELECTED & named.keys()), None)
                picked = args[1] if picked is None else picked
                if picked.shape[0] == prompts.shape[0]:  # decode: one row per sequence
                    counts[index] += torch.bincount(
                        picked.flatten().cpu(), minlength=counts.shape[1]
                    )[: counts.shape[1]]

            return count

        handles = [
            layer.register_forward_pre_hook(hook(index), with_kwargs=True)
            for index, layer in enumerate(layers)
        ]
        try:
            self.generate(prompts, steps)
        finally:
            for handle in handles:
                handle.remove()
        return entropy_pct(counts)

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
    import transformers
    from transformers.initialization import no_init_weights

    auto: Any = transformers.AutoModelForCausalLM
    dtype = getattr(torch, workload.dtype)
    if workload.weights == "random":
        config = text_config(workload.model)
        with torch.device(workload.device), no_init_weights():
            model = auto.from_config(config, dtype=dtype)
        _randomise(model, workload.seed)
    else:
        name = weights_id(workload)
        local = workload.weights == "local"
        try:
            model = auto.from_pretrained(name, dtype=dtype, local_files_only=local)
            model = model.to(workload.device)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot load weights of {name}: {str(error).splitlines()[0]}",
                "check the id or folder, or use --weights random",
            ) from error
    return model.eval()


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill a model with seeded normal weights, as in `engines.random_weights`.

    Norms are one and in float32, as `from_pretrained` loads them; where one is added to their
    weight, it is zero. Near-zero dummy weights would send every token to the same experts, and
    decode would read a fraction of the model. Buffers (rotary tables) are computed from the
    configuration and stay unchanged.
    """
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    spread = spread_of(name for name, _ in model.named_parameters())
    norms: dict[int, float] = {}
    for norm in model.modules():
        if type(norm).__name__.endswith("Norm"):
            for name, parameter in norm.named_parameters(recurse=False):
                parameter.data = torch.ones_like(parameter, dtype=torch.float32)
                norms[id(parameter)] = 1.0 if name == "weight" else 0.0
            if offset_of(norm):
                norms[id(norm.weight)] = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in norms:
            parameter.fill_(norms[id(parameter)])
        elif parameter.is_floating_point():
            parameter.normal_(0.0, spread[name], generator=generator)


_CACHES = ("past_key_values", "cache_params", "state")
"""What models call what they keep between steps: attention, Mamba, RWKV."""
_SELECTED = {"top_k_index", "router_indices"}
"""The arguments by which layers of experts get what the router selected."""


def _cache_of(output: Any) -> dict[str, Any]:
    """What a model keeps between steps, by the argument that takes it back.

    Raises:
        UsageError: it keeps nothing that is known here.
    """
    for name in _CACHES:
        if (found := getattr(output, name, None)) is not None:
            return {name: found}
    raise UsageError(
        f"{type(output).__name__} has none of {', '.join(_CACHES)}: what this model keeps between "
        "its steps is not known here",
        "serve it in vLLM: --engine vllm",
    )


def _takes_selections(module: Any) -> bool:
    """Whether a module computes the experts that a router selected for each row."""
    names = signature(module.forward).parameters.keys()
    return hasattr(module, "num_experts") and bool(_SELECTED & names)
