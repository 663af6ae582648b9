"""How fuzzing changes an input: in places that parsers see (rows, fields, cells), and in bytes."""

from __future__ import annotations

import gzip
import io
import json
import random
import sqlite3
import zlib
from contextlib import closing, suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MOST_BYTES = 400_000
STUMBLES = (
    *(b'"', b",", b"\n", b"\r", b"\t", b"\0", b"\xff", b"(", b"<", b"[", b"{", b"-", b"|", b"::"),
    *(b"nan", b"inf", b"1e999", b"-1", b"\xef\xbb\xbf", b"\xe2\x80\xa6", b"\x1b[31m", b": inf,"),
    *(b'"ph":"X"', b'"traceEvents"', b"Processing [x", b"Time (%),", b'"cat": "kernel"', b"_ZN99"),
    *(b"\xf0\x9f\xa6\x80", b"operator()", b"[lambda(", b"step[DECODE bs=8]", b"unnamed>::"),
    *(b") lambda(", b"\xe2\x80\xae", b"(a<b>)", b"T1 *"),
)
LONG = (b"9" * 400, b"[" * 2000, b"{" * 2000, b"(" * 3000, b"<" * 3000, b"," * 5000, b"a::" * 999)
NUMBERS: tuple[Any, ...] = (
    *(None, -1, 0, 1, 2, 7, 77 << 24, 2**31, 2**32 + 5, 2**53, 2**60, 2**63 - 1, -(2**63)),
    *(0.5, -0.0, 1e-9, 1e18, float("inf"), float("nan")),
)
TEXTS: tuple[Any, ...] = (
    *(
        "",
        "x",
        "9" * 400,
        "1.5",
        "-1",
        "nan",
        "\x1b[31m",
        "\ud800",
        "\u202e\u2066",
        "a\nb",
        "_ZN99",
        "<" * 99,
    ),
    *("step", "step[DECODE bs=8]", "ProfilerStep#3", "execute_9_context_1(9)_generation_2(2)"),
    *(
        "kernel",
        "gpu_memcpy",
        "user_annotation",
        "cuda_runtime",
        "cudaGraphLaunch",
        "X",
        "ph",
        "name",
    ),
    *(
        "ncclDevKernel_AllReduce",
        "Cijk_Ailk_Bljk",
        "triton_poi_fused_add_0",
        "void a<b>(c*)",
        b"\xff\0",
    ),
)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Changed in a few places: bits, runs, cuts, repeats, and what parsers stumble over."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + draw.randint(1, 200)]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 20))
            case 3:
                data[at:at] = data[at : at + draw.randint(1, 400)] * draw.randint(1, 4)
            case 4:
                data[at:at] = draw.choice(LONG if draw.random() < 0.02 else STUMBLES)
            case 5 if draw.random() < 0.3:
                del data[at:]
            case _:
                data[at : at + 8] = draw.randbytes(8)
    return bytes(data[:MOST_BYTES])


