"""Streams of servers that keep to the letter of a standard in odd ways, or lie twice."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from model_servers import APIS, Api, ApiServer, Item

from patcher.bench import PatcherError
from patcher.models import ModelError, Reply, Request
from patcher.models.api import ApiModel
from patcher.models.gate import Draft
from patcher.models.wire import GateError, events, unpacked
from patcher.visible import visible

REQUEST = Request(step="op/0/ask", role="generate", system="s", prompt="p" * 900, max_tokens=4000)
BOM = b"\xef\xbb\xbf"


@pytest.fixture
def model(api: Api, server: ApiServer) -> ApiModel:
    return api.open(server)


def heard(model: ApiModel, chunks: Iterable[bytes], encoding: str = "") -> Reply:
    """The reply that comes of a body."""
    draft = Draft(model.name)
    model._take(events(unpacked(chunks, encoding)), draft)
    return model._record(REQUEST, draft)


def outcome(model: ApiModel, body: bytes) -> str:
    """The reply's text, or the error's sentence."""
    try:
        return heard(model, [body]).text
    except ModelError as error:
        return error.message


def changed(api: Api, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A reply whose events were changed."""
    out = []
    for event in api.events("Hello"):
        head, _, data = event.decode().partition("data: ")
        if "[DONE]" not in data:
            value = json.loads(data)
            change(value)
            data = json.dumps(value) + "\n\n"
        out.append(f"{head}data: {data}")
    return "".join(out).encode()


def spread(body: bytes) -> bytes:
    """Each event's data over several lines."""
    return body.replace(b'": ', b'":\ndata:  ')


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda body: body,
    "a mark of byte order": lambda body: BOM + body,
    "blank lines and a mark": lambda body: b"\r\n \n" + BOM + body,
    "carriage returns": lambda body: body.replace(b"\n", b"\r\n"),
    "events without data": lambda body: body.replace(b"\n\n", b"\n\ndata:\n\ndata: \n\n"),
    "comments, ids and retries": lambda body: body.replace(b"\n\n", b"\n\n:x\nid: 7\nretry: 0\n\n"),
    "no space": lambda body: body.replace(b"data: ", b"data:"),
    "many lines": spread,
    "no last blank line": lambda body: body.rstrip(b"\n"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 100_000])
def test_a_stream_is_read_in_every_form_and_cut(
    model: ApiModel, api: Api, form: str, size: int
) -> None:
    body = FORMS[form](b"".join(api.events("H\u00e9llo \U0001f600")))
    reply = heard(model, [body[at : at + size] for at in range(0, len(body), size)])
    assert (reply.text, reply.usage.output_tokens) == ("H\u00e9llo \U0001f600", 2000)
    assert reply.repairs == ()


def test_a_stream_that_ends_at_any_byte_is_whole_or_broken(model: ApiModel, api: Api) -> None:
    body = b"".join(api.events())
    found = [outcome(model, body[:end]) for end in range(len(body))]
    assert {"Hello"} < set(found)
    assert all(each == "Hello" or "broke off" in each for each in found)
    assert found.index("Hello") > len(body) / 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-7", "cp037"])
def test_another_encoding_is_a_broken_reply(model: ApiModel, api: Api, encoding: str) -> None:
    body = b"".join(api.events()).decode().encode(encoding)
    if encoding == "utf-7":  # its letters are those of ASCII
        body = body.replace(b"data", b"+AGQ-ata")
    with pytest.raises(ModelError, match="broke off"):
        heard(model, [body])


def bare(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "one": ("gzip", gzip.compress),
    "a member for each byte": (
        "gzip",
        lambda body: b"".join(gzip.compress(body[at : at + 1]) for at in range(len(body))),
    ),
    "padding": ("gzip", lambda body: gzip.compress(body) + b"\0" * 99),
    "deflate": ("deflate", zlib.compress),
    "deflate without its header": ("deflate", bare),
}


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_packed_stream_is_read_to_its_end(model: ApiModel, api: Api, how: str, size: int) -> None:
    encoding, pack = PACKED[how]
    body = pack(b"".join(api.events()))
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    assert heard(model, chunks, encoding).text == "Hello"


def test_a_packed_stream_with_an_odd_rest_is_broken(model: ApiModel, api: Api) -> None:
    with pytest.raises(GateError, match="compression"):
        heard(model, [gzip.compress(b"".join(api.events()[:4])) + b"rest"], "gzip")


def usage_of(event: dict[str, Any]) -> dict[str, Any] | None:
    for part in (event, event.get("message", {})):
        if part.get("usage"):
            found: dict[str, Any] = part["usage"]
            return found
    return None


@pytest.mark.parametrize(
    "second", [0, 1, -5, 2.0, "2000", [2000], {"output_tokens": 2000}, True, 10**18]
)
def test_of_two_counts_none_makes_a_call_cheaper(model: ApiModel, api: Api, second: object) -> None:
    """Whichever comes last: the greater count, or the worst case."""
    names = ("input_tokens", "output_tokens")
    if api.name == "openai":
        names = ("prompt_tokens", "completion_tokens")
    said = b"".join(api.events("Hello", "end_turn", (300, 2000)))
    more = {"type": "message_delta", "delta": {}, "choices": []}
    more["usage"] = dict.fromkeys(names, second)
    at = said.rindex(b"event: message_stop" if api.name == "anthropic" else b"data: [DONE]")
    body = said[:at] + f"data: {json.dumps(more)}\n\n".encode() + said[at:]
    usage = heard(model, [body]).usage
    known = type(second) is int and second <= 300
    assert (usage.input_tokens, usage.output_tokens) == ((300, 2000) if known else (None, None))


