"""One decode step of Mamba2's state: Granite 4 hybrids, Nemotron-H, Falcon-H1, Zamba2, Mamba2.

`MambaMixer2` calls one function for a step's requests in decode, inside the operator
`vllm::mamba_mixer2`, which compilers do not decompose. Prefill runs other functions, and never
comes here; Mamba1's layers have the name of that function in another module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_LAYER = "vllm.model_executor.layers.mamba.mamba_mixer2"
_OPS = "vllm.model_executor.layers.mamba.ops"
_FUNCTION = "selective_state_update"
_FORWARD = "conv_ssm_forward"

RANDOM = "a state that is rounded at random"
SPECULATION = "speculative decoding"
MOVED = "a state that is read from one block of the prefix cache and written to another"


class Mamba2Decode(VllmPoint):
    """Layers of Mamba2 whose state is read, decayed and written at once."""

    name: ClassVar[str] = "mamba2_decode"
    op: ClassVar[str] = "mamba2_decode"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_LAYER}:MambaMixer2.{_FORWARD}",
        f"{_OPS}.ssu_dispatch:{_FUNCTION}",
        f"{_OPS}.ssu_dispatch:get_mamba_ssu_backend",
        f"{_OPS}.ssu_dispatch:MambaSSUBackend.__init__",
        f"{_OPS}.ssu_dispatch:TritonSSUBackend.__call__",
        f"{_OPS}.mamba_ssm:{_FUNCTION}",
        f"{_OPS}.mamba_ssm:_selective_scan_update_kernel",
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        self._place().must_be_the_engines()
        engine.must_allow_another("state update")
        return f"{_LAYER}.{_FUNCTION}"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, self._class())

    def applies(self, layer: Any) -> str | None:
        if getattr(type(layer), _FORWARD) is not getattr(self._class(), _FORWARD):
            return f"{_FORWARD} of its own"
        if getattr(layer, "use_replayssm", False):  # from 0.28.0 on
            return "decode by ReplaySSM, which writes a state once in several steps"
        if layer.num_spec:
            return SPECULATION
        if getattr(layer.cache_config, "mamba_cache_mode", None) == "all":  # gone in 0.33.0
            return MOVED
        return RANDOM if engine.rounds_states_at_random() else None

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {name: getattr(layer, name).data for name in ("dt_bias", "A", "D")}

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = self._place()
        place.install(_replacement(place.original, kernel))
        self._swaps = [place]

    @staticmethod
    def _class() -> Any:
        return sources.module(_LAYER).MambaMixer2

    @staticmethod
    def _place() -> AttributePatch:
        return AttributePatch(sources.module(_LAYER), _FUNCTION)


def _replacement(original: Any, kernel: Dispatcher) -> Any:
    dispatch = sources.module(f"{_OPS}.ssu_dispatch")

    def selective_state_update(
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        **how: Any,
    ) -> None:
        spread = dt, A, D, dt_bias
        reason = _unlike(how, dispatch.NULL_BLOCK_ID) or _unlike_heads(spread, how["out"])
        # the engine's own backend, which a process has one of, not the settings of this layer
        if dispatch.get_mamba_ssu_backend()._mamba_config.enable_stochastic_rounding:
            reason = reason or RANDOM
        if reason is None:
            slots = how["state_batch_indices"]
            slots = (slots if slots.dim() == 1 else slots[:, 0])[: len(x)]
            rows, out = x.flatten(1), how["out"].view(len(x), -1)
            heads = dt[..., 0], dt_bias[:, 0], A[:, 0, 0], B.flatten(1), C.flatten(1), D[:, 0]
            if kernel(state, rows, *heads, rows[:, :0], slots, out):
                return
        else:
            kernel.book.reasons[reason] += 1
        original(state, x, dt, A, B, C, D, dt_bias, **how)
        kernel.left()

    return selective_state_update


def _unlike(how: Mapping[str, Any], padding: int) -> str | None:
    """Why a call is not one of the contract, by its keywords; None if it is."""
    slots = how.get("state_batch_indices")
    if how.get("num_accepted_tokens") is not None or how.get("cu_seqlens") is not None:
        return SPECULATION
    if how.get("dst_state_batch_indices") is not slots:
        return MOVED
    if slots is None or how.get("null_block_id", padding) != 0:
        return "other slots"
    if slots.dim() > 1 and slots.shape[1] != 1:
        return SPECULATION
    if how.get("z") is not None or not how.get("dt_softplus"):
        return "another gate or step"
    return None


def _unlike_heads(spread: tuple[torch.Tensor, ...], out: torch.Tensor) -> str | None:
    """Why a head's step, decay and skip are not one number each, or `out` no rows; None if so.

    Args:
        spread: dt [tokens, heads, head_dim], A [heads, head_dim, state_size], D and dt_bias
            [heads, head_dim], of which all but tokens and heads are to be repeats.
        out: [tokens, heads, head_dim].
    """
    dt, *others = spread
    repeats = [dt.stride(2), *(stride for each in others for stride in each.stride()[1:])]
    if any(repeats):
        return "heads whose elements differ in step, decay or skip"
    return None if out.is_contiguous() else "an output that is not contiguous"
