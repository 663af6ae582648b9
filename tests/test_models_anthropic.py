"""The real SDK against a local server that speaks the Messages API: streams, faults, secrets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import BudgetError, MissingError, PatcherError, UsageError
from patcher.extract import unusable
from patcher.models import ModelError, Request
from patcher.models.anthropic import AnthropicModel
from patcher.models.budget import account, ask
from patcher.run import Run

KEY = "sk-ant-secret-0123456789"
Event = tuple[str, dict[str, Any]]


def request(max_tokens: int = 4000) -> Request:
    return Request(
        step="op/0/ask-generate",
        role="generate",
        system="You write kernels.",
        prompt="Write one.",
        max_tokens=max_tokens,
    )


def events(text: str = "Hello", stop_reason: str = "end_turn") -> list[Event]:
    """The events of one streamed message, text in two deltas, after a thinking block."""
    message: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-opus-5",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1000, "output_tokens": 1},
    }
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    half = len(text) // 2
    return [
        ("message_start", {"message": message}),
        ("content_block_start", {"index": 0, "content_block": thinking}),
        (
            "content_block_delta",
            {"index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        ),
        ("content_block_stop", {"index": 0}),
        ("ping", {}),
        ("content_block_start", {"index": 1, "content_block": {"type": "text", "text": ""}}),
        ("content_block_delta", {"index": 1, "delta": {"type": "text_delta", "text": text[:half]}}),
        ("content_block_delta", {"index": 1, "delta": {"type": "text_delta", "text": text[half:]}}),
        ("content_block_stop", {"index": 1}),
        (
            "message_delta",
            {
                "delta": {"stop_reason": stop_reason, "stop_sequence": None},
                "usage": {"output_tokens": 2000},
            },
        ),
        ("message_stop", {}),
    ]


def fault(kind: str, message: str = "no") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesServer(ThreadingHTTPServer):
    """A double of the Messages API: answers each POST with the next item of its script.

    An item is a list of events (streamed as SSE), (status, body, headers), or bytes of a broken
    stream.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[Any] = []
        self.seen: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, MessagesServer)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers["x-api-key"] or self.headers["authorization"].removeprefix("Bearer ")
        server.seen.append({"path": self.path, "key": key, **body})
        item = server.script.pop(0)
        if isinstance(item, tuple):
            status, content, headers = item
            data = json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        data = item if isinstance(item, bytes) else sse(item)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        if isinstance(item, bytes):
            self.send_header("content-length", str(len(data) + 100))  # promises more than comes
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def sse(items: list[Event]) -> bytes:
    lines = [
        f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n" for name, data in items
    ]
    return "".join(lines).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MessagesServer]:
    with MessagesServer() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", found.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


SOON = {"retry-after-ms": "1"}


def test_streams_a_reply_with_usage_and_price(server: MessagesServer) -> None:
    server.script = [events("Hello, kernel")]
    reply = AnthropicModel("claude-opus-5").ask(request())
    assert reply.text == "Hello, kernel"
    assert (reply.source, reply.stop_reason, reply.truncated) == ("api", "end_turn", False)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (1000, 2000)
    assert reply.usage.cost_usd == pytest.approx((1000 * 5 + 2000 * 25) / 1e6)
    seen = server.seen[0]
    assert seen["path"] == "/v1/messages"
    assert seen["stream"] is True
    assert seen["key"] == KEY
    assert (seen["model"], seen["max_tokens"]) == ("claude-opus-5", 4000)
    assert seen["system"] == "You write kernels."
    assert seen["messages"] == [{"role": "user", "content": "Write one."}]


def test_an_unknown_model_has_no_price(server: MessagesServer) -> None:
    server.script = [events()]
    model = AnthropicModel("claude-of-tomorrow")
    assert model.worst_cost_usd(request()) is None
    assert model.ask(request()).usage.cost_usd is None


