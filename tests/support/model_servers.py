"""Doubles of the two paid APIs: HTTP servers on a real socket that speak their protocols, streamed,
and fail as they are told to."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic

from patcher.models import Reply, Request, Usage
from patcher.models.anthropic import AnthropicModel
from patcher.models.api import ApiModel
from patcher.models.batch_endpoint import BatchEndpoint
from patcher.models.gate import Draft
from patcher.models.openai import OpenAIModel
from patcher.models.registry import ModelEntry
from patcher.models.retry import Clock

KEY = "sk-secret-0123456789"


@dataclass(frozen=True)
class Item:
    """What one POST gets."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    then: str = "end"
    """After the body: `end`, `reset` the connection, or be `silent` until the server stops."""
    raw: Iterable[bytes] = ()
    """All that is sent, in place of the rest: it need not be HTTP, nor come to an end."""


class ApiServer(ThreadingHTTPServer):
    """Answers each POST with the next item of its script, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[Item] = []
        self.seen: list[dict[str, Any]] = []
        self.sent = 0
        """Bytes of raw items."""
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, ApiServer)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers["x-api-key"] or self.headers["authorization"].removeprefix("Bearer ")
        server.seen.append({"path": self.path, "key": key, **body})
        item = server.script.pop(0)
        if item.raw:
            self.close_connection = True
            with contextlib.suppress(OSError):  # the client has had enough
                for piece in item.raw:
                    self.wfile.write(piece)
                    server.sent += len(piece)
            return
        streamed = item.status == 200
        if item.body or item.then == "end":
            self.send_response(item.status)
            kind = "text/event-stream" if streamed else "text/json"
            if "content-type" not in item.headers:
                self.send_header("content-type", kind)
            if item.then == "end":
                self.send_header("content-length", str(len(item.body)))
            for name, value in item.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(item.body)
            self.wfile.flush()
        if item.then == "silent":
            server.over.wait()
        if item.then == "reset":
            now = struct.pack("ii", 1, 0)  # close sends RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            self.connection.close()
        self.close_connection = True

    def finish(self) -> None:
        if not self.connection._closed:  # type: ignore[attr-defined]
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def serving() -> Iterator[ApiServer]:
    with ApiServer() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.over.set()
            found.shutdown()
            thread.join()


@dataclass(frozen=True)
class Api:
    """How one API is opened, and what it says."""

    name: str
    model: str
    path: str
    open: Callable[..., ApiModel]
    """(server, quiet_s, run_dir)"""
    events: Callable[..., list[bytes]]
    """(text, stop, tokens): the events of one streamed reply; `stop` as our records name it."""
    fault: Callable[[str, str], dict[str, Any]]
    """(kind, message): the body of an error."""
    error_event: Callable[[str, str], bytes]
    """Likewise inside a stream."""
    images: Callable[[dict[str, Any]], list[str]]
    """The images of a request that the server saw, as base64."""
    quota: tuple[int, str, str]
    """Status, kind and message when the account is empty."""

    def reply(self, text: str = "Hello", stop: str = "end_turn") -> Item:
        return Item(b"".join(self.events(text, stop)))

    def failure(
        self, status: int, kind: str, message: str = "no", headers: dict[str, str] | None = None
    ) -> Item:
        return Item(json.dumps(self.fault(kind, message)).encode(), status, headers or {})


def _anthropic_events(
    text: str = "Hello", stop: str = "end_turn", tokens: tuple[int, int] = (300, 2000)
) -> list[bytes]:
    """Text in two deltas, after a thinking block."""
    message: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-opus-5",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": tokens[0], "output_tokens": 1},
    }
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    half = len(text) // 2
    told: list[tuple[str, dict[str, Any]]] = [
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
                "delta": {"stop_reason": stop, "stop_sequence": None},
                "usage": {"output_tokens": tokens[1]},
            },
        ),
        ("message_stop", {}),
    ]
    return [
        f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()
        for name, data in told
    ]


def _openai_events(
    text: str = "Hello",
    stop: str = "end_turn",
    tokens: tuple[int, int] | None = (300, 2000),
) -> list[bytes]:
    """Text in two deltas, the reason to stop, the usage in a chunk without choices, the end."""
    common = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-5.4-mini"}
    half = len(text) // 2
    finish = {"end_turn": "stop", "max_tokens": "length", "refusal": "stop"}[stop]
    deltas: list[tuple[dict[str, Any], str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": text[:half]}, None),
        ({"content": text[half:]}, None),
        ({"refusal": "I would rather not."} if stop == "refusal" else {}, finish),
    ]
    told: list[dict[str, Any]] = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": why}], "usage": None}
        for delta, why in deltas
    ]
    if tokens:
        usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
        told.append({**common, "choices": [], "usage": usage})
    return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in told), b"data: [DONE]\n\n"]


def _open_anthropic(
    server: ApiServer, quiet_s: float = 10.0, run_dir: Path | None = None, **more: Any
) -> ApiModel:
    entry = ModelEntry(provider="anthropic", model="claude-opus-5", **more)
    return AnthropicModel(entry, run_dir, quiet_s=quiet_s)


def _open_openai(
    server: ApiServer, quiet_s: float = 10.0, run_dir: Path | None = None, **more: Any
) -> ApiModel:
    entry = ModelEntry(provider="openai", model="gpt-5.4-mini", **more)
    return OpenAIModel(entry, run_dir, quiet_s=quiet_s)


def _parts(seen: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [part for part in seen["messages"][-1]["content"] if part["type"] == kind]


APIS = {
    "anthropic": Api(
        name="anthropic",
        model="claude-opus-5",
        path="/v1/messages",
        open=_open_anthropic,
        events=_anthropic_events,
        fault=lambda kind, said: {"type": "error", "error": {"type": kind, "message": said}},
        error_event=lambda kind, said: (
            "event: error\ndata: "
            + json.dumps({"type": "error", "error": {"type": kind, "message": said}})
            + "\n\n"
        ).encode(),
        images=lambda seen: [part["source"]["data"] for part in _parts(seen, "image")],
        quota=(400, "invalid_request_error", "Your credit balance is too low"),
    ),
    "openai": Api(
        name="openai",
        model="gpt-5.4-mini",
        path="/v1/chat/completions",
        open=_open_openai,
        events=_openai_events,
        fault=lambda kind, said: {
            "error": {"type": kind, "code": kind, "message": said, "param": None}
        },
        error_event=lambda kind, said: (
            "data: " + json.dumps({"error": {"type": kind, "code": kind, "message": said}}) + "\n\n"
        ).encode(),
        images=lambda seen: [
            part["image_url"]["url"].removeprefix("data:image/png;base64,")
            for part in _parts(seen, "image_url")
        ],
        quota=(429, "insufficient_quota", "You exceeded your current quota"),
    ),
}


class ModelDouble(ApiModel):
    """A paid model without a server: a test writes its `_once`."""

    _sdk = anthropic

    def _open(self, request: Request) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def _hear(self, event: dict[str, Any], draft: Draft) -> None:
        raise NotImplementedError

    def batch_endpoint(self) -> BatchEndpoint:
        raise NotImplementedError

    def reply(self, request: Request, stop: str, tokens: tuple[int, int] | None) -> Reply:
        """`tokens`: of input and output; None: it does not say."""
        usage, price = Usage(), self.entry.price
        if tokens:
            usage = Usage(
                input_tokens=tokens[0],
                output_tokens=tokens[1],
                cost_usd=price.cost_usd(*tokens) if price else None,
            )
        return Reply(
            text="text",
            model="m",
            usage=usage,
            stop_reason=stop,
            source="api",
            prompt_digest=request.digest,
        )


class Slept:
    """A clock whose sleep only counts; the jitter is half."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    @property
    def clock(self) -> Clock:
        return Clock(sleep=self.pauses.append, jitter=lambda: 0.5)
