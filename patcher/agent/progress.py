"""What a listener hears of the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from patcher.attempts import Attempt, Phase, Progress, Stage
from patcher.models.budget import Budget


@dataclass(frozen=True)
class ProgressReporter:
    """Tells a listener how the loop goes."""

    op: str
    iterations: int
    budget: Budget
    on_event: Callable[[Progress], None] | None

    def __call__(
        self, iteration: int, stage: Stage, phase: Phase, attempt: Attempt | None = None
    ) -> None:
        if self.on_event:
            self.on_event(
                Progress(
                    op=self.op,
                    iteration=iteration,
                    iterations=self.iterations,
                    stage=stage,
                    phase=phase,
                    attempt=attempt,
                    ledger=self.budget.account.ledger if attempt else None,
                )
            )
