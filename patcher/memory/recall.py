"""From what is remembered to the block of text that a prompt carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from patcher.bench import SCHEMA_VERSION, Record
from patcher.memory.entries import Gain, MemoryRule
from patcher.memory.learn import Where
from patcher.prompting.quoting import quote

CHARACTERS = 3000
"""Of the block; half may be rules."""
_RULES = "Of earlier runs here, each seen in several candidates:"
_GAINS = (
    "Measured in earlier runs here (gain: time before over time after; below 1 it was slower; "
    "what helped elsewhere may not help here):"
)


class MemoryText(Record):
    """What a run was told of earlier ones: stored with it, so that resuming reads the same."""

    recorded_as: ClassVar[str] = "Recalled"

    schema_version: int = SCHEMA_VERSION
    text: str = ""
    """Markdown; empty when nothing is remembered that fits."""
    rules: tuple[str, ...] = ()
    """Ids of what the text holds."""
    techniques: tuple[str, ...] = ()


def recall(rules: Sequence[MemoryRule], gains: Sequence[Gain], where: Where) -> MemoryText:
    """What fits the work best, most relevant first, in at most `CHARACTERS`."""
    fitting = [rule for rule in rules if rule.promoted and rule.language in (None, where.language)]
    fitting.sort(key=lambda rule: (_near_rule(rule, where), rule.count), reverse=True)
    told_rules, first = _within(CHARACTERS // 2, [(rule.id, _rule_line(rule)) for rule in fitting])
    measured = [
        gain
        for gain in gains
        if not gain.muted and (gain.count or gain.failed) and _same_kind(gain, where)
    ]
    measured.sort(key=lambda gain: (_near(gain, where), gain.gain, gain.count), reverse=True)
    told_gains, second = _within(
        CHARACTERS - len(first) - 600, [(gain.id, _gain_line(gain)) for gain in measured]
    )
    parts = []
    if first:
        parts.append(f"{_RULES}\n{first}")
    if second:
        table = "| technique | op family | bytes of a call | device | language | gain | seen |"
        rows = f"{table}\n| --- | --- | --- | --- | --- | ---: | --- |\n{second}"
        # what models called a change, in part: to read, not to obey
        parts.append(f"{_GAINS}\n{quote(rows)}")
    return MemoryText(text="\n\n".join(parts), rules=told_rules, techniques=told_gains)


def _within(room: int, lines: Iterable[tuple[str, str]]) -> tuple[tuple[str, ...], str]:
    names: list[str] = []
    told = ""
    for name, line in lines:
        if len(told) + len(line) < room:
            names.append(name)
            told += line + "\n"
    return tuple(names), told.rstrip("\n")


def _same_kind(gain: Gain, where: Where) -> bool:
    if where.architecture == "unknown":  # judged elsewhere
        return gain.language == where.language
    return (gain.architecture == "cpu") == (where.architecture == "cpu")


def _near(gain: Gain, where: Where) -> tuple[int, bool]:
    same_family = gain.family == where.family
    same_device = (gain.architecture == where.architecture) + (gain.device == where.device)
    return 3 * same_family + same_device, gain.language == where.language


def _near_rule(rule: MemoryRule, where: Where) -> int:
    near = where.family in rule.families or not rule.families
    return 2 * near + (where.architecture in rule.architectures or not rule.architectures)


def _rule_line(rule: MemoryRule) -> str:
    return f"- {rule.text[0].upper()}{rule.text[1:]} ({rule.count} times)."


def _gain_line(gain: Gain) -> str:
    if gain.count == 0:
        worth = "-"
    elif gain.count == 1:
        worth = f"{gain.gain:.3f}"
    else:
        worth = f"{gain.gain:.3f} ± {gain.spread_pct:.1f} %"
    seen = f"{gain.count} right" + (f", {gain.failed} broken" if gain.failed else "")
    cells = (
        gain.text,
        gain.family,
        gain.shapes,
        gain.device,
        gain.language or "any",
        worth,
        seen,
    )
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
