"""Language models behind one small protocol: the Anthropic API, files, or a recording."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from bench import SCHEMA_VERSION, PatcherError, Record, UsageError

Role = Literal["generate", "analyse", "diagnose"]


class Request(Record):
    """One question, whole: models keep no memory of earlier ones."""

    step: str
    """The step of the run that asks, e.g. `fused_add_rms_norm/0/ask-generate`."""
    role: Role
    system: str
    prompt: str
    max_tokens: int
    """Ceiling on output tokens, thinking included."""

    @property
    def digest(self) -> str:
        """sha256 of role, system and prompt."""
        return hashlib.sha256("\0".join((self.role, self.system, self.prompt)).encode()).hexdigest()


class Usage(Record):
    """What a reply took. None where the provider does not say."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None
    """By list price; None when no price is known or nothing was paid."""

    def __add__(self, other: Usage) -> Usage:
        def total(a: float | None, b: float | None) -> float | None:
            return None if a is None and b is None else (a or 0) + (b or 0)

        return Usage.model_validate(
            {name: total(getattr(self, name), getattr(other, name)) for name in Usage.model_fields}
        )


class Reply(Record):
    """What a model answered."""

    text: str
    model: str
    """The model that wrote it, as the provider names it."""
    usage: Usage
    stop_reason: str
    """`end_turn`, `max_tokens`, `refusal`, ... as the Messages API names them."""
    source: Literal["api", "exchange", "recorded"]
    prompt_digest: str
    """`Request.digest` of the prompt that the reply was written for; a recording may answer a
    slightly different one."""

    @property
    def truncated(self) -> bool:
        return self.stop_reason in ("max_tokens", "model_context_window_exceeded")


class Asked(Record):
    """A question and its answer, as stored: the artefact of an `ask` step."""

    schema_version: int = SCHEMA_VERSION
    request: Request
    reply: Reply


class ModelError(PatcherError):
    """The provider failed in a way that another try may cure: overload, rate limit, network, a
    broken stream."""

    kind: ClassVar[str] = "model"

    def __init__(self, message: str, hint: str = "", *, charged: bool = False) -> None:
        super().__init__(message, hint)
        self.charged = charged
        """Whether the provider may have billed the failed call."""


class Model(Protocol):
    """A language model. `ask` raises `WaitingError` when the answer comes later, from outside."""

    @property
    def name(self) -> str: ...

    def worst_cost_usd(self, request: Request) -> float | None:
        """The most that `ask` can cost; 0 when nothing is paid, None when no price is known."""
        ...

    def ask(self, request: Request) -> Reply: ...


PROVIDERS = {
    "anthropic[:MODEL]": "the Anthropic API; needs ANTHROPIC_API_KEY",
    "exchange[:DIR]": "prompts are written to DIR as files, replies are read from there",
    "replay:FILE": "replies recorded in an earlier run",
}
"""How a model is named, and what it is."""


def open_model(spec: str, run_dir: Path) -> Model:
    """The model that `spec` names (see `PROVIDERS`); `exchange` without a folder uses `exchange/`
    in the run.

    Raises:
        UsageError: no such provider, or an unreadable recording.
        MissingError: no API key.
    """
    provider, _, rest = spec.partition(":")
    match provider:
        case "anthropic":
            from patcher.models.anthropic import AnthropicModel

            return AnthropicModel(rest or None)
        case "exchange":
            from patcher.models.exchange import ExchangeModel

            return ExchangeModel(Path(rest) if rest else run_dir / "exchange")
        case "replay" if rest:
            from patcher.models.replay import ReplayModel

            return ReplayModel(Path(rest))
    raise UsageError(f"unknown model {spec!r}", f"a model is one of: {', '.join(PROVIDERS)}")


__all__ = [
    "PROVIDERS",
    "Asked",
    "Model",
    "ModelError",
    "Reply",
    "Request",
    "Role",
    "Usage",
    "open_model",
]
