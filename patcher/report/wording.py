"""Format numbers and hostile text for people; shared by HTML, SVG and Markdown."""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime

from patcher.bench.stats.comparison import Verdict

_MINUS = "\N{MINUS SIGN}"
_GAP = "\N{NO-BREAK SPACE}"
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_NONE = "\N{EN DASH}"
_TIMES = "\N{MULTIPLICATION SIGN}"
_RAISED = {
    ord(plain): unicodedata.lookup(f"SUPERSCRIPT {name}")
    for plain, name in zip(
        "-0123456789",
        ["MINUS", "ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE"],
        strict=True,
    )
}

VERDICTS: dict[Verdict, str] = {
    "accept": "Accepted",
    "reject": "Rejected",
    "inconclusive": "Inconclusive",
}

TRIAGES = {
    "replace": "replace the kernel",
    "fuse": "fuse the launches",
    "configuration": "try configuration first",
    "closed": "no source: replace the call",
    "leave": "leave",
}
"""What to do about a hotspot, in the order of the legend; the key is the record's triage."""


def clip(text: str, limit: int) -> str:
    """At most `limit` characters, without the middle, since names differ at both ends."""
    if len(text) <= limit:
        return text
    tail = max(0, (limit - 1) // 3)
    return text[: limit - 1 - tail] + _ELLIPSIS + (text[-tail:] if tail else "")


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits with thousands separators: 0.00123, 13.4, 11,976."""
    if value is None:
        return _NONE
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}{_TIMES}10{str(int(exponent)).translate(_RAISED)}".replace("-", _MINUS)
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}".replace("-", _MINUS)


def count(value: float | None) -> str:
    """A count, with thousands separators; a fraction keeps one decimal."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def percent(value: float | None, digits: int = 2) -> str:
    if value is None:
        return _NONE
    return f"{value:.{digits}f}{_GAP}%".replace("-", _MINUS)


def signed_percent(value: float | None, digits: int = 2) -> str:
    """A gain: its sign is always shown."""
    if value is None:
        return _NONE
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return f"{text}{_GAP}%".replace("-", _MINUS)


def microseconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return _NONE
    if abs(value) >= 1e6:
        return f"{number(value / 1e6)}{_GAP}s"
    if abs(value) >= 1e3:
        return f"{number(value / 1e3)}{_GAP}ms"
    return f"{number(value)}{_GAP}\N{MICRO SIGN}s"


def times(value: float | None) -> str:
    """A speedup."""
    return _NONE if value is None else f"{value:.2f}{_TIMES}"


def ceiling(value: float | None, digits: int = 1) -> str:
    """A gain without a meaningful upper end: the rest of the run takes almost no time."""
    if value is not None and value >= 1000:
        return f"> +999{_GAP}%"
    return signed_percent(value, digits)


def interval(low: float, high: float) -> str:
    return f"{signed_percent(low)} to {signed_percent(high)}"


def tick_percent(value: float) -> str:
    """The label of an axis: as many digits as the tick has."""
    text = f"{value:+.4g}" if value else "0"
    return f"{text}{_GAP}%".replace("-", _MINUS)


def tick_microseconds(value: float) -> str:
    units = (("s", 1e6), ("ms", 1e3))
    unit, size = next((pair for pair in units if abs(value) >= pair[1]), ("\N{MICRO SIGN}s", 1.0))
    return f"{value / size:.4g}{_GAP}{unit}"


def tick_times(value: float) -> str:
    return f"{value:.4g}{_TIMES}"


def moment(iso: str) -> str:
    """`2026-11-21 07:19 UTC` from an ISO 8601 time; other text stays unchanged."""
    try:
        when = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    if when.tzinfo is None:
        return f"{when:%Y-%m-%d %H:%M}"
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def sentence(text: str) -> str:
    """With a capital and a full stop, so that phrases read as sentences."""
    text = text.strip()
    if not text:
        return ""
    end = "" if text[-1] in ".!?:" else "."
    return text[0].upper() + text[1:] + end


def outcome(value: str) -> str:
    return value.replace("_", " ")
