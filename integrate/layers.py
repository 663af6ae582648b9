"""How many layers of a loaded model a patch takes, and why others keep the engine's own code.

A served engine imports this module, so it uses only the standard library.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerSurvey:
    """The layers of a patch point's role in loaded models."""

    taken: int = 0
    """Layers whose calls reach the patched kernel, as far as a layer shows it."""
    refused: Counter[str] = field(default_factory=Counter)
    """Layers that keep the engine's own code, by reason."""

    @property
    def total(self) -> int:
        """The number of layers of that role."""
        return self.taken + sum(self.refused.values())

    def __add__(self, other: LayerSurvey) -> LayerSurvey:
        return LayerSurvey(self.taken + other.taken, self.refused + other.refused)

    def __str__(self) -> str:
        """`72 of 96 layers; 24: no bias`."""
        reasons = [f"{count:,}: {reason}" for reason, count in self.refused.most_common()]
        return "; ".join([_layers(self.taken, self.total), *reasons])


def _layers(taken: int, total: int) -> str:
    of_all = "" if taken == total else f" of {total:,}"
    return f"{taken:,}{of_all} layer{'s' * (total != 1)}"


@dataclass(frozen=True)
class StepCalls:
    """How often a step of decode comes by a patch point, known before a model is loaded."""

    taken: int = 0
    """Calls of layers that the patch takes."""
    refused: Counter[str] = field(default_factory=Counter)
    """Calls of layers whose own tensors have sizes that the guards refuse, by reason."""

    @property
    def total(self) -> int:
        """Calls of all layers of the role."""
        return self.taken + sum(self.refused.values())

    def __add__(self, other: StepCalls) -> StepCalls:
        return StepCalls(self.taken + other.taken, self.refused + other.refused)

    def __str__(self) -> str:
        """`20 times; not 2 times: outer no multiple of 8`."""
        reasons = [f"not {_times(count)}: {reason}" for reason, count in self.refused.most_common()]
        return "; ".join([_times(self.taken), *reasons])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
