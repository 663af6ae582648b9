"""Numbers and times as nsys, its GUI and spreadsheets print them; exact, never through a float."""

from __future__ import annotations

import re
from decimal import Decimal

UNITS = {
    "ns": 1,
    "us": 1_000,
    "μs": 1_000,  # Greek mu, as the GUI writes it
    "µs": 1_000,  # the micro sign of Latin 1
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "sec": 1_000_000_000,
}
LARGEST = 10**18
"""No count and no time in ns is larger (30 years); all sums of a summary stay exact in 128 bits."""
LONGEST = 40
"""No number is longer; without a limit a damaged one of megabytes would take minutes."""

_PLAIN = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,2})?", re.ASCII)
_WITH_UNIT = re.compile(r"(\S+) ?(ns|us|μs|µs|ms|sec|s)")
_HEADER = re.compile(r"(.*?) ?\((\w+(?:/\w+)?)\)")


def number(cell: str) -> Decimal:
    """A number that is not negative, with or without thousands separators.

    Raises:
        ValueError: it is none, or a negative, endless or absurdly large one.
    """
    cell = cell.strip()
    if len(cell) > LONGEST or not _PLAIN.fullmatch(cell):
        raise ValueError(cell[:LONGEST])
    value = Decimal(cell.replace(",", ""))
    if value >= LARGEST:
        raise ValueError(cell)
    return value


def whole(cell: str) -> int:
    """A count.

    Raises:
        ValueError: it is none.
    """
    cell = cell.strip()
    if len(cell) < 18 and cell.isascii() and cell.isdigit():  # nearly always
        return int(cell)
    value = number(cell)
    if value != int(value):
        raise ValueError(cell)
    return int(value)


def percent(cell: str) -> float:
    """A share as printed, with or without its sign.

    Raises:
        ValueError: it is none.
    """
    return float(number(cell.strip().removesuffix("%")))


def nanoseconds(cell: str, unit: int | None) -> tuple[Decimal, Decimal]:
    """A time and the step that its last digit stands for, both in ns.

    `unit` is that of the column. A unit in the cell goes before it; where neither is, a time
    without decimals is in ns, the only unit that nsys prints so.

    Raises:
        ValueError: no time, or in an unknown unit.
    """
    cell = cell.strip()
    if unit == 1 and len(cell) < 18 and cell.isascii() and cell.isdigit():  # nearly always
        return Decimal(cell), Decimal(1)
    if (found := _WITH_UNIT.fullmatch(cell)) is not None:
        cell, unit = found[1], UNITS[found[2]]
    value = number(cell)
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or (unit is None and exponent < 0):
        raise ValueError(cell)
    unit = unit or 1
    if value * unit >= LARGEST:
        raise ValueError(cell)
    return value * unit, Decimal(unit).scaleb(min(exponent, 0))


def column(cell: str) -> tuple[str, str | None]:
    """A column's name as nsys writes it today, and its unit: `Average (us)` is (`Avg`, `us`)."""
    cell = cell.strip().strip('"').strip("`*").strip()
    unit = None
    if cell in ("Time(%)", "Time (%)", "Time %"):
        return "Time", "%"
    if len(cell) < 2 * LONGEST and (found := _HEADER.fullmatch(cell)) is not None:
        cell, unit = found[1], found[2]
    renamed = {"Average": "Avg", "Median": "Med", "Minimum": "Min", "Maximum": "Max"}
    return renamed.get(cell, cell), unit