@pytest.mark.parametrize("stop", ["max_tokens", "model_context_window_exceeded", "refusal"])
def test_a_cut_or_refused_reply_is_never_parsed(server: MessagesServer, stop: str) -> None:
    server.script = [events("```cpp\nint half", stop)]
    reply = AnthropicModel("claude-opus-5").ask(request())
    assert reply.stop_reason == stop
    failure = unusable(reply)
    assert failure is not None
    assert failure.kind == ("refused" if stop == "refusal" else "truncated")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, "rate_limit_error"), (529, "overloaded_error"), (500, "api_error"), (503, "api_error")],
)
def test_transient_faults_are_retried(server: MessagesServer, status: int, kind: str) -> None:
    server.script = [(status, fault(kind), SOON), (status, fault(kind), SOON), events()]
    assert AnthropicModel("claude-opus-5").ask(request()).text == "Hello"
    assert len(server.seen) == 3


def test_lasting_overload_is_an_error_that_can_be_resumed(server: MessagesServer) -> None:
    server.script = [(529, fault("overloaded_error", "Overloaded"), SOON)] * 3
    with pytest.raises(ModelError, match="overloaded_error") as caught:
        AnthropicModel("claude-opus-5", max_retries=2).ask(request())
    assert not caught.value.charged
    assert "resume" in caught.value.hint
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("status", "kind", "message", "expected"),
    [
        (401, "authentication_error", f"invalid x-api-key {KEY}", MissingError),
        (403, "permission_error", "not yours", MissingError),
        (402, "billing_error", "no credit", BudgetError),
        (400, "invalid_request_error", "Your credit balance is too low", BudgetError),
        (400, "invalid_request_error", "max_tokens: too large", UsageError),
        (404, "not_found_error", "model: claude-nine", UsageError),
    ],
)
def test_lasting_faults_stop_at_once(
    server: MessagesServer, status: int, kind: str, message: str, expected: type[PatcherError]
) -> None:
    server.script = [(status, fault(kind, message), {})]
    with pytest.raises(expected) as caught:
        AnthropicModel("claude-opus-5").ask(request())
    assert len(server.seen) == 1
    assert caught.value.hint
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None  # the SDK's exception holds the request and its headers


def test_a_fault_inside_the_stream(server: MessagesServer) -> None:
    server.script = [
        [*events()[:6], ("error", {"error": {"type": "overloaded_error", "message": "x"}})]
    ]
    with pytest.raises(ModelError, match="overloaded_error") as caught:
        AnthropicModel("claude-opus-5").ask(request())
    assert caught.value.charged


@pytest.mark.parametrize("cut", [0, 4, 8, 10])
def test_a_stream_that_ends_early(server: MessagesServer, cut: int) -> None:
    for broken in (sse(events()[:cut]), events()[:cut] if cut < 10 else events()[:9]):
        server.script = [broken]
        with pytest.raises(ModelError) as caught:
            AnthropicModel("claude-opus-5", max_retries=0).ask(request())
        assert caught.value.charged


def test_an_event_cut_in_the_middle(server: MessagesServer) -> None:
    server.script = [sse(events())[:700]]
    with pytest.raises(ModelError):
        AnthropicModel("claude-opus-5", max_retries=0).ask(request())


def test_no_server(monkeypatch: pytest.MonkeyPatch, server: MessagesServer) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match="no connection") as caught:
        AnthropicModel("claude-opus-5", max_retries=0).ask(request())
    assert not caught.value.charged


def test_the_key_is_nowhere_in_the_run_and_the_reply_is_paid_once(
    server: MessagesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = [
        (401, fault("authentication_error", f"bad key {KEY}"), {}),
        (429, fault("rate_limit_error"), SOON),
        events("the reply"),
    ]
    model = AnthropicModel("claude-opus-5")
    with Run.create(tmp_path, command="optimize", settings={"model": "anthropic"}) as run:
        with pytest.raises(MissingError):
            ask(run, model, request(), 1.0)
        assert account(run.events).committed_usd == 0
        for _ in range(2):
            assert ask(run, model, request(), 1.0).reply.text == "the reply"
        assert account(run.events).spent_usd == pytest.approx(0.055)
    assert len(server.seen) == 3
    for path in run.path.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()
