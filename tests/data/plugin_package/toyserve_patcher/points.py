"""Patch points in toyserve: residual add and norm in its `RMSNorm`, which works in place."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from patcher.bench import PatchPointSpec, UsageError, VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import PatchPoint, source_digest


class AddNorm:
    engine: ClassVar[str] = "toyserve"
    name: ClassVar[str] = "rms_norm"
    op: ClassVar[str] = "fused_add_rms_norm"
    spec: ClassVar[PatchPointSpec] = PatchPointSpec(  # what the op's own contract would say
        engine="toyserve",
        versions=">=1.2,<2",
        point="rms_norm",
        summary="residual add + norm of each block, and before the head",
        calls_per_layer=1,
    )

    def __init__(self, target: Any = None) -> None:
        self._original: Any = None
        self._ours: Any = None

    @classmethod
    def fingerprint(cls) -> str:
        return source_digest(_norm().forward)

    def find(self) -> str:
        if hasattr(_norm().forward, "patcher"):
            raise VerificationError("RMSNorm is patched already", "take that patch out first")
        return "toyserve.layers.RMSNorm.forward"

    def install(self, kernel: Dispatcher) -> None:
        if self._original is not None:
            raise UsageError("the patch is installed already", "remove it first")
        self.find()
        original = _norm().forward

        @functools.wraps(original)
        def forward(module: Any, x: Any, residual: Any) -> Any:
            if kernel(x, residual, module.weight, module.epsilon):
                return x, residual
            return original(module, x, residual)

        forward.patcher = self  # type: ignore[attr-defined]
        self._original, self._ours = original, forward
        _norm().forward = forward

    def remove(self) -> None:
        original, self._original = self._original, None
        if original is None:
            return
        if _norm().forward is not self._ours:
            raise VerificationError("someone patched RMSNorm over ours", "start the engine again")
        _norm().forward = original


def _norm() -> Any:
    from toyserve.layers import RMSNorm

    return RMSNorm


POINTS: dict[str, type[PatchPoint]] = {AddNorm.name: AddNorm}
