"""What comes over the wire: bytes that are bounded before and after they are unpacked, and in time,
as values of JSON. Nothing here is believed; `patcher.models.gate` makes records of it."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

EVENT_BYTES = 4 << 20
"""One event of a stream is read up to this length; a longer one is counted and passed over."""
LEAST_BYTES, BYTES_PER_TOKEN = 40 << 20, 512
"""A reply is read up to so many bytes for each token of its room: events wrap each token."""
ERROR_BYTES = 8 << 20
"""The body of an error is read so far."""
PATIENCE_S, SECONDS_PER_TOKEN = 600.0, 0.1
"""A reply may take so long: slower than any server that is worth waiting for."""
_PIECE = 64 << 10
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class GateError(Exception):
    """What came is no reply. The text is our own, never the server's.

    Args:
        web_page: whether it is one.
    """

    def __init__(self, why: str, *, web_page: bool = False) -> None:
        super().__init__(why)
        self.web_page = web_page


@dataclass(frozen=True)
class Bounds:
    """What one reply may take."""

    bytes: int
    seconds: float

    @classmethod
    def of(cls, room: int) -> Bounds:
        """For a reply of at most `room` tokens."""
        seconds = PATIENCE_S + SECONDS_PER_TOKEN * room
        return cls(max(LEAST_BYTES, BYTES_PER_TOKEN * room), seconds)


class BoundedBody:
    """A response's bytes, unpacked, until a bound is reached. The SDKs read through it.

    Attributes:
        cut: whether there was more.
    """

    def __init__(self, body: Any, encoding: str, bounds: Bounds) -> None:
        self._body, self._encoding, self._bounds = body, encoding, bounds
        self._deadline_s = time.monotonic() + bounds.seconds
        self.cut = False

    def __iter__(self) -> Iterator[bytes]:
        """Pieces of at most 64 KiB.

        Raises:
            GateError: the bytes are packed wrongly, or in a way that nobody asked for.
        """
        taken = 0
        for piece in unpacked(self._timed(), self._encoding):
            taken += len(piece)
            if taken > self._bounds.bytes:
                self.cut = True
                return
            yield piece

    def _timed(self) -> Iterator[bytes]:
        taken = 0
        for chunk in self._body:
            if time.monotonic() > self._deadline_s:
                raise GateError(f"it took more than {self._bounds.seconds:.0f} s")
            taken += len(chunk)
            if taken > self._bounds.bytes:
                self.cut = True
                return
            yield chunk

    def close(self) -> None:
        self._body.close()


def bounded(bounds: Callable[[], Bounds]) -> Callable[[Any], None]:
    """A hook for the HTTP client of an SDK (`event_hooks`): every response is read through a
    `BoundedBody`, of an error less."""

    def hook(response: Any) -> None:
        encoding = response.headers.pop("content-encoding", "").strip().lower()
        most = bounds()
        if response.status_code != 200:
            most = Bounds(ERROR_BYTES, PATIENCE_S)
        # the client takes a stream of its own class alone
        kind = type("_Stream", (BoundedBody, *_stream_bases(response.stream)), {})
        response.stream = kind(response.stream, encoding, most)

    return hook


def _stream_bases(stream: Any) -> tuple[type, ...]:
    """The HTTP client's abstract stream; the SDKs bring one of two libraries."""
    return tuple(base for base in type(stream).__mro__ if base.__name__ == "SyncByteStream")


