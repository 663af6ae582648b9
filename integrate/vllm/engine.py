"""What differs between versions of vLLM, asked of the one that is installed.

Each function looks at what the engine has: an attribute, a number of axes. No other file of this
package depends on a version, and none compares version numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from patcher.bench import VerificationError
from patcher.integrate.vllm import sources

_UTILS = "vllm.model_executor.layers.utils"

AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""x and residual [tokens, hidden], both written in place; weight [hidden]; epsilon."""


def kv_caches(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The key and the value cache of a layer as views of FlashAttention's one tensor.

    Args:
        cache: [blocks, 2, block_size, kv_heads, head_dim], or, from vLLM 0.26.0 on, packed
            [blocks, kv_heads, block_size, 2 * head_dim]; any strides.
        head_dim: elements of one head; that of keys is that of values.

    Returns:
        Both as [blocks, block_size, kv_heads, head_dim] without a copy; None if the cache is
        neither, as before vLLM allocates it.
    """
    if cache.dim() == 5 and cache.shape[1] == 2 and cache.shape[4] == head_dim:
        return cache[:, 0], cache[:, 1]
    if cache.dim() == 4 and cache.shape[3] == 2 * head_dim:
        both = cache.transpose(1, 2)
        return both[..., :head_dim], both[..., head_dim:]
    return None


def window_of(impl: Any, metadata: Any) -> int:
    """How many of the last tokens a layer with FlashAttention attends to; 0 for all.

    Args:
        impl: the layer's `FlashAttentionImpl`.
        metadata: of the step; until 0.26.0 its window goes over the layer's.
    """
    window = getattr(metadata, "sliding_window", None) or impl.sliding_window
    return int(window[0]) + 1


def records_mixed_steps() -> bool:
    """Whether attention is in CUDA graphs that also serve steps of prefill and decode together."""
    config = _compilation()
    if config is None or config.cudagraph_mode is None:
        return False
    modes = sources.module("vllm.config.compilation").CUDAGraphMode
    return bool(config.cudagraph_mode.mixed_mode() == modes.FULL)


def must_not_record_mixed_steps() -> None:
    """Refuse an engine for which `records_mixed_steps`.

    Raises:
        VerificationError: it records them.
    """
    if records_mixed_steps():
        raise VerificationError(
            "cudagraph_mode FULL replays one graph for decode and for mixed steps",
            "take FULL_AND_PIECEWISE, vLLM's default, or revert the patch",
        )


def calculates_kv_scales(attention: Any) -> bool:
    """Whether an `Attention` layer measures the scales of its KV cache; gone in 0.28.0."""
    return _is_set(attention, "calculate_kv_scales")


def bypasses_kv_update(attention: Any) -> bool:
    """Whether the model writes the layer's KV cache itself, before attention (from 0.33.0 on)."""
    return _is_set(attention, "kv_cache_update_bypass")


def _is_set(layer: Any, name: str) -> bool:
    """Whether an attribute is true that a layer may lack, without a module's costly `getattr`."""
    return bool(vars(layer).get(name, getattr(type(layer), name, False)))


def engines_add_norm() -> AddNorm:
    """vLLM's residual add + RMSNorm in place: its C kernel, or PyTorch where that cannot run.

    The C kernel is that of `vllm._custom_ops`, not of vLLM IR, which 0.34 drops. It trusts its
    caller, so tensors of other shapes, dtypes or devices go to PyTorch, which checks them.
    """
    custom_ops = sources.module("vllm._custom_ops")
    built_in = hasattr(torch.ops._C, "fused_add_rms_norm")

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
        alike = x.shape == residual.shape and x.dtype == residual.dtype == weight.dtype
        if built_in and alike and x.is_cuda and residual.is_contiguous():
            custom_ops.fused_add_rms_norm(x, residual, weight, epsilon)
            return
        total = x.float() + residual.float()
        scale = torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + epsilon)
        residual.copy_(total)
        x.copy_((total * scale).to(weight.dtype) * weight)

    return run


Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""x [rows, hidden] and weight [hidden], both read; output [rows, hidden]; epsilon."""


def engines_norm() -> Norm:
    """vLLM's RMSNorm of rows: its C kernel, or PyTorch where that cannot run."""
    custom_ops = sources.module("vllm._custom_ops")
    built_in = hasattr(torch.ops._C, "rms_norm")

    def run(x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, epsilon: float) -> None:
        if built_in and x.is_cuda and x.dtype == weight.dtype:
            custom_ops.rms_norm(output, x, weight, epsilon)
        else:
            norm_in_pytorch(x, weight, output, epsilon)

    return run


