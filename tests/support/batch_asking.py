"""A run that asks a model whose entry says `batch = true`."""

from __future__ import annotations

from typing import Any

from batch_servers import MODELS
from model_servers import Slept

from patcher.bench import WaitingError
from patcher.models import Model, Reply, Request, open_model
from patcher.models.budget import Budget
from patcher.models.ceilings import Account, SpendingLimits
from patcher.models.client import ModelClient
from patcher.models.registry import ModelEntry
from patcher.runs.run import Run


def request(step: str = "a") -> Request:
    return Request(
        step=step, role="generate", system="You write.", prompt=f"Write {step}.", max_tokens=4000
    )


def model_of(api: str, run: Run, **more: Any) -> Model:
    entry = ModelEntry.model_validate(
        {"provider": api, "model": MODELS[api], "batch": True, **more}
    )
    return open_model("mine", run.path, {"mine": entry})


class Asking:
    """One process of a run."""

    def __init__(self, run: Run, api: str, ceilings: SpendingLimits | None = None) -> None:
        self.said: list[str] = []
        self.slept = Slept()
        self.budget = Budget(run, ceilings or SpendingLimits(usd=5.0))
        self.client = ModelClient(self.budget, clock=self.slept.clock, say=self.said.append)
        self.model = model_of(api, run)

    def __call__(self, *steps: str) -> list[Reply | None]:
        """The replies that are there, and what is not there sent."""
        found: list[Reply | None] = []
        for step in steps:
            try:
                found.append(self.client.ask(self.model, request(step)).reply)
            except WaitingError:
                found.append(None)
        if None in found:
            self.client.answered()
        return found

    @property
    def account(self) -> Account:
        return self.budget.account
