"""Limits that a server names when it refuses a request: read once, then kept to, also by later
runs: a small file for each server and model in `limits/` of `PATCHER_HOME`."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field

from patcher.bench import (
    SCHEMA_VERSION,
    PatcherError,
    Record,
    UsageError,
    parse_json,
    problem,
    require_file,
)
from patcher.integrate import home_store
from patcher.runs import durable
from patcher.visible import one_line

LEAST_ROOM = 1024
"""With less room than this, in tokens, nothing is asked."""
CHARACTERS_PER_TOKEN = 3
"""Fewer than in most prompts; a guess that is wrong costs one refusal."""
KEPT_FOR = timedelta(days=30)
"""Servers change: what one named earlier is no longer kept to."""
MOST_FILES = 200
_MOST_BYTES, _MOST_TOKENS = 4096, 1 << 30
_SUM = re.compile(r"(\d+) \+ (\d+) > (\d+)")
_CONTEXT = re.compile(r"context (?:length|limit|window|size)\D{0,20}(\d+)")
_PROMPT = re.compile(
    r"(at least )?(\d+) (?:tokens )?"
    r"(?:in the messages|in the prompt|from the input|of text input|input tokens|tokens of input)"
    r"|prompt (?:contains|has|of)( at least)? (\d+)|request \((\d+) tokens\)"
)
_OUTPUT = re.compile(r"max_(?:completion_|output_|new_)?tokens|(?:output|completion) tokens")


@dataclass(frozen=True)
class NamedLimit:
    """What a refusal names."""

    room: int
    """For the reply to this very prompt, in tokens."""
    context: int | None = None
    """For prompt and reply together, in tokens, if that is what it names."""


def named_limit(message: str, room: int, prompt_tokens: int = 0) -> NamedLimit | None:
    """The limit that a server names as it refuses a request with `room` tokens for the reply; None
    where it names none, or none that is of use.

    Args:
        prompt_tokens: an estimate, for a server that did not count the prompt to its end.
    """
    said = re.sub(r"(?<=\d),(?=\d{3})", "", message[:2000])
    found, context = 0, None
    if match := _SUM.search(said):  # prompt + room > context
        context = int(match[3])
        found = context - int(match[1])
    elif match := _CONTEXT.search(said):
        context = int(match[1])
        prompt = _PROMPT.search(said)
        counted = int(prompt[2] or prompt[4] or prompt[5]) if prompt else 0
        found = context - counted if prompt else 0
        if prompt_tokens and (not prompt or prompt[1] or prompt[3]):
            # it has at least so many: where that is more than the estimate, half of the rest
            most = context - counted
            found = context - prompt_tokens if counted < prompt_tokens else most // 2
            found = max(found, min(LEAST_ROOM, most))
    elif _OUTPUT.search(said):
        numbers = (int(number) for number in re.findall(r"\d{1,9}", said))
        found = max((number for number in numbers if number < room), default=0)
    return NamedLimit(found, context) if LEAST_ROOM <= found < room else None


class KnownLimits(Record):
    """What a server named for one of its models."""

    schema_version: int = SCHEMA_VERSION
    server: str = Field(min_length=1, max_length=500)
    """Its address."""
    model: str = Field(min_length=1, max_length=500)
    max_output_tokens: int | None = Field(default=None, ge=LEAST_ROOM, le=_MOST_TOKENS)
    context_tokens: int | None = Field(default=None, ge=LEAST_ROOM, le=_MOST_TOKENS)
    """Of prompt and reply together."""
    named_on: date


@dataclass(frozen=True)
class LimitsFile:
    """The file of one server and model."""

    server: str
    model: str

    @classmethod
    def of(cls, address: str, model: str) -> LimitsFile:
        """Of the server at an address, in which nothing but the place counts."""
        parts = urlsplit(address)
        return cls(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}", model)

    @property
    def path(self) -> Path:
        """
        Raises:
            UsageError: a file is in the place of `PATCHER_HOME`.
        """
        digest = hashlib.sha256(f"{self.server}\n{self.model}".encode()).hexdigest()
        return home_store().root / "limits" / f"{digest[:32]}.json"

    def read(self) -> KnownLimits | None:
        """What the server named lately; None if nothing.

        Raises:
            UsageError: the file is damaged, or another's.
        """
        path = self.path
        known = _read(path) if path.is_symlink() or path.exists() else None
        if known and (known.server, known.model) != (self.server, self.model):
            raise _damaged(path, "it is of another server or model")
        return known if known and is_recent(known) else None

    def keep(self, max_output_tokens: int | None, context_tokens: int | None) -> None:
        """Write down what the server named; what is None stays as it was.

        Raises:
            PatcherError: it cannot be written.
        """
        try:
            known = self.read()
        except UsageError:
            known = None  # it is replaced
        new = KnownLimits(
            server=self.server,
            model=self.model,
            max_output_tokens=max_output_tokens or (known.max_output_tokens if known else None),
            context_tokens=context_tokens or (known.context_tokens if known else None),
            named_on=_today(),
        )
        path = self.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_whole(path, new.model_dump_json(indent=1, exclude_none=True) + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}", "set PATCHER_HOME to a writable folder"
            ) from error


def list_limits() -> tuple[list[KnownLimits], list[str]]:
    """All that servers named, and what is wrong with files that are passed over."""
    found: list[KnownLimits] = []
    problems: list[str] = []
    try:
        files = sorted((home_store().root / "limits").glob("*.json"))
    except (PatcherError, OSError) as error:
        return [], [problem(error)]
    for path in files[:MOST_FILES]:
        try:
            found.append(_read(path))
        except UsageError as error:
            problems.append(error.message)
    return sorted(found, key=lambda each: (each.server, each.model)), problems


def is_recent(known: KnownLimits) -> bool:
    """Whether it is still kept to."""
    return timedelta(days=-1) <= _today() - known.named_on <= KEPT_FOR


def _read(path: Path) -> KnownLimits:
    try:
        require_file(path)
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)  # a longer one is cut, and no JSON
        return KnownLimits.model_validate(parse_json(content))
    except (OSError, ValueError, UsageError) as error:  # of pydantic, too
        raise _damaged(path, problem(error)) from None


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path} is passed over: {one_line(what, 200)}", "remove it: it is written anew"
    )


def _today() -> date:
    return datetime.now(UTC).date()
