"""A model provider: replies from a shelf, one Markdown file after another."""

from __future__ import annotations

from pathlib import Path

from patcher.bench import BudgetError, UsageError
from patcher.models import Reply, Request, Usage


class Shelf:
    """`shelf:DIR`: the answer to the n-th question of the run is the n-th file of the folder."""

    def __init__(self, rest: str, run_dir: Path) -> None:
        self.files = sorted(Path(rest).glob("*.md")) if rest else []
        if not self.files:
            raise UsageError(f"no *.md files in {rest or 'no folder'}", "say --model shelf:DIR")
        self.name = f"shelf:{Path(rest).name}"

    def worst_cost_usd(self, request: Request) -> float | None:
        return 0.0

    def ask(self, request: Request) -> Reply:
        # by the step's iteration, so that a resumed run gets the same answers
        number = int(request.step.split("/")[1])
        if number >= len(self.files):
            raise BudgetError("the shelf is empty", "put more replies on it")
        return Reply(
            text=self.files[number].read_text(encoding="utf-8"),
            model=self.name,
            usage=Usage(),
            stop_reason="end_turn",
            source="api",
            prompt_digest=request.digest,
        )
