"""Double: flashinfer's one function, in PyTorch, and whether it is there."""

import torch

IS_FLASHINFER_AVAILABLE = True


def get_env_enable_pdl() -> bool:
    return False


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    enable_pdl: bool = False,
) -> None:
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    input.copy_((wide * scale * weight.float()).to(input.dtype))