def changed_trace(content: bytes, draw: random.Random) -> bytes:
    """A trace with other events and other fields; `content` itself where it is no JSON."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    for _ in range(draw.randint(1, 8)):
        events = value.get("traceEvents") if isinstance(value, dict) else value
        some = isinstance(events, list) and events
        match draw.randrange(8):
            case 0 if some:
                del events[draw.randrange(len(events))]
            case 1 if some:
                events.insert(draw.randrange(len(events)), _copied(draw.choice(events)))
            case 2 if some:
                draw.shuffle(events)
            case 3 if some:
                begin = draw.randrange(len(events))
                del events[begin : begin + draw.randint(1, 1 + len(events) // 2)]
            case 4 if some:  # one field of every event
                key, odd = (
                    draw.choice(("ts", "dur", "pid", "tid", "cat", "name", "args")),
                    _odd(draw),
                )
                for event in filter(lambda each: isinstance(each, dict), events):
                    event[key] = odd
            case _:
                _change_one(draw.choice(events) if some and draw.random() < 0.9 else value, draw)
    said = json.dumps(value, indent=draw.choice((None, 0)), default=repr)
    return said.encode("utf-8", "surrogatepass")[:MOST_BYTES]


def changed_packed_trace(content: bytes, draw: random.Random) -> bytes:
    """Likewise of a packed trace."""
    try:
        return gzip.compress(changed_trace(gzip.decompress(content), draw), 1)
    except (OSError, EOFError, zlib.error):
        return content


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value, default=repr))


def _odd(draw: random.Random) -> Any:
    return draw.choice(draw.choice((NUMBERS, TEXTS, ([], {}, [[]], True, {"device": 3}))))


def _change_one(value: Any, draw: random.Random) -> None:
    """Change, drop or add one field, here or deeper."""
    while isinstance(value, dict | list) and value:
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        if isinstance(value[key], dict | list) and draw.random() < 0.7:
            value = value[key]
            continue
        number = isinstance(value[key], int | float)
        if number and draw.random() < 0.5:
            value[key] += draw.choice((-1, 1, 0.0005, 10, -1000, 10**6, -(10**9)))
        elif draw.random() < 0.2:
            del value[key]
        else:
            value[key] = _odd(draw)
        return


def changed_database(content: bytes, draw: random.Random) -> bytes:
    """An export with other rows, cells, columns and tables; as it is where it is damaged."""
    with closing(sqlite3.connect(":memory:")) as database:
        try:
            database.deserialize(content)
            for _ in range(draw.randint(1, 6)):
                with suppress(sqlite3.Error, OverflowError, UnicodeDecodeError):
                    _change_table(database, draw)
            database.commit()
            return bytes(database.serialize()[:MOST_BYTES])
        except sqlite3.Error:
            return content


def _change_table(database: sqlite3.Connection, draw: random.Random) -> None:
    named = "SELECT name FROM sqlite_master WHERE type = 'table'"
    tables = [name for (name,) in database.execute(named)]
    table = draw.choice(["CUPTI_ACTIVITY_KIND_KERNEL", *tables])
    columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    if not columns:
        return
    column = f'"{draw.choice(columns)}"'
    [most] = database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
    one = f"rowid = {draw.randint(1, max(1, most))}"
    where = draw.choice((one, one, one, f"rowid % {draw.randint(2, 5)} = 0", "true"))
    odd = draw.choice(draw.choice((NUMBERS, TEXTS)))
    if isinstance(odd, str):
        odd = odd.encode("utf-8", "replace").decode()
    match draw.randrange(9):
        case 0:
            database.execute(f"DELETE FROM {table} WHERE {where}")
        case 1:
            database.execute(f"INSERT INTO {table} SELECT * FROM {table} WHERE {where} LIMIT 40")
        case 2:
            database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        case 3:
            new = draw.choice(("name", "shortName", "text", "start", "x"))
            database.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO {new}")
        case 4 if draw.random() < 0.3:
            database.execute(f"DROP TABLE {table}")
        case 5:
            added = draw.choice((-1, 1, 1000, 10**9, 1 << 24))
            database.execute(f"UPDATE {table} SET {column} = {column} + ? WHERE {where}", (added,))
        case 6:
            other = f'"{draw.choice(columns)}"'
            database.execute(f"UPDATE {table} SET {column} = {other} WHERE {where}")
        case _:
            database.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (odd,))


def changed_cells(content: bytes, draw: random.Random) -> bytes:
    """A table of text with other cells, columns and lines."""
    lines = content.split(b"\n")
    comma = b"," if content.count(b",") > content.count(b"|") else b"|"
    for _ in range(draw.randint(1, 5)):
        at = draw.randrange(len(lines))
        match draw.randrange(6):
            case 0:
                del lines[at : at + draw.randint(1, 3)]
                lines = lines or [b""]
            case 1:
                lines.insert(draw.randrange(len(lines)), lines[at])
            case 2:  # one column of every line
                which = draw.randrange(1 + lines[at].count(comma))
                rows = [line.split(comma) for line in lines]
                lines = [comma.join(row[:which] + row[which + 1 :]) for row in rows]
            case _:
                cells = lines[at].split(comma)
                odd = draw.choice(draw.choice((NUMBERS, TEXTS)))
                said = odd if isinstance(odd, bytes) else str(odd).encode("utf-8", "surrogatepass")
                cells[draw.randrange(len(cells))] = said
                lines[at] = comma.join(cells)
    return b"\n".join(lines)[:MOST_BYTES]


def changed_parquet(content: bytes, draw: random.Random) -> bytes:
    """A Parquet file with fewer rows and other cells and types; as it is where it is damaged."""
    try:
        table = pq.read_table(io.BytesIO(content))
    except (pa.ArrowException, OSError):
        return content
    columns = {name: table[name].to_pylist() for name in table.column_names}
    begin, count = draw.randrange(1 + table.num_rows), draw.randint(1, 80)
    columns = {name: cells[begin : begin + count] for name, cells in columns.items()}
    for _ in range(draw.randint(0, 4)):
        name = draw.choice(list(columns) or [""])
        cells = columns.pop(name, [])
        match draw.randrange(5):
            case 0:
                continue
            case 1:
                name = draw.choice(("name", "shortName", "start", "x", ""))
            case 2:
                cells = [str(cell) for cell in cells]
            case 3:
                cells = [_odd(draw)] * len(cells)
            case _:
                cells = [_odd(draw) if draw.random() < 0.1 else cell for cell in cells]
        columns[name] = cells
    written = io.BytesIO()
    try:
        pq.write_table(pa.table(columns), written)
    except (pa.ArrowException, OSError, OverflowError, UnicodeEncodeError, TypeError):
        return content  # cells of several types
    return written.getvalue()[:MOST_BYTES]
