"""What goes before a candidate is asked for: the analyst's recommendation before an optimisation,
the auditor's diagnosis before a repair. Advice that cannot be read is done without."""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field, ValidationError

from patcher.agent.asking import Asking
from patcher.attempts import Diagnosis, Recommendation, ReplyFailure
from patcher.bench import Record
from patcher.models import Reply, Usage
from patcher.models.replay import RecordingEndedError
from patcher.prompting.extract import extract_json, unusable

RecordT = TypeVar("RecordT", Recommendation, Diagnosis)


class Advice(Record):
    """What was said, if it could be read."""

    recommendation: Recommendation | None = None
    diagnosis: Diagnosis | None = None
    missing: str | None = None
    """Why there is none."""
    usage: Usage = Field(default_factory=Usage)


def recommended(ask: Asking, iteration: int, prompt: str) -> Advice:
    """The analyst's one recommendation."""
    reply = ask(iteration, "analyse", prompt)
    found = _read(reply, Recommendation, "change", "recommendation")
    if isinstance(found, ReplyFailure):
        return Advice(missing=found.detail, usage=reply.usage)
    return Advice(recommendation=found, usage=reply.usage)


def diagnosed(ask: Asking, iteration: int, prompt: str) -> Advice:
    """The one critical issue of a candidate that failed."""
    try:
        reply = ask(iteration, "diagnose", prompt)
    except RecordingEndedError as error:
        # Recordings from before there were diagnoses go on without.
        return Advice(missing=error.message)
    found = _read(reply, Diagnosis, "critical_issue", "diagnosis")
    if isinstance(found, ReplyFailure):
        return Advice(missing=found.detail, usage=reply.usage)
    return Advice(diagnosis=found, usage=reply.usage)


def _read(reply: Reply, record_type: type[RecordT], key: str, what: str) -> RecordT | ReplyFailure:
    found = unusable(reply) or extract_json(reply.text, key)
    if isinstance(found, ReplyFailure):
        return found
    known = {name: found[name] for name in record_type.model_fields if name in found}
    try:
        return record_type.model_validate(known)
    except ValidationError as error:
        first = error.errors()[0]
        detail = f"the {what} does not fit: {first['loc'][0]}: {first['msg']}"
        return ReplyFailure(kind="no_json", detail=detail)
