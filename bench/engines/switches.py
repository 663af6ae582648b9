"""What people switch on in an engine, as data (`switches.toml`), and what of it can be tried."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources

from pydantic import Field, JsonValue

from patcher.bench.errors import UsageError
from patcher.bench.records import Record
from patcher.bench.workload import Workload

Ways = tuple[dict[str, JsonValue], ...]
DRAFT = "{draft}"


class EngineSwitch(Record):
    """An option that people switch on or off."""

    summary: str
    ways: Ways = Field(min_length=1)
    """Arguments to try; `{draft}` stands for a draft model."""
    exact: bool = True
    """Whether outputs stay what they are, but for rounding."""
    speculates: bool = False
    """Whether its gain depends on how predictable the text is."""

    @property
    def drafts(self) -> bool:
        """Whether it needs a draft model."""
        return any(DRAFT in _texts(way) for way in self.ways)


class RefusedOption(Record):
    """An option of the engine that was not tried."""

    name: str
    reason: str


@cache
def switches() -> dict[str, dict[str, EngineSwitch]]:
    """All switches by engine and name."""
    text = (
        resources.files("patcher.bench.engines")
        .joinpath("switches.toml")
        .read_text(encoding="utf-8")
    )
    return {
        engine: {name: EngineSwitch(**fields) for name, fields in those.items()}
        for engine, those in tomllib.loads(text).items()
    }


def ways_to_try(
    workload: Workload, asked: Sequence[str], draft: str | None
) -> tuple[tuple[Ways, ...], tuple[RefusedOption, ...]]:
    """The options to try on top of each other, each with its ways, and why others are not tried.

    Args:
        asked: names of switches; none: those that can be tried and keep the outputs.
        draft: a draft model for speculation, a folder or an id.

    Raises:
        UsageError: the engine has no such switch, or a draft model is given that none needs.
    """
    known = switches().get(workload.engine, {})
    if unknown := [name for name in asked if name not in known]:
        listed = ", ".join(known) or "none"
        raise UsageError(
            f"{workload.engine} has no switch {unknown[0]!r} here", f"switches are: {listed}"
        )
    tried: list[Ways] = []
    refused: list[RefusedOption] = []
    drafted = False
    for name, switch in known.items():
        if asked and name not in asked:
            continue
        why = _refusal(switch, workload, name in asked, draft)
        if why is not None:
            refused.append(RefusedOption(name=name, reason=why))
            continue
        drafted |= switch.drafts
        tried.append(
            tuple({key: _filled(value, draft) for key, value in way.items()} for way in switch.ways)
        )
    if draft is not None and not drafted:
        raise UsageError("no switch that is tried needs a draft model", "give --switch eagle3")
    return tuple(tried), tuple(refused)


def _refusal(
    switch: EngineSwitch, workload: Workload, asked: bool, draft: str | None
) -> str | None:
    if switch.speculates and workload.weights == "random":
        return "weights are random: how much speculation saves depends on the text of a real model"
    if switch.drafts and draft is None:
        return "it needs a draft model: --draft MODEL"
    if not switch.exact and not asked:
        return "it changes outputs, so it is tried only where it is named"
    return None


def _texts(value: JsonValue) -> Iterable[str]:
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from _texts(each)
        case _:
            return


def _filled(value: JsonValue, draft: str | None) -> JsonValue:
    match value:
        case str():
            return draft if value == DRAFT else value
        case dict():
            return {key: _filled(each, draft) for key, each in value.items()}
        case _:
            return value
