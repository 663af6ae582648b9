"""A user's levers on what the agents read: text of their own, sources of their own, rules of their
own. All are settings; what their files held when a run began is a record of that run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from patcher.bench import SCHEMA_VERSION, Record, UsageError, load_op
from patcher.bench.judge import TripwirePolicy
from patcher.bench.machine.environment import names_secret
from patcher.models import Role
from patcher.prompting.quoting import quote

LARGEST_FILE = 64 << 10
"""Bytes of one file of the user's that a prompt may carry."""
LARGEST = 256 << 10
"""Bytes of all of them: every one is paid for with each question."""
PROMPT = "{{ prompt }}"
"""What stands for our own prompt in an override."""
_TASK = "\n# Your task\n"
_SHORTEST_SECRET = 12


def _iterations(value: object) -> object:
    """`2`, `[0, 2]` and `"0-3, 7-"` all as text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and all(type(each) is int for each in value):
        return ", ".join(map(str, value))
    return value


def _forwards(text: str) -> str:
    if any(last is not None and last < first for first, last in _spans(text)):
        raise ValueError("a span ends before it begins")
    return text


def _ops(names: object) -> object:
    for name in names if isinstance(names, list | tuple | dict) else ():
        load_op(str(name))
    return names


Iterations = Annotated[
    str,
    BeforeValidator(_iterations),
    Field(pattern=r"^\d{1,6}(-(\d{1,6})?)?(, ?\d{1,6}(-(\d{1,6})?)?)*$"),
    AfterValidator(_forwards),
]
"""From 0: `"0"`, `"0, 2-4"`, `"3-"`."""
Ops = Annotated[tuple[str, ...], BeforeValidator(_ops)]


class _Where(Record):
    """When a lever is pulled. What is left out means all."""

    agents: tuple[Role, ...] = ()
    iterations: Iterations | None = None
    ops: Ops = ()

    def covers(self, op: str, role: Role, iteration: int) -> bool:
        return (
            (not self.ops or op in self.ops)
            and (not self.agents or role in self.agents)
            and (
                self.iterations is None
                or any(
                    first <= iteration and (last is None or iteration <= last)
                    for first, last in _spans(self.iterations)
                )
            )
        )


class PromptLever(_Where):
    """One `[[prompts]]`: text for prompts, after our own or instead of it.

    Exactly one of `append`, `append_file`, `override` and `override_file`; in an override,
    `{{ prompt }}` stands for our own text.
    """

    append: str | None = Field(None, min_length=1)
    append_file: Path | None = None
    override: str | None = Field(None, min_length=1)
    override_file: Path | None = None

    @model_validator(mode="after")
    def _one(self) -> PromptLever:
        given = (self.append, self.append_file, self.override, self.override_file)
        if sum(each is not None for each in given) != 1:
            raise ValueError("give one of append, append_file, override and override_file")
        return self


class AuxiliaryLever(_Where):
    """One `[[auxiliary]]`: a source of the user's that the agents read."""

    file: Path
    says: str = Field("", max_length=500)
    """What it is for, in words for the agents."""


class ScoreLever(Record):
    """`[score]`: a script of the user's that says what a right candidate is worth."""

    script: Path
    timeout_s: float = Field(60.0, gt=0, le=3600)


class TripwireSettings(TripwirePolicy):
    """`[tripwires]`: what a source must not or must have; more for one op in
    `[tripwires.ops.NAME]`."""

    ops: Annotated[dict[str, TripwirePolicy], BeforeValidator(_ops)] = Field(default_factory=dict)

    def for_op(self, op: str) -> TripwirePolicy:
        more = self.ops.get(op, TripwirePolicy())
        return TripwirePolicy(
            banned=self.banned + more.banned,
            required=self.required + more.required,
            ignore=self.ignore + more.ignore,
        )


class Words(_Where):
    """Text of the user's for prompts, as it was when the run began."""

    how: Literal["append", "override"]
    text: str


class Auxiliary(_Where):
    """A source of the user's, as it was when the run began."""

    name: str
    """Of the file, without its folder."""
    says: str
    text: str
    digest: str
    """sha256 of the file."""