@pytest.mark.parametrize("lie", ["300", ["300"], {"tokens": 300}, 300.0, True, None])
def test_a_usage_in_the_wrong_form_or_place_is_none(model: ApiModel, api: Api, lie: object) -> None:
    def wrong(event: dict[str, Any]) -> None:
        if usage := usage_of(event):
            usage.update(dict.fromkeys(usage, lie))

    def nested(event: dict[str, Any]) -> None:
        for part in (event, event.get("message", {})):
            if part.get("usage"):
                part["usage"] = {"usage": part["usage"]}

    def elsewhere(event: dict[str, Any]) -> None:
        for part in (event, event.get("message", {})):
            if part.get("usage"):
                part["delta"], part["x_usage"] = part.get("delta"), part.pop("usage")

    for change in (wrong, nested, elsewhere):
        reply = heard(model, [changed(api, change)])
        assert reply.text == "Hello"
        assert reply.usage.output_tokens is None
        assert any("counts of tokens" in repair for repair in reply.repairs)


def test_odd_fields_of_gateways_cost_no_reply(model: ApiModel, api: Api) -> None:
    def odd(event: dict[str, Any]) -> None:
        for choice in event.get("choices", ()):
            choice["index"] = "0"
            choice["finish_reason"] = choice["finish_reason"] or ""
        if event.get("type") == "content_block_delta":
            event["index"] = "one"

    for empty in ({}, "", False, 0, []):

        def change(event: dict[str, Any], empty: object = empty) -> None:
            odd(event)
            event["error"] = empty

        assert heard(model, [changed(api, change)]).text == "Hello"


def test_a_text_may_come_in_parts(server: ApiServer) -> None:
    """As in a request; some servers put the thinking there, too."""
    thought = [{"type": "text", "text": "h" * 640}]
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "Hel"}, 7, {}]

    def change(event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            if choice["delta"].get("content") == "He":
                choice["delta"]["content"] = parts

    api = APIS["openai"]
    reply = heard(api.open(server), [changed(api, change)])
    assert (reply.text, reply.received_characters) == ("Helllo", 646)


@pytest.mark.parametrize(
    "error",
    [
        {"object": "error", "message": "out of memory", "code": 500},
        {"type": "error", "message": "out of memory"},
        {"error": "out of memory"},
        {"error": {"message": "out of memory"}},
    ],
)
def test_an_error_in_any_form_says_its_message(
    model: ApiModel, api: Api, error: dict[str, object]
) -> None:
    body = b"".join(api.events()[:3]) + f"data: {json.dumps(error)}\n\n".encode()
    with pytest.raises(PatcherError, match="out of memory"):
        heard(model, [body])


@pytest.mark.parametrize("hidden", "\u3164\uffa0\u115f\u034f\ufe01\U000e0041\U000e0100\u200b\u2066")
def test_what_is_drawn_as_nothing_is_shown(model: ApiModel, api: Api, hidden: str) -> None:
    shown = f"a<U+{ord(hidden):04X}>b \u2714\ufe0f \u00e9"
    assert visible(f"a{hidden}b \u2714\ufe0f \u00e9") == shown
    assert heard(model, [b"".join(api.events(f"a{hidden}b \u2714\ufe0f \u00e9"))]).text == shown


def chunked(body: bytes, end: bytes) -> bytes:
    return b"%x;a=b\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, end)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
LENGTH = HEAD + b"content-length: %d\r\n\r\n%s"
ANSWERS: dict[str, Callable[[bytes], bytes]] = {
    "HTTP/1.0": lambda body: b"HTTP/1.0 200 OK\r\n\r\n" + body,
    "no length": lambda body: HEAD + b"\r\n" + body,
    "answers that are none": lambda body: (
        (b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" * 9)
        + LENGTH % (len(body), body)
    ),
    "a trailer": lambda body: (
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n"
        + chunked(body, b"content-length: 9\r\nx: y\r\n")
    ),
    "a second answer": lambda body: (LENGTH % (len(body), body)) * 2,
}


@pytest.mark.parametrize("form", ANSWERS)
def test_an_answer_is_read_in_every_form_of_http(api: Api, server: ApiServer, form: str) -> None:
    """Nor does what comes after it answer the next question."""
    server.script = [
        Item(b"", raw=[ANSWERS[form](b"".join(api.events("First")))]),
        api.reply("Second"),
    ]
    model = api.open(server)
    assert model.ask(REQUEST).text == "First"
    assert model.ask(REQUEST).text == "Second"


@pytest.mark.parametrize("line", [b"x: " + b"y" * 3_000_000, b"x: y\r\n" * 400_000 + b"z: y"])
def test_a_head_of_megabytes_is_no_answer(api: Api, server: ApiServer, line: bytes) -> None:
    server.script = [Item(b"", raw=[b"HTTP/1.1 200 OK\r\n", line, b"\r\n\r\n"]), api.reply()]
    model = api.open(server)
    with pytest.raises(ModelError, match="no HTTP"):
        model.ask(REQUEST)
    assert model.ask(REQUEST).text == "Hello"
