"""Tripwires: what a source is noticed for. They ask for evidence and never decide.

The rules are data, in the TOML file beside this one. By themselves they refuse nothing: only a
user's own policy does.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Literal

from pydantic import Field, field_validator

from patcher.bench.errors import UsageError
from patcher.bench.judge.stripping import Views, views
from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.records import Record

LONGEST = 1 << 18
"""Characters that rules look at, which bounds what hostile text can cost; a policy sees all."""
SHOWN = 3
"""Lines of one kind that are named."""
NONDETERMINISTIC = re.compile(r"patcher:[ \t]{0,8}nondeterministic\b")
"""See `patcher.bench.ops.contract.Guards.deterministic`."""


class TripwireRule(Record):
    """One `[[rule]]`. Several may share a name: the same matter in different languages."""

    name: str
    level: Literal["note", "evidence"]
    pattern: str
    says: str
    languages: tuple[Language, ...] = tuple(Language)
    where: Literal["code", "text", "all"] = Field("code", alias="in")
    hits: tuple[str, ...] = Field(min_length=1)
    misses: tuple[str, ...] = Field(min_length=1)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.VERBOSE | re.MULTILINE)

    def lines(self, seen: Views) -> list[int]:
        """The first lines, from 1, on which it matches."""
        text: str = getattr(seen, self.where)
        return _lines(self.regex, text[:LONGEST])


class TripwirePolicy(Record):
    """What a user forbids, demands or does not want to hear of: `[tripwires]` in `patcher.toml`.

    Patterns are regular expressions over the source without its comments; `^` is a line's start.

    Raises:
        UsageError: a pattern is no regular expression, or no rule has that name.
    """

    banned: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    """Names of rules."""

    @field_validator("banned", "required")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern, re.MULTILINE)
            except re.error as error:
                raise UsageError(
                    f"tripwires: {pattern!r} is not a regular expression: {error}",
                    "correct it under [tripwires] in patcher.toml",
                ) from error
        return patterns

    @field_validator("ignore")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = sorted({rule.name for rule in rules()})
        if unknown := [name for name in names if name not in known]:
            raise UsageError(
                f"tripwires: no rule is called {unknown[0]!r}", f"rules: {', '.join(known)}"
            )
        return names

    def broken_by(self, seen: Views) -> Iterable[str]:
        for pattern in self.banned:
            if lines := _lines(re.compile(pattern, re.MULTILINE), seen.text):
                yield f"the policy bans {pattern!r}: {_at(lines)}"
        for pattern in self.required:
            if not re.search(pattern, seen.text, re.MULTILINE):
                yield f"the policy requires {pattern!r}, which is not in the source"


@dataclass(frozen=True)
class TripwireHit:
    rule: TripwireRule
    lines: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.rule.name} ({self.rule.level}, {_at(self.lines)}): {self.rule.says}"


@dataclass(frozen=True)
class Tripwires:
    """What one source was noticed for."""

    found: tuple[TripwireHit, ...] = ()
    refused: tuple[str, ...] = ()
    """Why the user's policy does not let it in."""
    declares_nondeterminism: bool = False
    cut: bool = False
    """The source is longer than rules look."""

    @property
    def evidence(self) -> int:
        """How many more rounds of correctness cases the judge should see."""
        return int(self.cut or any(found.rule.level == "evidence" for found in self.found))

    def said(self) -> tuple[str, ...]:
        cut = (f"long (evidence): only {LONGEST:,} characters of it were looked at",) * self.cut
        return (*map(str, self.found), *cut)


@cache
def rules() -> tuple[TripwireRule, ...]:
    text = resources.files("patcher.bench.judge").joinpath("tripwires.toml").read_text("utf-8")
    return tuple(TripwireRule.model_validate(rule) for rule in tomllib.loads(text)["rule"])


def look(candidate: Candidate, on: bool, policy: TripwirePolicy | None = None) -> Tripwires:
    """Look at a source; `on` is false: only at whether it declares to be nondeterministic."""
    declared = NONDETERMINISTIC.search(candidate.source) is not None
    if not on:
        return Tripwires(declares_nondeterminism=declared)
    policy = policy or TripwirePolicy()
    seen = views(candidate.source, candidate.language)
    found = [
        TripwireHit(rule, tuple(lines))
        for rule in rules()
        if candidate.language in rule.languages
        and rule.name not in policy.ignore
        and (lines := rule.lines(seen))
    ]
    cut = len(candidate.source) > LONGEST
    return Tripwires(tuple(found), tuple(policy.broken_by(seen)), declared, cut)


def _lines(pattern: re.Pattern[str], text: str) -> list[int]:
    lines: list[int] = []
    line, counted, at = 1, 0, 0
    while len(lines) <= SHOWN and (match := pattern.search(text, at)):
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        lines.append(line)
        at = text.find("\n", counted) + 1 or len(text)
    return lines


def _at(lines: Iterable[int]) -> str:
    first = [str(line) for line in lines]
    word = "line" if len(first) == 1 else "lines"
    more = ", ..." if len(first) > SHOWN else ""
    return f"{word} {', '.join(first[:SHOWN])}{more}"
