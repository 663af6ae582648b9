"""A user's own patch point in vLLM, for a user's own op: `silu_mul` of the tutorial."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.bench import UsageError, VerificationError
from patcher.bench.ops.contract import PatchPointSpec
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import PatchPoint, source_digest


class Gate:
    engine: ClassVar[str] = "vllm"
    name: ClassVar[str] = "own_gate"
    op: ClassVar[str] = "silu_mul"
    spec: ClassVar[PatchPointSpec] = PatchPointSpec(
        engine="vllm",
        versions=">=0.25.1,<1",
        point="own_gate",
        summary="the activation of each gated MLP",
        calls_per_layer=1,
    )

    def __init__(self, target: Any = None) -> None:
        self._original: Any = None
        self._ours: Any = None

    @classmethod
    def of_model(cls, config: Mapping[str, Any]) -> str:
        if config.get("hidden_act") != "silu":
            raise VerificationError("its activation is no silu", "name another model")
        return "the activation of each gated MLP"

    @classmethod
    def fingerprint(cls) -> str:
        return source_digest(_layer().forward_native)

    def find(self) -> str:
        if hasattr(_layer().forward, "patcher"):
            raise VerificationError("SiluAndMul is patched already", "take that patch out first")
        return "vllm.model_executor.layers.activation.SiluAndMul.forward"

    def install(self, kernel: Dispatcher) -> None:
        if self._original is not None:
            raise UsageError("the patch is installed already", "remove it first")
        self.find()
        original = _layer().forward
        operator = kernel.op(_engines_own)

        @functools.wraps(original)
        def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
            size = x.shape[-1] // 2
            rows = x.reshape(-1, 2 * size)
            out = torch.empty(rows.shape[0], size, dtype=x.dtype, device=x.device)
            operator(rows[:, :size].contiguous(), rows[:, size:].contiguous(), out)
            return out.view(*x.shape[:-1], size)

        forward.patcher = self  # type: ignore[attr-defined]
        self._original, self._ours = original, forward
        _layer().forward = forward

    def remove(self) -> None:
        original, self._original = self._original, None
        if original is None:
            return
        if _layer().forward is not self._ours:
            raise VerificationError("someone patched over ours", "start the engine again")
        _layer().forward = original


def _engines_own(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(torch.nn.functional.silu(gate), up, out=out)


def _layer() -> Any:
    from vllm.model_executor.layers.activation import SiluAndMul

    return SiluAndMul


POINTS: dict[str, type[PatchPoint]] = {Gate.name: Gate}
