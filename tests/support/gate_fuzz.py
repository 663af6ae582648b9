"""Damaged streams of both protocols, through the gate: what comes is a clean reply or our error.

`python tests/support/gate_fuzz.py [COUNT] [FIRST SEED]` tries a million inputs in this process, one
in twenty of them through the SDK and its HTTP client; `test_gate.py` tries a few.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import sys
import time
from collections import Counter
from copy import deepcopy
from functools import cache
from typing import Any
from unittest.mock import patch

import httpcore2
from model_servers import APIS, KEY, Api

from patcher.bench import PatcherError
from patcher.models import Reply, Request
from patcher.models.api import ApiModel
from patcher.models.faults import message_of
from patcher.models.gate import Draft
from patcher.models.limits import LEAST_ROOM, named_limit
from patcher.models.retry import retry_after_s
from patcher.models.wire import GateError, events, unpacked

REQUEST = Request(step="op/0/ask", role="generate", system="s", prompt="p" * 900, max_tokens=4000)
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**18, float("nan"), float("inf"), "", "x", [], {}, [[]], [{}]),
    *(KEY, f"a{KEY}b", KEY[3:], "\ud800", "\x1b[2J", "\0", "\u202e", "<script>", "y" * 5000),
    *("text_delta", "message_stop", "error", "refusal", "max_tokens", {"error": {"type": KEY}}),
)
UNCLEAN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066\ud800-\udfff]")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value of JSON."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def stream(rng: random.Random, api: Api) -> tuple[list[bytes], str]:
    """Chunks of a damaged reply, and how they are packed."""
    out: list[bytes] = []
    for event in api.events("```cpp\nint x;\n``` " * rng.randrange(1, 4)):
        head, _, data = event.decode().partition("data: ")
        if rng.random() < 0.25 and "[DONE]" not in data:
            value = json.loads(data)
            for _ in range(rng.randrange(1, 3)):
                places = _places(value)
                if places:
                    container, key = rng.choice(places)
                    container[key] = deepcopy(rng.choice(ODD))  # it may be changed in turn
            data = json.dumps(value if rng.random() < 0.9 else rng.choice(ODD)) + "\n\n"
        out.append(f"{head}data: {data}".encode("utf-8", "surrogatepass"))
    if rng.random() < 0.2:
        rng.shuffle(out)
    if rng.random() < 0.2:
        out.insert(rng.randrange(len(out) + 1), out[rng.randrange(len(out))])
    body = b"".join(out[: rng.randrange(len(out)) if rng.random() < 0.2 else None])
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        at = rng.randrange(len(body) + 1)
        body = body[:at] + rng.randbytes(rng.randrange(6)) + body[at + rng.randrange(6) :]
    packed = rng.random() < 0.1
    if packed:
        body = gzip.compress(body, 1)
        if rng.random() < 0.5:
            body = body[: rng.randrange(len(body))] + rng.randbytes(3)
    size = 1 if rng.random() < 0.02 else rng.choice((7, 100, 1000, 10_000))
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    return chunks, "gzip" if packed else ""


HEADERS = (
    *("transfer-encoding: chunked", "transfer-encoding: gzip, chunked", "content-length: 9"),
    *("content-length: -1", "content-length: 1e3", f"content-length: {10**30}", "x: " + KEY),
    *("content-encoding: gzip", "content-encoding: br", f"content-encoding: {KEY}", "retry-after:"),
    *("content-type: text/html", f"content-type: {KEY}", "location: \x1b[2J", "x:\x00", ": y"),
    *("retry-after: 1e999", "retry-after-ms: nan", "no colon", "set-cookie: a=" + KEY, " folded"),
    *("connection: close", "trailer: x", "upgrade: h2c", "x: " + "y" * 70_000, "x: y\r\n" * 200),
)
STATUSES = (
    "200 OK",
    "200",
    "204 No",
    "301 Moved",
    "400 Bad",
    "401 No",
    "429 Slow",
    "500 Oh",
    "999 ?",
)
EXTENSIONS = (b"", b"", b"", b";a=b", b';a="\n"', KEY.encode(), b" ", b";" + b"x" * 20_000)
STARTS = ("HTTP/1.0", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/2", "http/1.1", "ICY", KEY)


def answer(rng: random.Random, api: Api) -> list[bytes]:
    """What a connection gives: a damaged reply in damaged HTTP/1."""
    chunks, encoding = stream(rng, api)
    body = b"".join(chunks)
    head = [f"content-encoding: {encoding}"] if encoding else []
    framing = rng.randrange(4)
    if framing == 0:
        head.append(f"content-length: {len(body) + rng.choice((0, 0, 0, -1, 1, 1000))}")
    elif framing == 1:
        head.append("transfer-encoding: chunked")
        sizes = [f"{len(each):x}\r\n".encode() + each + b"\r\n" for each in chunks]
        if sizes:
            sizes[0] = sizes[0].replace(b"\r", rng.choice(EXTENSIONS) + b"\r", 1)
        ends = (b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"-1\r\n", b"")
        body = b"".join(sizes) + rng.choice(ends)
    head += rng.sample(HEADERS, rng.choice((0, 0, 0, 0, 1, 2)))
    rng.shuffle(head)
    status = STATUSES[0] if rng.random() < 0.7 else rng.choice(STATUSES)
    start = f"{STARTS[1] if rng.random() < 0.8 else rng.choice(STARTS)} {status}\r\n"
    early = "HTTP/1.1 103 Early\r\n\r\n" * rng.choice((0, 0, 0, 0, 1, 3, 300))
    text = early + start + "".join(f"{line}\r\n" for line in head) + "\r\n"
    raw = text.encode("latin-1", "replace") + body + rng.choice((b"", b"", b"HTTP/1.1 200 OK\r\n"))
    if rng.random() < 0.1:
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.randbytes(rng.randrange(4)) + raw[at + rng.randrange(4) :]
    if rng.random() < 0.1:
        raw = raw[: rng.randrange(len(raw) + 1)]
    size = rng.choice((300, 3000, 60_000))
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def refusal(rng: random.Random, model: ApiModel) -> PatcherError:
    """What is made of a damaged error."""
    numbers = f"{rng.choice(ODD)} max_tokens {10 ** rng.randrange(30)} > {rng.randrange(9000)}"
    body = APIS[model.entry.provider].fault(str(rng.choice(ODD)), numbers)
    if places := _places(body):
        for _ in range(rng.randrange(3)):
            container, key = rng.choice(places)
            container[key] = deepcopy(rng.choice(ODD))
    wish = str(rng.choice((*ODD, "-7", "1e400", "Wed, 21 Oct 9999 07:28:00 GMT", "0.001")))
    headers = {rng.choice(("retry-after", "retry-after-ms")): wish, "location": str(wish)}
    named = named_limit(message_of(body), 4000)
    assert named is None or LEAST_ROOM <= named.room < 4000
    wait = retry_after_s(headers)
    assert wait is None or wait > 0
    said: object = body if rng.random() < 0.9 else rng.choice(ODD)
    return model._faults.told(rng.choice((None, 204, 302, 400, 401, 429, 500)), said, headers)


@cache
def _model(name: str) -> ApiModel:
    with patch.dict(os.environ, {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY}):
        return APIS[name].open(None)


def check(seed: int) -> tuple[str, Reply | None]:
    """Try one input.

    Returns:
        What it was, and the reply that came of it, if one did.
    """
    rng = random.Random(seed)
    name = rng.choice(sorted(APIS))
    model, kind = _model(name), rng.random()
    if kind < 0.1:
        _clean_sentence(str(refusal(rng, model)), seed)
        return f"{name}, errors", None
    draft = Draft(model.name)
    try:
        if kind < 0.15:
            what = f"{name}, HTTP"
            if rng.random() < 0.1:
                _check_next_reply(model, APIS[name], seed)
            reply = _through_the_sdk(model, answer(rng, APIS[name]))
        else:
            what = f"{name}, streams"
            chunks, encoding = stream(rng, APIS[name])
            model._take(events(unpacked(chunks, encoding)), draft)
            reply = model._record(REQUEST, draft)
    except (PatcherError, GateError) as error:
        _clean_sentence(str(error), seed)
        return what, None
    stored = reply.model_dump_json()
    assert Reply.model_validate_json(stored) == reply, seed
    assert KEY[:-2] not in stored, seed
    for text in (reply.text, reply.model, reply.stop_reason, *reply.repairs):
        assert not UNCLEAN.search(text), seed
    usage = reply.usage
    assert (usage.input_tokens is None) == (usage.output_tokens is None), seed
    if usage.input_tokens and usage.output_tokens is not None:
        assert 0 < usage.input_tokens <= model.worst_tokens(REQUEST), seed
        most = max(4000, 4 * (reply.received_characters or 0))
        assert 0 <= usage.output_tokens <= most, seed
    return what, reply


def _through_the_sdk(model: ApiModel, pieces: list[bytes]) -> Reply:
    """What the model makes of a connection that gives these bytes and ends, each time it asks."""
    pool = model._client._client._transport._pool  # type: ignore[attr-defined]
    pool._network_backend = httpcore2.MockBackend(pieces)
    model.max_output_tokens = model.entry.max_output_tokens
    try:
        return model.ask(REQUEST)
    finally:
        assert not pool.connections or pool.connections[0].is_idle(), "a connection is still held"
        pool.close()


def _check_next_reply(model: ApiModel, api: Api, seed: int) -> None:
    """Whatever came before, a good reply is read as one."""
    body = b"".join(api.events("Hello"))
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    assert _through_the_sdk(model, [head, body]).text == "Hello", seed


def _clean_sentence(said: str, seed: int) -> None:
    assert not UNCLEAN.search(said), seed
    assert KEY[:-2] not in said, seed
    assert len(said) < 600, seed


def main() -> None:
    """Try many."""
    count, first = (int(each) for each in [*sys.argv[1:], *("1000000", "0")[len(sys.argv) - 1 :]])
    begun_s, tried, replies = time.monotonic(), Counter[str](), Counter[str]()
    for seed in range(first, first + count):
        what, reply = check(seed)
        tried[what] += 1
        replies[what] += reply is not None
        if sum(tried.values()) % 50_000 == 0 or seed == first + count - 1:
            took_s = time.monotonic() - begun_s
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(f"{sum(tried.values()):,} inputs in {took_s:.0f} s, peak {peak} MiB", flush=True)
    for what in sorted(tried):
        print(f"  {what}: {tried[what]:,} inputs, {replies[what]:,} replies")


if __name__ == "__main__":
    main()
