"""What memory recognises: techniques in a recommendation, causes in what a tool says."""

from __future__ import annotations

import re
import tomllib
from functools import cache, cached_property
from importlib import resources

from pydantic import Field

from patcher.bench import Record


class _Known(Record):
    name: str
    says: str
    pattern: str
    hits: tuple[str, ...] = Field(min_length=1)
    misses: tuple[str, ...] = Field(min_length=1)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.VERBOSE | re.IGNORECASE)


class Technique(_Known):
    """One `[[technique]]` of `patterns.toml`: `says` what is done."""


class KnownFailure(_Known):
    """One `[[failure]]`: "you cannot `says` because `because`"."""

    because: str

    @property
    def text(self) -> str:
        return f"you cannot {self.says} because {self.because}"


@cache
def techniques() -> tuple[Technique, ...]:
    return tuple(Technique.model_validate(each) for each in _file()["technique"])


@cache
def failures() -> tuple[KnownFailure, ...]:
    return tuple(KnownFailure.model_validate(each) for each in _file()["failure"])


def technique_in(text: str) -> Technique | None:
    """The technique that a recommendation names first."""
    found = [(match.start(), each) for each in techniques() if (match := each.regex.search(text))]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def failure_in(text: str) -> KnownFailure | None:
    """The failure that a tool's words are known for."""
    return next((each for each in failures() if each.regex.search(text)), None)


@cache
def _file() -> dict[str, list[dict[str, object]]]:
    text = resources.files("patcher.memory").joinpath("patterns.toml").read_text("utf-8")
    return tomllib.loads(text)
