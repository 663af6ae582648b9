"""Parse tables in JSON and HTML, as `nsys stats --format json`, `htable` and `hdoc` write them."""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from patcher.hotspot.readers.printed import MAX_COLUMNS, MAX_NAME, Table

_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
_MEMBER = re.compile(r'\s*"([^"]{1,60})"\s*:\s*(.*?),?\s*')
_TAG = re.compile(r"<(/?)(table|tr|th|td)\b[^<>]*>", re.IGNORECASE)


def json_table(
    text: str, lines: Sequence[str], starts: Sequence[int], at: int
) -> tuple[Table | None, int]:
    """The table of the JSON array that begins in line `at`, and its last line.

    The table is None if the array does not hold objects of a report.
    """
    start = text.index("[", starts[at])
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return _lenient(lines, at, bisect_right(starts, error.pos) - 1)
    except RecursionError:  # nested too deeply for nsys, so the rest of the text is skipped
        return None, len(lines)
    last = bisect_right(starts, end - 1) - 1
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return None, last
    table = Table("json", at + 1, tuple(value[0]))
    if not 4 <= len(table.columns) < MAX_COLUMNS:
        return None, last
    numbers = _object_lines(lines, at, last)
    for item in value:
        _add(table, next(numbers, at), item)
    return table, last


def _object_lines(lines: Sequence[str], at: int, last: int) -> Iterator[int]:
    return (number for number in range(at, last + 1) if "{" in lines[number][:40])


def _add(table: Table, line: int, item: object) -> None:
    if isinstance(item, dict) and tuple(item) == table.columns:
        cells = tuple("" if cell is None else cell for cell in item.values())
        if all(isinstance(cell, str) for cell in cells):
            table.add(line + 1, cells)
            return
    table.fail(line + 1, "an object with other keys than the first one")


def _lenient(lines: Sequence[str], at: int, reached: int) -> tuple[Table | None, int]:
    """Parse the JSON of some nsys versions: one member per line, quotes in names not escaped.

    `reached` is the line where the strict parser stopped.
    """
    table: Table | None = None
    item: dict[str, str] = {}
    begin = at
    for number in range(at, len(lines)):
        line = lines[number].strip()
        if line in ("", "{") or number == at:
            begin = number
        elif line in ("}", "},", "}]"):
            table = table or (Table("json", at + 1, tuple(item)) if item else None)
            if table is not None:
                _add(table, begin, item)
            item = {}
        elif line != "]" and len(line) < MAX_NAME and (member := _MEMBER.fullmatch(line)):
            item[member[1]] = _value(member[2])
        elif line != "]":
            if table is None and not item:
                return None, max(at, reached)
            table = table or Table("json", at + 1, tuple(item))
            table.fail(number + 1, "not a member of an object, or cut off")
            return table, number
        if line in ("]", "}]"):
            return table, number
    if table is None and not item:
        return None, max(at, reached)
    table = table or Table("json", at + 1, tuple(item))
    table.fail(len(lines), "the array does not end")
    return table, len(lines)


def _value(text: str) -> str:
    """The value without its quotes; nothing in it is escaped."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def html_table(
    text: str, lines: Sequence[str], starts: Sequence[int], at: int
) -> tuple[Table | None, int]:
    """The table that begins in line `at`, and its last line.

    Only four tags are parsed, because `html.parser` takes quadratic time on damaged input.
    """
    start = text.index("<table", starts[at])
    rows: list[tuple[int, list[str]]] = []
    content: int | None = None
    table: Table | None = None
    for tag in _TAG.finditer(text, start):
        kind, closing = tag[2].lower(), bool(tag[1])
        line = bisect_right(starts, tag.start())
        if kind == "tr" and not closing:
            rows = [(line, [])]
        elif kind in ("th", "td") and not closing:
            content = tag.end()
        elif kind in ("th", "td") and content is not None and rows:
            rows[0][1].append(html.unescape(text[content : tag.start()]).strip())
            content = None
        elif kind == "tr" and rows:
            cells = tuple(rows.pop()[1])
            if table is None:
                if not 4 <= len(cells) < MAX_COLUMNS:
                    return None, line - 1
                table = Table("html", at + 1, cells)
            elif len(cells) != len(table.columns):
                table.fail(line, "a row with another number of cells")
            else:
                table.add(line, cells)
        elif kind == "table" and closing:
            return table, line - 1
    if table is not None:
        table.fail(len(lines), "the table does not end")
    return table, len(lines)
