"""Double: names that RMSNorm.forward imports when it runs."""

from .flashinfer_custom_ops import flashinfer_fused_add_rmsnorm

__all__ = ["flashinfer_fused_add_rmsnorm"]
