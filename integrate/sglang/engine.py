"""What SGLang runs with, asked of its published configuration.

Before a scheduler publishes it, as in a process that only verifies a patch, nothing is refused.
"""

from __future__ import annotations

from patcher.bench import VerificationError
from patcher.integrate.sglang import sources

_CONTEXT = "sglang.srt.runtime_context"


def must_call_layers() -> None:
    """Refuse modes in which SGLang does not call the code that patches replace.

    Raises:
        VerificationError: one is on; the message names its argument.
    """
    context = sources.module(_CONTEXT)
    if context.get_flags().capture.enable_torch_compile:
        raise VerificationError(
            "--enable-torch-compile compiles SGLang's PyTorch code instead of calling its kernels",
            "leave it out, or revert the patch",
        )
    forced = sources.module("sglang.kernels.fused_op").get_fused_op_backend()
    if forced is not None:
        raise VerificationError(
            f"SGLANG_FORCE_FUSED_OP_BACKEND={forced.value} bypasses the layers' CUDA code",
            "unset it, or revert the patch",
        )
    if not context.get_context().is_config_namespace_published("exec"):
        return
    chosen = context.get_exec()
    if chosen.deterministic.enable_deterministic_inference:
        raise VerificationError(
            "--enable-deterministic-inference requires SGLang's own batch-invariant kernels",
            "leave it out, or revert the patch",
        )
    if chosen.kernel.enable_nvidia_megakernel:
        raise VerificationError(
            "--enable-nvidia-megakernel replaces a whole decode step by one kernel",
            "leave it out, or revert the patch",
        )


def uses_plain_gemm() -> bool:
    """Whether linear layers without quantisation are PyTorch's `linear`."""
    backend = sources.module("sglang.srt.layers.quantization.unquant").get_bf16_gemm_backend()
    return not (backend.is_cutedsl() or backend.is_gemv())
