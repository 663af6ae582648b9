"""Replies recorded in an earlier run, given back by the name of the step that asks."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from patcher.bench import SCHEMA_VERSION, BudgetError, Record, UsageError, content
from patcher.models import ModelCall, Reply, Request, Role
from patcher.models.gate import MESSAGE_LIMIT, NAME_LIMIT, Cleaner
from patcher.runs.run import Run, journal_name


class RecordedReply(Record):
    """One line of a recording: the question as it was asked, and its answer."""

    schema_version: int = SCHEMA_VERSION
    step: str
    role: Role
    prompt_digest: str
    """`Request.digest` of the question as it was asked."""
    system: str
    prompt: str
    reply: Reply


class RecordingEndedError(BudgetError):
    """The recording holds no reply for this step."""

    kind = "recording_ended"


class ReplayModel:
    """A recording as a model. Prompts may differ from the recorded ones: timings are other on every
    machine.

    Raises:
        UsageError: the file cannot be read as a recording.
    """

    def __init__(self, file: Path) -> None:
        self.name = f"replay:{file.name}"
        self._replies = {line.step: line for line in read_recording(file)}

    def worst_cost_usd(self, request: Request) -> float | None:
        return 0.0

    def holds(self, step: str) -> bool:
        """Whether the step was recorded."""
        return step in self._replies

    def ask(self, request: Request) -> Reply:
        recorded = self._replies.get(request.step)
        if recorded is None or recorded.role != request.role:
            raise RecordingEndedError(
                f"the recording has no reply for {request.step}",
                "ask for fewer iterations, or begin a run with another --model",
            )
        # What it cost was paid in the recorded run, not in this one.
        usage = recorded.reply.usage.model_copy(update={"cost_usd": None})
        reply, clean = recorded.reply, Cleaner("")  # who made the file is not known
        return reply.model_copy(
            update={
                "text": clean.text(reply.text),
                "model": clean.line(reply.model, NAME_LIMIT),
                "stop_reason": clean.line(reply.stop_reason, NAME_LIMIT),
                "repairs": tuple(clean.line(each, MESSAGE_LIMIT) for each in reply.repairs),
                "source": "recorded",
                "usage": usage,
            }
        )


def read_recording(file: Path) -> list[RecordedReply]:
    """Every line of a recording, which may be compressed (`*.xz`).

    Raises:
        UsageError: the file cannot be read, or a line is no recorded reply.
    """
    try:
        # Not splitlines(): a reply may hold U+2028, which JSON does not escape.
        lines = content(file).decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the recording {file}", "give a file written by a run"
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(RecordedReply.model_validate_json(line))
            except ValidationError as error:
                raise UsageError(
                    f"line {number} of the recording {file.name} is no recorded reply",
                    "give a file written by a run",
                ) from error
    if not found:
        raise UsageError(f"the recording {file.name} is empty", "give a file written by a run")
    return found


def export_recording(run_dir: Path, file: Path) -> int:
    """Write every reply of a run as a recording; returns how many.

    Raises:
        UsageError: not a run, or it holds no reply.
        VerificationError: a stored reply was changed.
    """
    run = Run.open(run_dir, read_only=True)
    lines = []
    for name, data in run.state.results.items():
        if data["record"] == journal_name(ModelCall):
            asked = run.load(name, ModelCall)
            request = asked.request
            line = RecordedReply(
                step=request.step,
                role=request.role,
                prompt_digest=request.digest,
                system=request.system,
                prompt=request.prompt,
                reply=asked.reply,
            )
            lines.append(line.model_dump_json())
    if not lines:
        raise UsageError(f"run {run.id} holds no reply", "record a run that asked a model")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)
