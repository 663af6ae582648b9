"""Parse numbers and times as nsys, its GUI and spreadsheets print them, exactly, without floats."""

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
LARGEST = 2 * 10**18
"""Limit of counts and of times in ns, which may count from 1970; sums of a summary stay exact in
128 bits."""
LONGEST = 40
"""Maximum characters of a number; parsing a damaged one of megabytes would take minutes."""

EUROPEAN = re.compile(
    r"-?(?:\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?|\d{1,3}(?:\.\d{3})+,\d+|\d+,\d{1,2}|0,\d+)"
)
"""A number whose thousands are separated by points, or whose decimals by a comma."""
_SPACED = re.compile(r"\d{1,3}(?:[\s\u00a0\u202f'\u2019]\d{3})+(?:[.,]\d+)?")
_PLAIN = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,2})?", re.ASCII)
_WITH_UNIT = re.compile(r"(\S+) ?(ns|us|μs|µs|ms|sec|s)")
_HEADER = re.compile(r"(.*?) ?\((\w+(?:/\w+)?)\)")


def number(cell: str) -> Decimal:
    """Parse a non-negative number, with or without thousands separators.

    Raises:
        ValueError: the cell is not a number, or it is negative, infinite or too large.
    """
    cell = cell.strip()
    if len(cell) > LONGEST or not _PLAIN.fullmatch(cell):
        raise ValueError(cell[:LONGEST])
    value = Decimal(cell.replace(",", ""))
    if value >= LARGEST:
        raise ValueError(cell)
    return value


def whole(cell: str) -> int:
    """Parse a count.

    Raises:
        ValueError: the cell is not a whole number.
    """
    cell = cell.strip()
    if len(cell) < 18 and cell.isascii() and cell.isdigit():  # nearly always
        return int(cell)
    value = number(cell)
    if value != int(value):
        raise ValueError(cell)
    return int(value)


def is_foreign(cell: str) -> bool:
    """Whether the cell is a number as other locales write it."""
    cell = cell.strip().removesuffix("%")
    return len(cell) < LONGEST and bool(EUROPEAN.fullmatch(cell) or _SPACED.fullmatch(cell))


def percent(cell: str) -> float:
    """Parse a percentage, with or without its sign.

    Raises:
        ValueError: the cell is not a percentage.
    """
    return float(number(cell.strip().removesuffix("%")))


def nanoseconds(cell: str, unit: int | None) -> tuple[Decimal, Decimal]:
    """Parse a time; return it and the step of its last digit, both in ns.

    Args:
        cell: the printed time; its own unit has precedence over the column's.
        unit: nanoseconds per unit of the column. Without any unit, a time without decimals is in
            ns, the only unit that nsys prints that way.

    Raises:
        ValueError: the cell is not a time, or its unit is unknown.
    """
    cell = cell.strip()
    if unit == 1 and len(cell) < 18 and cell.isascii() and cell.isdigit():  # nearly always
        return Decimal(cell), Decimal(1)
    if (match := _WITH_UNIT.fullmatch(cell)) is not None:
        cell, unit = match[1], UNITS[match[2]]
    value = number(cell)
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or (unit is None and exponent < 0):
        raise ValueError(cell)
    unit = unit or 1
    if value * unit >= LARGEST:
        raise ValueError(cell)
    return value * unit, Decimal(unit).scaleb(min(exponent, 0))


def column(cell: str) -> tuple[str, str | None]:
    """A column's current name in nsys, and its unit: `Average (us)` is (`Avg`, `us`)."""
    cell = cell.strip().strip('"').strip("`*").strip()
    unit = None
    if cell in ("Time(%)", "Time (%)", "Time %"):
        return "Time", "%"
    if len(cell) < 2 * LONGEST and (match := _HEADER.fullmatch(cell)) is not None:
        cell, unit = match[1], match[2]
    renamed = {"Average": "Avg", "Median": "Med", "Minimum": "Min", "Maximum": "Max"}
    return renamed.get(cell, cell), unit
