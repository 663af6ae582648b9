"""Asking a model as a step of the run: once, ever, with the question and the answer kept as files
that a person can open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from patcher.models import TOKENS_CEILING, Image, Model, Reply, Request, Role, sees_images
from patcher.models.budget import Budget
from patcher.prompting.rendering import Prompts
from patcher.runs.run import Run

MAX_TOKENS: dict[Role, int] = {"generate": 32_000, "analyse": 16_000, "diagnose": 8_000}
"""Room for a reply, thinking included; doubled after a reply that was cut off."""
Adapt = Callable[[Role, int, str], str]
"""A user's last word on the prompt of this role in this iteration: what comes back is asked."""


class Asking:
    """The models behind the loop on one op, by role."""

    def __init__(
        self,
        run: Run,
        prompts: Prompts,
        models: Mapping[Role, Model],
        budget: Budget,
        adapt: Adapt | None = None,
        pictures: Sequence[str] = (),
    ) -> None:
        self._images: dict[Role, tuple[Image, ...]] = {}
        if sees_images(models["analyse"]):
            self._images["analyse"] = tuple(Image.of(run.path, file) for file in pictures)
        self._run = run
        self._prompts = prompts
        self._models = models
        self._budget = budget
        self._adapt = adapt
        self._room = dict(MAX_TOKENS)

    @property
    def pictures(self) -> int:
        """How many go with a question to the analyst."""
        return len(self._images.get("analyse", ()))

    def __call__(self, iteration: int, role: Role, prompt: str) -> Reply:
        """The reply, stored now or in an earlier process.

        Raises:
            BudgetError, WaitingError, ModelError, MissingError: the step stays open.
        """
        name = self._prompts.op.name
        folder = f"ops/{name}/{iteration}"
        request = Request(
            step=f"{name}/{iteration}/ask-{role}",
            role=role,
            system=self._prompts.system(role),
            prompt=self._adapt(role, iteration, prompt) if self._adapt else prompt,
            max_tokens=self._room[role],
            images=self._images.get(role, ()),
        )
        if not self._run.done(request.step):
            self._run.write(f"{folder}/{role}.prompt.md", _shown(request))
        asked = self._budget.ask(self._models[role], request)
        self._run.write(f"{folder}/{role}.prompt.md", _shown(asked.request))
        self._run.write(f"{folder}/{role}.reply.md", asked.reply.text)
        self._room[role] = asked.request.max_tokens  # more than before, if a reply was cut off
        if asked.reply.truncated:
            self._room[role] = min(2 * asked.request.max_tokens, TOKENS_CEILING)
        return asked.reply


def _shown(request: Request) -> str:
    return f"<!-- system -->\n{request.system}\n<!-- prompt -->\n{request.prompt}"