class Levers(Record):
    """What a run's prompts are changed by; a step of the run, so that resuming uses the same."""

    schema_version: int = SCHEMA_VERSION
    words: tuple[Words, ...] = ()
    auxiliary: tuple[Auxiliary, ...] = ()
    tripwires: TripwireSettings = TripwireSettings()

    def extra(self, op: str, role: Role, iteration: int, memory: str = "") -> str:
        """What a prompt carries besides: sources of the user's, then what earlier runs learned. It
        is cut from its end where a prompt's room is short."""
        sections = [_shown(each) for each in self.auxiliary if each.covers(op, role, iteration)]
        if memory:
            sections.append(f"# What earlier runs learned\n{memory}")
        return "\n\n".join(sections)

    def adapt(self, op: str, role: Role, iteration: int, text: str) -> str:
        """The prompt that is sent in place of `text`; nothing of it is cut."""
        if role == "generate":
            text = before_task(text, _rules_of(self.tripwires.for_op(op)))
        fitting = [each for each in self.words if each.covers(op, role, iteration)]
        for each in fitting:
            if each.how == "override":
                text = each.text.replace(PROMPT, text)
        for each in fitting:
            if each.how == "append":
                text = f"{text.rstrip()}\n\n{each.text.strip()}\n"
        return text


def load_levers(settings: Mapping[str, Any], folder: Path | None = None) -> Levers:
    """The levers of a run's settings, with what their files hold now.

    Args:
        settings: of the run, as `Settings.for_run` gives them.
        folder: what relative paths are relative to; None is where the process runs.

    Raises:
        UsageError: a file is not there, no text, too large, or holds a key of this environment.
    """
    base = folder or Path()
    words = []
    for each in map(PromptLever.model_validate, settings.get("prompts", ())):
        how: Literal["append", "override"] = (
            "append" if (each.append or each.append_file) else "override"
        )
        file = each.append_file or each.override_file
        text = _read(base, file) if file else each.append or each.override or ""
        words.append(Words(how=how, text=text, **_where(each)))
    auxiliary = []
    for lever in map(AuxiliaryLever.model_validate, settings.get("auxiliary", ())):
        text = _read(base, lever.file)
        digest = hashlib.sha256(text.encode()).hexdigest()
        auxiliary.append(
            Auxiliary(
                name=lever.file.name, says=lever.says, text=text, digest=digest, **_where(lever)
            )
        )
    texts = [each.text for each in words] + [each.text for each in auxiliary]
    total = sum(len(text.encode()) for text in texts)
    if total > LARGEST:
        raise UsageError(
            f"prompts and auxiliary sources hold {total:,} bytes; at most {LARGEST:,} may be sent",
            "leave out what the agents need not read",
        )
    for text in texts:
        if name := _holds_secret(text):
            raise UsageError(
                f"a text for prompts holds the value of {name}", "take it out: models are others'"
            )
    if score := settings.get("score"):
        _read(base, ScoreLever.model_validate(score).script)
    tripwires = TripwireSettings.model_validate(settings.get("tripwires", {}))
    return Levers(words=tuple(words), auxiliary=tuple(auxiliary), tripwires=tripwires)


def before_task(prompt: str, section: str) -> str:
    """The prompt with a section before its task, which stays last."""
    if not section:
        return prompt
    head, task, tail = prompt.rpartition(_TASK)
    return f"{head.rstrip()}\n\n{section}\n{task}{tail}" if task else f"{section}\n\n{prompt}"


def _spans(text: str) -> list[tuple[int, int | None]]:
    """First and last iteration of each part; a last of None is no end."""
    found: list[tuple[int, int | None]] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        found.append((int(first), int(last) if last else None if dash else int(first)))
    return found


def _where(lever: _Where) -> dict[str, Any]:
    return {name: getattr(lever, name) for name in _Where.model_fields}


def _rules_of(policy: TripwirePolicy) -> str:
    lines = [f"- It must not match `{pattern}`." for pattern in policy.banned]
    lines += [f"- It must match `{pattern}`." for pattern in policy.required]
    head = "# The user's rules\nRegular expressions over the source without its comments:\n"
    return head + "\n".join(lines) if lines else ""


def _shown(auxiliary: Auxiliary) -> str:
    tag = auxiliary.name.rpartition(".")[2]
    says = f"{auxiliary.says}\n" if auxiliary.says else ""
    return f"# A source of the user's: `{auxiliary.name}`\n{says}{quote(auxiliary.text, tag)}"


def _read(base: Path, file: Path) -> str:
    path = base / file.expanduser()
    hint = "correct patcher.toml, or bring the file"
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UsageError(f"{file} is no file", hint)
        if size > LARGEST_FILE:
            raise UsageError(
                f"{file} has {size:,} bytes; at most {LARGEST_FILE:,} may be sent", "cut it down"
            )
        return path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", hint) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text", hint) from error


def _holds_secret(text: str) -> str | None:
    """The name of a variable of this environment whose value, by its name a secret, is in it."""
    return next(
        (
            name
            for name, value in os.environ.items()
            if len(value) >= _SHORTEST_SECRET and names_secret(name) and value in text
        ),
        None,
    )
