"""What the points have in common that take modules of experts."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.transformers.probed import ProbedPoint
from patcher.integrate.transformers.roles.experts_modules import are_experts
from patcher.integrate.transformers.roles.experts_rows import check_registry


class ExpertsPoint(ProbedPoint):
    """Replaces the `forward` of experts modules, which transformers' registry of functions runs."""

    role: ClassVar[str] = "experts module"
    others: ClassVar[str] = "layers"

    def find(self) -> str:
        check_registry()
        return super().find()

    def install(self, kernel: Dispatcher) -> None:
        check_registry()
        super().install(kernel)

    def of_role(self, layer: Any) -> bool:
        """See `LayerPoint`."""
        return are_experts(layer)

    def computes(self, part: Any) -> bool:
        """See `ProbedPoint`."""
        return self.applies(part) is None

    @abstractmethod
    def applies(self, layer: Any) -> str | None:
        """See `LayerPoint`."""
