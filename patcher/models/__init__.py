"""Language models behind one small protocol: two APIs, files, or a recording."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from pydantic import Field, JsonValue

from patcher.bench import (
    SCHEMA_VERSION,
    PatcherError,
    Record,
    Registry,
    UsageError,
    VerificationError,
)

if TYPE_CHECKING:
    from patcher.models.registry import ModelEntry

Role = Literal["generate", "analyse", "diagnose"]


TOKENS_CEILING = 128_000
"""The most room that a reply is ever given, in tokens."""
PROMPT_TOKENS = 24_000
"""Room of a prompt in tokens, unless the user says otherwise."""

_PNG = b"\x89PNG\r\n\x1a\n"
MAX_IMAGE_BYTES = 3 << 20
"""APIs take about 5 MB of base64 an image."""


class Image(Record):
    """A PNG file of the run, e.g. a picture of a profile."""

    file: str
    """Relative to the run's folder."""
    digest: str
    """sha256 of its bytes."""
    width: int
    height: int

    @classmethod
    def of(cls, run_dir: Path, file: str) -> Image:
        """The image in a run's file.

        Raises:
            UsageError: no such file in the run, no PNG, or too large for an API.
        """
        path = (run_dir / file).resolve()
        hint = "give a PNG file of the run"
        if not (path.is_relative_to(run_dir.resolve()) and path.is_file()):
            raise UsageError(f"the run has no file {file}", hint)
        content = path.read_bytes()
        if content[:8] != _PNG or content[12:16] != b"IHDR":
            raise UsageError(f"{file} is not a PNG image", hint)
        if len(content) > MAX_IMAGE_BYTES:
            raise UsageError(f"{file} is over {MAX_IMAGE_BYTES >> 20} MiB", "make it smaller")
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        digest = hashlib.sha256(content).hexdigest()
        return cls(file=file, digest=digest, width=width, height=height)

    def read(self, run_dir: Path) -> bytes:
        """Its bytes.

        Raises:
            VerificationError: the file is gone or was changed.
        """
        path = run_dir / self.file
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise VerificationError(
                f"{self.file} was changed after it was asked about", "start a new run"
            )
        return content


class Request(Record):
    """One question, whole: models keep no memory of earlier ones."""

    step: str
    """The step of the run that asks, e.g. `fused_add_rms_norm/0/ask-generate`."""
    role: Role
    system: str
    prompt: str
    max_tokens: int
    """Ceiling on output tokens, thinking included."""
    images: tuple[Image, ...] = ()
    """Shown before the prompt; `sees_images` says which models take any."""
    head: int = Field(default=0, ge=0)
    """Characters at the beginning of the prompt that later questions begin with, too: a provider
    may keep them in a cache."""
    answer_schema: dict[str, JsonValue] | None = None
    """JSON schema of the answer, for servers that hold a reply to one; None: any text."""

    @property
    def digest(self) -> str:
        """sha256 of role, system, prompt and images."""
        parts = (self.role, self.system, self.prompt, *(image.digest for image in self.images))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Usage(Record):
    """What a reply took. None where the provider does not say."""

    input_tokens: int | None = Field(default=None, ge=0)
    output_tokens: int | None = Field(default=None, ge=0)
    cached_tokens: int | None = Field(default=None, ge=0)
    """Of the input, read from a cache of the provider."""
    cost_usd: float | None = Field(default=None, ge=0, allow_inf_nan=False)
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
    """`end_turn`, `max_tokens`, `refusal`, ... as the Messages API names them; `too_long`: more
    came than any reply may have."""
    source: Literal["api", "exchange", "recorded"]
    prompt_digest: str
    """`Request.digest` of the prompt that the reply was written for; a recording may answer a
    slightly different one."""
    repairs: tuple[str, ...] = ()
    """What of the server's was not as it should be, and how it was read instead."""
    received_characters: int | None = None
    """Of text and thinking, also of what was not kept."""

    @property
    def truncated(self) -> bool:
        return self.stop_reason in ("max_tokens", "model_context_window_exceeded")


