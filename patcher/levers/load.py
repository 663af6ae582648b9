"""The user's levers with what their files hold when a run begins, which is a record of that run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from patcher.bench import SCHEMA_VERSION, Record, UsageError
from patcher.bench.judge import TripwirePolicy
from patcher.bench.machine.environment import names_secret
from patcher.levers.record import (
    AuxiliaryLever,
    LeverScope,
    PromptLever,
    ScoreLever,
    TripwireSettings,
)
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


class PromptText(LeverScope):
    """Text of the user's for prompts, as it was when the run began."""

    how: Literal["append", "override"]
    text: str


class AuxiliaryText(LeverScope):
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
    words: tuple[PromptText, ...] = ()
    auxiliary: tuple[AuxiliaryText, ...] = ()
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
        words.append(PromptText(how=how, text=text, **_where(each)))
    auxiliary = []
    for lever in map(AuxiliaryLever.model_validate, settings.get("auxiliary", ())):
        text = _read(base, lever.file)
        digest = hashlib.sha256(text.encode()).hexdigest()
        auxiliary.append(
            AuxiliaryText(
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


def _where(lever: LeverScope) -> dict[str, Any]:
    return {name: getattr(lever, name) for name in LeverScope.model_fields}


def _rules_of(policy: TripwirePolicy) -> str:
    lines = [f"- It must not match `{pattern}`." for pattern in policy.banned]
    lines += [f"- It must match `{pattern}`." for pattern in policy.required]
    head = "# The user's rules\nRegular expressions over the source without its comments:\n"
    return head + "\n".join(lines) if lines else ""


def _shown(auxiliary: AuxiliaryText) -> str:
    tag = auxiliary.name.rpartition(".")[2]
    says = f"{auxiliary.says}\n" if auxiliary.says else ""
    return f"# A source of the user's: `{auxiliary.name}`\n{says}{quote(auxiliary.text, tag)}"


def _read(base: Path, file: Path) -> str:
    path = base / os.path.expanduser(file)
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
