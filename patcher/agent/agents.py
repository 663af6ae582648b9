"""The agents: each question is a step of the run, and is kept with its answer as files that a
person can open.

One agent generates. An analyst recommends one change before an optimization; an auditor diagnoses
before a repair. Advice that cannot be read is done without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pydantic import Field, JsonValue, ValidationError

from patcher.attempts import Diagnosis, Recommendation, ReplyFailure
from patcher.bench import Record, first_error
from patcher.models import TOKENS_CEILING, Image, Model, Reply, Request, Role, Usage, sees_images
from patcher.models.client import ModelClient
from patcher.models.repetition import ends_in_a_loop
from patcher.models.replay import RecordingEndedError
from patcher.prompting.extract import extract_json, strict_schema, unusable
from patcher.prompting.rendering import Prompts
from patcher.runs.run import Run

MAX_TOKENS: dict[Role, int] = {"generate": 32_000, "analyse": 16_000, "diagnose": 8_000}
"""Room for a reply, thinking included; doubled after a reply that was cut off."""
AdaptPrompt = Callable[[Role, int, str], str]
"""A user's last word on the prompt of this role in this iteration: what comes back is asked."""
SCHEMAS: dict[Role, dict[str, JsonValue]] = {
    "analyse": strict_schema(Recommendation),
    "diagnose": strict_schema(Diagnosis),
}
"""Of advice, for servers that hold a reply to one."""
RecordT = TypeVar("RecordT", Recommendation, Diagnosis)


class Advice(Record):
    """What an adviser said, if it could be read."""

    recommendation: Recommendation | None = None
    diagnosis: Diagnosis | None = None
    missing: str | None = None
    """Why there is none."""
    usage: Usage = Field(default_factory=Usage)
    repairs: tuple[str, ...] = ()
    """Of the reply."""


class Agents:
    """The models behind the loop on one op, by role.

    Args:
        models: of the roles that are asked; an adviser may be left out.
        pictures: PNG files of the run that go to an analyst that sees.
    """

    def __init__(
        self,
        run: Run,
        prompts: Prompts,
        models: Mapping[Role, Model],
        client: ModelClient,
        adapt: AdaptPrompt | None = None,
        pictures: Sequence[str] = (),
    ) -> None:
        self._images: dict[Role, tuple[Image, ...]] = {}
        if "analyse" in models and sees_images(models["analyse"]):
            self._images["analyse"] = tuple(Image.of(run.path, file) for file in pictures)
        self._run = run
        self._prompts = prompts
        self._models = models
        self._client = client
        self._adapt = adapt
        self._room = dict(MAX_TOKENS)

    @property
    def pictures(self) -> int:
        """How many go with a question to the analyst."""
        return len(self._images.get("analyse", ()))

    def ask(self, iteration: int, role: Role, prompt: str) -> Reply:
        """The reply, stored now or in an earlier process.

        Raises:
            BudgetError, WaitingError, ModelError, MissingError: the step stays open.
        """
        name = self._prompts.op.name
        folder = f"ops/{name}/{iteration}"
        adapted = self._adapt(role, iteration, prompt) if self._adapt else prompt
        request = Request(
            step=f"{name}/{iteration}/ask-{role}",
            role=role,
            system=self._prompts.system(role),
            prompt=adapted,
            head=self._prompts.head(adapted),
            max_tokens=self._room[role],
            images=self._images.get(role, ()),
            answer_schema=SCHEMAS.get(role),
        )
        if not self._run.done(request.step):
            self._run.write(f"{folder}/{role}.prompt.md", _shown(request))
        call = self._client.ask(self._models[role], request)
        self._run.write(f"{folder}/{role}.prompt.md", _shown(call.request))
        self._run.write(f"{folder}/{role}.reply.md", call.reply.text)
        self._room[role] = call.request.max_tokens  # more than before, if a reply was cut off
        if call.reply.truncated and not ends_in_a_loop(call.reply.text):
            self._room[role] = min(2 * call.request.max_tokens, TOKENS_CEILING)
        return call.reply

    def answered(self) -> bool:
        """Send what was asked for a batch; see `ModelClient.answered`."""
        return self._client.answered()

    def recommend(self, iteration: int, prompt: str) -> Advice:
        """The analyst's one recommendation."""
        if "analyse" not in self._models:
            return Advice()
        reply = self.ask(iteration, "analyse", prompt)
        found = _read(reply, Recommendation, "change", "recommendation")
        if isinstance(found, ReplyFailure):
            return Advice(missing=found.detail, usage=reply.usage, repairs=reply.repairs)
        return Advice(recommendation=found, usage=reply.usage, repairs=reply.repairs)

    def diagnose(self, iteration: int, prompt: str) -> Advice:
        """The one critical issue of a candidate that failed."""
        if "diagnose" not in self._models:
            return Advice()
        try:
            reply = self.ask(iteration, "diagnose", prompt)
        except RecordingEndedError as error:
            # Recordings from before there were diagnoses go on without.
            return Advice(missing=error.message)
        found = _read(reply, Diagnosis, "critical_issue", "diagnosis")
        if isinstance(found, ReplyFailure):
            return Advice(missing=found.detail, usage=reply.usage, repairs=reply.repairs)
        return Advice(diagnosis=found, usage=reply.usage, repairs=reply.repairs)


def _shown(request: Request) -> str:
    return f"<!-- system -->\n{request.system}\n<!-- prompt -->\n{request.prompt}"


def _read(reply: Reply, record_type: type[RecordT], key: str, what: str) -> RecordT | ReplyFailure:
    found = unusable(reply) or extract_json(reply.text, key)
    if isinstance(found, ReplyFailure):
        return found
    known = {name: found[name] for name in record_type.model_fields if name in found}
    try:
        return record_type.model_validate(known)
    except ValidationError as error:
        (field, *_), wrong, _ = first_error(error)
        detail = f"the {what} does not fit: {field}: {wrong}"
        return ReplyFailure(kind="no_json", detail=detail)