def norm_in_pytorch(
    x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, epsilon: float
) -> None:
    """RMSNorm with the roundings of vLLM's: to the weight's dtype, before it multiplies."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    output.copy_(scaled.to(weight.dtype) * weight)


def splits_sequences() -> bool:
    """Whether sequence parallelism is on (`enable_sp`, until 0.28.0): its pass gives each rank its
    share of the residual between vLLM's own norms, which it knows by their operator.
    """
    return bool(passes_on(["enable_sp"]))


def must_not_split_sequences() -> None:
    """Refuse an engine whose pass must find vLLM's own norms.

    Raises:
        VerificationError: sequence parallelism is on.
    """
    if splits_sequences():
        raise VerificationError(
            "sequence parallelism (enable_sp) knows norms by vLLM's own operator",
            "turn enable_sp off, or revert the patch",
        )


def passes_on(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the compiler's passes that are on in the current configuration, by name."""
    config = _compilation()
    passes = None if config is None else config.pass_config
    return tuple(name for name in names if getattr(passes, name, False))


def batch_invariant() -> bool:
    """Whether the engine must compute the same whatever is in a batch."""
    return bool(sources.module("vllm.envs").VLLM_BATCH_INVARIANT)


def rounds_states_at_random() -> bool:
    """Whether the current configuration rounds Mamba's states to float16 at random."""
    config = sources.module("vllm.config").get_current_vllm_config_or_none()
    return config is not None and bool(config.mamba_config.enable_stochastic_rounding)


def uses_runner_v2() -> bool:
    """Whether the engine of the current configuration has model runner V2."""
    config = sources.module("vllm.config").get_current_vllm_config_or_none()
    return config is not None and bool(config.use_v2_model_runner)


def must_allow_another(kernel: str) -> None:
    """Refuse an engine that must compute the same whatever is in a batch.

    Args:
        kernel: what a patch would replace, in a word.

    Raises:
        VerificationError: `VLLM_BATCH_INVARIANT` is set.
    """
    if batch_invariant():
        raise VerificationError(
            f"VLLM_BATCH_INVARIANT requires vLLM's own {kernel}", "unset it, or revert the patch"
        )


def must_not_be_fused(passes: Iterable[str]) -> None:
    """Refuse an engine whose compiler would fuse what a patch replaces.

    Args:
        passes: those of `FUSING` that look for it.

    Raises:
        VerificationError: one of them is on, and has something to fuse.
    """
    if on := _fusing(passes):
        raise VerificationError(
            f"vLLM's compiler fuses that operator with others ({', '.join(on)})",
            "turn the pass off in compilation_config.pass_config, or revert the patch",
        )


def must_not_be_replaced(layer: str) -> None:
    """Refuse a class of layers in whose place another plugin has its own.

    Raises:
        VerificationError: there is one.
    """
    replaced = sources.module("vllm.model_executor.custom_op").op_registry_oot
    if layer in replaced:
        raise VerificationError(
            f"{layer} is replaced by {replaced[layer].__name__}", "disable its plugin"
        )


FUSING = (
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_allreduce_rms",
    "enable_qk_norm_rope_fusion",
    "fuse_qk_norm_rope_kvcache",
    "fuse_mla_dual_rms_norm",
)
"""The passes for which a point may be refused; the first two fuse with quantised weights alone."""


def _fusing(passes: Iterable[str]) -> tuple[str, ...]:
    """Those of the passes that are on in the current configuration and have something to fuse."""
    config = sources.module("vllm.config").get_current_vllm_config_or_none()
    if config is None or not compiles_graphs():
        return ()
    idle = () if config.quant_config is not None else FUSING[:2]
    return tuple(name for name in passes_on(passes) if name not in idle)