class ModelCall(Record):
    """A question and its answer, as stored: the artefact of an `ask` step."""

    recorded_as: ClassVar[str] = "Asked"

    schema_version: int = SCHEMA_VERSION
    request: Request
    reply: Reply


Trouble = Literal[
    "rate_limit", "overloaded", "server", "timeout", "network", "broken", "refused", "expired"
]
"""How a call failed: `broken` is a reply that could not be read to its end, `refused` and `expired`
are questions of a batch that asked for more than the server has, or came too late."""


class ModelError(PatcherError):
    """The provider failed in a way that another try may cure (`patcher.models.retry` says when)."""

    kind: ClassVar[str] = "model"
    exit_code: ClassVar[int] = 2

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        trouble: Trouble = "server",
        charged: bool = False,
        retry_after_s: float | None = None,
        received_characters: int = 0,
    ) -> None:
        super().__init__(message, hint)
        self.trouble: Trouble = trouble
        self.charged = charged
        """Whether the provider may have billed the failed call."""
        self.retry_after_s = retry_after_s
        """How long the provider wants to be left alone."""
        self.received_characters = received_characters
        """Of the text that came before it failed."""


class Model(Protocol):
    """A language model. `ask` raises `WaitingError` when the answer comes later, from outside."""

    @property
    def name(self) -> str: ...

    def worst_cost_usd(self, request: Request) -> float | None:
        """The most that `ask` can cost; 0 when nothing is paid, None when no price is known."""
        ...

    def ask(self, request: Request) -> Reply: ...


MODELS: Registry[Callable[..., Model]] = Registry("models")
"""Classes of models by provider; each is imported when it is asked for, as each brings an SDK that
others do not need. One of another package is called with what follows the colon of `NAME:...` and
the run's folder, and returns a `Model`."""
PROVIDERS = {
    "anthropic[:MODEL]": "the Anthropic API; needs ANTHROPIC_API_KEY",
    "openai:MODEL": "the OpenAI API, or any server like it at OPENAI_BASE_URL; OPENAI_API_KEY",
    "exchange[:DIR]": "prompts are written to DIR as files, replies are read from there",
    "replay:FILE": "replies recorded in an earlier run",
    "NAME": "a model of your own: [models.NAME] in patcher.toml",
}
"""How a model is named, and what it is."""


def open_model(spec: str, run_dir: Path, registry: Mapping[str, ModelEntry] | None = None) -> Model:
    """The model that `spec` names (see `PROVIDERS`); `exchange` without a folder uses `exchange/`
    in the run. `registry` is `Settings.models`: its names come before those of other packages.

    Raises:
        UsageError: no such provider, or an unreadable recording.
        MissingError: no API key.
    """
    from patcher.models.registry import entry_of

    provider, _, rest = spec.partition(":")
    if provider == "exchange":
        folder = Path(rest) if rest else run_dir / "exchange"
        return MODELS.load("exchange")(folder, run_dir)
    if provider == "replay" and rest:
        return MODELS.load("replay")(Path(rest))
    entry = entry_of(spec, registry or {})
    if entry is not None:
        return MODELS.load(entry.provider)(entry, run_dir)
    if provider in MODELS and not MODELS.ours(provider):
        return MODELS.load(provider)(rest, run_dir)
    raise unknown_model(spec, registry or {})


def unknown_model(spec: str, registry: Mapping[str, ModelEntry]) -> UsageError:
    """What to say of a model that nothing provides."""
    brought = [f"{each}[:...]" for each in MODELS if not MODELS.ours(each)]
    known = ", ".join((*PROVIDERS, *registry, *brought))
    return UsageError(f"unknown model {spec!r}", f"a model is one of: {known}")


def sees_images(model: Model) -> bool:
    """Whether the model takes images; one that does not refuses a request that has some."""
    return bool(getattr(model, "images", False))


__all__ = [
    "MODELS",
    "PROMPT_TOKENS",
    "PROVIDERS",
    "TOKENS_CEILING",
    "Image",
    "Model",
    "ModelCall",
    "ModelError",
    "Reply",
    "Request",
    "Role",
    "Trouble",
    "Usage",
    "open_model",
    "sees_images",
    "unknown_model",
]