def unpacked(chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """The bytes in pieces, each at most 64 KiB, however well they were packed.

    Raises:
        GateError: they are packed wrongly, or otherwise than by gzip or deflate.
    """
    if encoding in ("", "identity"):
        for chunk in chunks:
            for at in range(0, len(chunk), _PIECE):
                yield chunk[at : at + _PIECE]
        return
    if encoding not in _ENCODINGS:
        raise GateError("it is packed in a way that was not asked for")
    packer, begun = zlib.decompressobj(_ENCODINGS[encoding]), False
    try:
        for chunk in chunks:
            rest = chunk
            while rest:
                if packer.eof:  # each piece may be packed by itself; padding is none
                    if not (rest := rest.lstrip(b"\0")):
                        break
                    packer = zlib.decompressobj(_ENCODINGS[encoding])
                if not begun and encoding == "deflate" and not _is_zlib(rest):
                    packer = zlib.decompressobj(-15)
                begun = True
                yield packer.decompress(rest, _PIECE)
                rest = packer.unused_data if packer.eof else packer.unconsumed_tail
        yield packer.flush()
    except zlib.error:
        raise GateError("its compression is broken") from None


def _is_zlib(head: bytes) -> bool:
    """Whether deflate comes with its header, as it should, or without, as many servers send it."""
    return head[0] & 15 == 8 and (len(head) < 2 or int.from_bytes(head[:2], "big") % 31 == 0)


@dataclass(frozen=True)
class TooLong:
    """In place of an event that is too long to read."""

    bytes: int


UNREADABLE = object()
"""In place of an event that is no JSON."""
_END = object()
"""The mark that ends a stream of OpenAI's: what comes after it is not waited for."""
_NOTHING = object()
"""In place of an event without data, which keeps a connection alive."""


def events(chunks: Iterable[bytes]) -> Iterator[object]:
    """The values of a stream of server-sent events, or of one JSON document where a server does
    not stream; `TooLong` and `UNREADABLE` stand for those without one.

    Raises:
        GateError: it is a web page.
    """
    pieces, start = iter(chunks), b""
    for piece in pieces:
        start = (start + piece).lstrip(b" \t\r\n").removeprefix(b"\xef\xbb\xbf").lstrip()
        if len(start) >= 4:
            break
    if start[:1] == b"<":
        raise GateError("it is a web page", web_page=True)
    if start[:1] in (b"{", b"[") or start[:4] == b"null":
        yield _document(start, pieces)
        return
    data: list[bytes] = []
    size = 0
    for line in _lines(chain((start,), pieces)):
        if isinstance(line, TooLong):
            size += line.bytes
        elif isinstance(line, bytes) and line.startswith(b"data:"):
            size += len(line)
            if size <= EVENT_BYTES:
                data.append(line[5:])
        elif not line and (data or size):
            value = _value(b"\n".join(data), size)
            if value is _END:
                return
            if value is not _NOTHING:
                yield value
            data, size = [], 0
    if data or size:  # its blank line is missing
        value = _value(b"\n".join(data), size)
        if value not in (_END, _NOTHING, UNREADABLE):
            yield value


def json_lines(chunks: Iterable[bytes]) -> Iterator[object]:
    """The values of a file of JSON lines, with `TooLong` and `UNREADABLE` as in `events`."""
    for line in _lines(chunks):
        value = _value(line, len(line)) if isinstance(line, bytes) else line
        if value is not _NOTHING:
            yield UNREADABLE if value is _END else value


def _document(head: bytes, pieces: Iterator[bytes]) -> object:
    held, size = [head], len(head)
    for piece in pieces:
        size += len(piece)
        if size <= EVENT_BYTES:
            held.append(piece)
    value = _value(b"".join(held), size)
    return UNREADABLE if value is None or value is _END else value


def _lines(pieces: Iterable[bytes]) -> Iterator[object]:
    """Each line without its end; `TooLong` for one that is, of which nothing is held."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            held.append(end)
            size += len(end)
            yield from _whole(held, size)
            held, size = [], 0
        size += len(rest)
        if size <= EVENT_BYTES:
            held.append(rest)
        else:
            held = []
    if size:
        yield from _whole(held, size)


def _whole(held: list[bytes], size: int) -> Iterator[object]:
    if size > EVENT_BYTES:
        yield TooLong(size)
    else:
        yield from b"".join(held).removesuffix(b"\r").split(b"\r")


def _value(data: bytes, size: int) -> object:
    """The JSON value of an event."""
    if size > EVENT_BYTES:
        return TooLong(size)
    if not (words := data.strip()):
        return _NOTHING
    if words == b"[DONE]":
        return _END
    try:
        value: object = json.loads(data.decode("utf-8", "replace"), parse_int=_whole_number)
    except (ValueError, RecursionError):
        return UNREADABLE
    return value


def _whole_number(digits: str) -> float:
    return int(digits) if len(digits) < 20 else math.inf