def decided_by() -> tuple[bool | tuple[str, ...], ...]:
    """What patch points look at in an engine's configuration when they are installed."""
    return batch_invariant(), splits_sequences(), _fusing(FUSING)


def serves_lora() -> bool:
    """Whether adapters of the current engine may add to what its layers compute."""
    config = sources.module("vllm.config").get_current_vllm_config_or_none()
    return config is not None and config.lora_config is not None


def copy_to_ray_workers(names: Iterable[str]) -> None:
    """Let vLLM copy these variables to its workers on Ray, besides those that the user names.

    The public way, a variable of vLLM, would be part of its hash of compiled code.
    """
    try:
        sources.module("vllm.ray.ray_env").DEFAULT_EXTRA_ENV_VARS.update(names)
    except (VerificationError, AttributeError):  # another version keeps them elsewhere
        theirs = os.environ.get(_COPIED, "").split(",")
        both = dict.fromkeys([*filter(None, map(str.strip, theirs)), *names])
        os.environ[_COPIED] = ",".join(both)


_COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def compiles_graphs() -> bool:
    """Whether vLLM's own compiler sees whole graphs of the model: its mode VLLM_COMPILE, not
    `enforce_eager` or breakable CUDA graphs. Outside of an engine, it is assumed.
    """
    config = _compilation()
    modes = sources.module("vllm.config.compilation").CompilationMode
    return config is None or bool(config.mode == modes.VLLM_COMPILE)


def _compilation() -> Any:
    config = sources.module("vllm.config").get_current_vllm_config_or_none()
    return None if config is None else config.compilation_config


def forward_context() -> Any:
    """The context of the forward pass that is running, or is compiled; None outside of one."""
    contexts = sources.module("vllm.forward_context")
    return contexts.get_forward_context() if contexts.is_forward_context_available() else None


def models_of(worker: Any) -> tuple[torch.nn.Module, ...]:
    """The models that a worker loaded: the served one, and that of speculative decoding, if any."""
    runner = getattr(worker, "model_runner", None)
    # model runner V1 has a drafter, V2 a speculator
    drafts = (getattr(runner, name, None) for name in ("drafter", "speculator"))
    found = worker.get_model(), *(getattr(draft, "model", None) for draft in drafts)
    return tuple(model for model in found if isinstance(model, torch.nn.Module))


def plain_gemms() -> tuple[Any, ...]:
    """The matmuls of `UnquantizedLinearMethod` that are PyTorch's `linear`.

    From 0.33.0 on, each method keeps the one that `linear_backend` chose, in `_gemm_impl`. Before
    that, vLLM asks the platform at each call; None stands for such a method.
    """
    utils = sources.module(_UTILS)
    plain = utils.default_unquantized_gemm, utils.cpu_unquantized_gemm
    return (*plain, None) if utils.dispatch_unquantized_gemm() in plain else plain


def has_router_kernel(layer: Any) -> bool:
    """Whether a `GateLinear` runs kernels of its own, at some number of rows at least.

    It says so by attributes such as `allow_cublas_router_gemm`, whose names differ by version.
    """
    able = "allow_specialized_router_gemm"  # what the GPU could do, which nothing alone uses
    return any(
        allowed is True and name.startswith("allow_") and name.endswith("_gemm") and name != able
        for name, allowed in vars(layer).items()
    )


def gemm_of(method: Any) -> Any:
    """The matmul that an `UnquantizedLinearMethod` keeps; None if it keeps none."""
    return getattr(method, "_gemm_impl", None)


def scale_rows(weight_scale: Any, depth: int) -> torch.Tensor:
    """MXFP4 scales in the layout of compute capability 9.0, without their padding.

    From 0.26.0 on vLLM pads rows (to 2,944 for a depth of 2,880), so only their pitch differs.

    Args:
        weight_scale: the scales of one matmul, as `PrecisionConfig` holds them.
        depth: elements that the matmul sums over.

    Returns:
        A view, uint8 [experts, rows, depth].
    """
    scales: torch.Tensor = weight_scale.storage.data.mT
    return scales[..., :depth]
