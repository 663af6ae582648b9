"""Tripwires: patterns in a source that call for more evidence. They never decide.

The rules are data in `tripwires.toml`. They reject nothing by themselves; only a user's policy
rejects a source.
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
"""Most characters that rules search, which bounds the cost of hostile text. A policy searches
all."""
SHOWN = 3
"""Most line numbers shown per hit."""
NONDETERMINISTIC = re.compile(r"patcher:[ \t]{0,8}nondeterministic\b")
"""See `patcher.bench.ops.contract.Guards.deterministic`."""


class TripwireRule(Record):
    """One `[[rule]]`. Rules for the same matter in different languages may share a name."""

    name: str
    """Name of the rule."""
    level: Literal["note", "evidence"]
    """`evidence` asks for more rounds of correctness cases; `note` is only reported."""
    pattern: str
    """Verbose regular expression."""
    says: str
    """What a hit means."""
    languages: tuple[Language, ...] = tuple(Language)
    """Languages that the rule applies to."""
    where: Literal["code", "text", "all"] = Field("code", alias="in")
    """View of the source to search, see `Views`."""
    hits: tuple[str, ...] = Field(min_length=1)
    """Examples that the rule matches."""
    misses: tuple[str, ...] = Field(min_length=1)
    """Examples that the rule does not match."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.pattern, re.VERBOSE | re.MULTILINE)

    def lines(self, seen: Views) -> list[int]:
        """Numbers, from 1, of the first lines that match."""
        text: str = getattr(seen, self.where)
        return _lines(self.regex, text[:LONGEST])


class TripwirePolicy(Record):
    """Patterns that a user bans, requires or ignores: `[tripwires]` in `patcher.toml`.

    Patterns are regular expressions over the source without comments; `^` matches at the start of
    a line.

    Raises:
        UsageError: a pattern is no regular expression, or no rule has that name.
    """

    banned: tuple[str, ...] = ()
    """Patterns that must not match."""
    required: tuple[str, ...] = ()
    """Patterns that must match."""
    ignore: tuple[str, ...] = ()
    """Names of rules to leave out."""

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
        """Yield each violation of the policy by a source."""
        for pattern in self.banned:
            if lines := _lines(re.compile(pattern, re.MULTILINE), seen.text):
                yield f"the policy bans {pattern!r}: {_at(lines)}"
        for pattern in self.required:
            if not re.search(pattern, seen.text, re.MULTILINE):
                yield f"the policy requires {pattern!r}, which is not in the source"


@dataclass(frozen=True)
class TripwireHit:
    """A rule that matched, with the numbers of the first matching lines."""

    rule: TripwireRule
    lines: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.rule.name} ({self.rule.level}, {_at(self.lines)}): {self.rule.says}"


@dataclass(frozen=True)
class Tripwires:
    """Tripwire results of one source."""

    hits: tuple[TripwireHit, ...] = ()
    """Rules that matched."""
    refused: tuple[str, ...] = ()
    """Violations of the user's policy, which reject the source."""
    declares_nondeterminism: bool = False
    """Whether the source declares itself nondeterministic."""
    cut: bool = False
    """Whether the source is longer than rules search."""

    @property
    def evidence(self) -> int:
        """Number of additional rounds of correctness cases."""
        return int(self.cut or any(hit.rule.level == "evidence" for hit in self.hits))

    def as_text(self) -> tuple[str, ...]:
        """The hits as text."""
        cut = (f"long (evidence): only {LONGEST:,} characters of it were looked at",) * self.cut
        return (*map(str, self.hits), *cut)


@cache
def rules() -> tuple[TripwireRule, ...]:
    """The rules of `tripwires.toml`."""
    text = resources.files("patcher.bench.judge").joinpath("tripwires.toml").read_text("utf-8")
    return tuple(TripwireRule.model_validate(rule) for rule in tomllib.loads(text)["rule"])


def look(candidate: Candidate, on: bool, policy: TripwirePolicy | None = None) -> Tripwires:
    """Search a source.

    Args:
        candidate: the source and its language.
        on: whether to apply rules and policy. If not, only a declaration of nondeterminism is read.
        policy: the user's policy; None: no policy.
    """
    declared = NONDETERMINISTIC.search(candidate.source) is not None
    if not on:
        return Tripwires(declares_nondeterminism=declared)
    policy = policy or TripwirePolicy()
    seen = views(candidate.source, candidate.language)
    hits = [
        TripwireHit(rule, tuple(lines))
        for rule in rules()
        if candidate.language in rule.languages
        and rule.name not in policy.ignore
        and (lines := rule.lines(seen))
    ]
    cut = len(candidate.source) > LONGEST
    return Tripwires(tuple(hits), tuple(policy.broken_by(seen)), declared, cut)


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
