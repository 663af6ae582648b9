"""One decode step of the gated delta rule: Qwen3-Next's and Qwen3.5's linear attention.

The layer calls a plain function in steps that only decode, inside the operator
`vllm::qwen_gdn_attention_core`, which compilers do not decompose. Steps with prefill or speculation
call others, and are never seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_FUNCTION = "fused_recurrent_gated_delta_rule_packed_decode"
_FUSED = "enable_fused_gdn_decode", "enable_fused_gdn_spec_decode"
"""Settings of a layer that takes another way, from 0.28.0 and from 0.33.0 on."""


class GatedDelta(VllmPoint):
    """Gated delta layers whose step of decode is one function."""

    name: ClassVar[str] = "gated_delta"
    op: ClassVar[str] = "gated_delta_decode"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_LAYER}:QwenGatedDeltaNetAttention._forward_core_decode_non_spec",
        *(
            f"vllm.{where}.ops.fused_recurrent:{name}"
            for where in ("model_executor.layers.fla", "third_party.flash_linear_attention")
            for name in (_FUNCTION, f"{_FUNCTION}_kernel")
        ),
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        self._place().must_be_the_engines()
        engine.must_allow_another("attention")
        return f"{_LAYER}.{_FUNCTION}"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_LAYER).QwenGatedDeltaNetAttention)

    def applies(self, layer: Any) -> str | None:
        if any(getattr(layer, name, False) for name in _FUSED):
            return "decode fused with its gate and norm"
        return None if layer.enable_packed_recurrent_decode else "decode by another kernel"

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"A_log": layer.A_log.data, "dt_bias": layer.dt_bias.data}

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = self._place()
        place.install(_replacement(place.original, kernel))
        self._swaps = [place]

    @staticmethod
    def _place() -> AttributePatch:
        return AttributePatch(sources.module(_LAYER), _FUNCTION)


def _replacement(original: Any, kernel: Dispatcher) -> Any:
    def packed_decode(
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        scale: float,
        initial_state: torch.Tensor,
        out: torch.Tensor,
        ssm_state_indices: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reason = _unlike(scale, initial_state, out, use_qk_l2norm_in_kernel)
        if reason is not None:
            kernel.book.reasons[reason] += 1
        else:
            state = initial_state.flatten(1)
            tensors = mixed_qkv, a, b, A_log.data, dt_bias.data, ssm_state_indices
            if kernel(state, *tensors, out.view(len(out), -1)):
                return out, initial_state
        found: tuple[torch.Tensor, torch.Tensor] = original(
            mixed_qkv=mixed_qkv,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            scale=scale,
            initial_state=initial_state,
            out=out,
            ssm_state_indices=ssm_state_indices,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        kernel.left()
        return found

    return packed_decode


def _unlike(scale: float, state: torch.Tensor, out: torch.Tensor, normalised: bool) -> str | None:
    """Why a call is not one of the contract; None if it is."""
    if not normalised:
        return "queries and keys that are normalised before"
    if state.dim() != 4 or not state[0].is_contiguous():
        return "a state that is not dense"
    if abs(scale * state.shape[-1] ** 0.5 - 1) > 1e-6:
        return "another scale"
    return None if out.is_contiguous() else "an output that is not contiguous"
