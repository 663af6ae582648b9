"""Double: the operator; real name, schema and mutated arguments, no fake of its own."""

import torch

from ..flashinfer_utils import IS_FLASHINFER_AVAILABLE, fused_add_rmsnorm, get_env_enable_pdl

if IS_FLASHINFER_AVAILABLE:

    @torch.library.custom_op(
        "trtllm::flashinfer_fused_add_rmsnorm", mutates_args=("input", "residual")
    )
    def flashinfer_fused_add_rmsnorm(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        fused_add_rmsnorm(input, residual, weight, eps, enable_pdl=get_env_enable_pdl())
