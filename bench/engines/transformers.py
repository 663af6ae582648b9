"""Hugging Face transformers with its defaults: eager forward, dynamic cache, greedy decode."""

from __future__ import annotations

import gc
import importlib.metadata
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from patcher.bench.engines.architecture import configuration
from patcher.bench.engines.random_weights import spread_of
from patcher.bench.errors import MissingError, UsageError
from patcher.bench.presets import presets
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
        self.vocab_size: int = self.model.config.vocab_size
        fit_context(workload, getattr(self.model.config, "max_position_embeddings", None))

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
        return Decoding(output.past_key_values, [token], time.perf_counter() - begin)

    @torch.inference_mode()
    def decode(self, decoding: Decoding, steps: int) -> None:
        cache, token = decoding.cache, decoding.picked[-1]
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            output = self.model(input_ids=token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            decoding.picked.append(token)
        self.synchronize()
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
        embedded = self.model.get_input_embeddings()(tokens.to(self.device)).to(wide)
        body = self.model.model
        with (
            _upcast_in_turn([*body.layers, body.norm, self.model.lm_head], wide),
            _wide_parts(self.model, wide),
        ):
            output = self.model(inputs_embeds=embedded, use_cache=False, logits_to_keep=keep)
        name = str(wide).removeprefix("torch.")
        return output.logits.cpu(), f"{name} upcast of the same weights"

    @torch.inference_mode()
    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        routers = [
            module
            for module in self.model.modules()
            if type(module).__name__.endswith("TopKRouter")
        ]
        if not routers:
            return None
        experts = routers[0].num_experts
        counts = torch.zeros(len(routers), experts)

        def hook(index: int) -> Any:
            def count(_module: Any, _args: Any, output: Any) -> None:
                if output[2].shape[0] == prompts.shape[0]:  # decode: one row per sequence
                    counts[index] += torch.bincount(output[2].flatten().cpu(), minlength=experts)

            return count

        handles = [
            router.register_forward_hook(hook(index)) for index, router in enumerate(routers)
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
    preset = presets().get(workload.model)
    if workload.device == "cpu" and preset and not preset.fits_cpu:
        raise MissingError(
            f"{preset.name} ({preset.parameters_b:g} billion parameters) does not fit a CPU",
            "run on a GPU host, read a profile with --from FILE, or try `patcher demo`",
        )


def _load_model(workload: Workload) -> Any:
    import transformers
    from transformers.initialization import no_init_weights

    auto: Any = transformers.AutoModelForCausalLM
    dtype = getattr(torch, workload.dtype)
    preset = presets().get(workload.model)
    if workload.weights == "random":
        if preset is not None:
            config = configuration(preset)
        else:
            config = transformers.AutoConfig.from_pretrained(workload.model)
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

    Norms are one and in float32, as `from_pretrained` loads them. Near-zero dummy weights would
    send every token to the same experts, and decode would read a fraction of the model. Buffers
    (rotary tables) are computed from the configuration and stay unchanged.
    """
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    spread = spread_of(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if "norm" in name.rsplit(".", 2)[-2]:
            parameter.data = torch.ones_like(parameter, dtype=torch.float32)
        elif parameter.is_floating_point():
            parameter.normal_(0.0, spread[name], generator=generator)


@contextmanager
def _upcast_in_turn(modules: list[Any], wide: torch.dtype) -> Iterator[None]:
    """Hold each module in `wide` only while it runs, which doubles the memory of one block only."""
    handles = []

    def widen(module: Any, _args: Any) -> None:
        module._patcher_dtypes = {name: p.dtype for name, p in module.named_parameters()}
        module.to(wide)

    def narrow(module: Any, _args: Any, _output: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(module._patcher_dtypes[name])
        del module._patcher_dtypes

    for module in modules:
        handles += [module.register_forward_pre_hook(widen), module.register_forward_hook(narrow)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _wide_parts(model: Any, wide: torch.dtype) -> Iterator[None]:
    """Keep norms and the grouped expert matmul in `wide`; both cast to a narrower dtype."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    experts = model.config._experts_implementation

    def wide_norm(norm: Any) -> Any:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.to(wide)
            scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            return cast(torch.Tensor, norm.weight.to(wide) * hidden * scale)

        return forward

    # an instance's own forward (a wrapper that somebody installed) is restored afterwards
    own = [norm.__dict__.get("forward") for norm in norms]
    for norm in norms:
        norm.forward = wide_norm(norm)
    model.config._experts_implementation = "eager"
    try:
        yield
    finally:
        model.config._experts_implementation = experts
        for norm, forward in zip(norms, own, strict=True):
            if forward is None:
                del norm.forward
            else:
                norm.forward = forward
