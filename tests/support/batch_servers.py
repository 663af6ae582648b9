"""Doubles of the two batch endpoints, on a real socket: Message Batches, and Batches with files.

They keep what they were sent, and answer when a test says so, with what it says.
"""

from __future__ import annotations

import email
import email.policy
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Lines = Callable[["Batch"], bytes]
TOKENS = (300, 2000)
MODELS = {"anthropic": "claude-opus-5", "openai": "gpt-5.4-mini"}


@dataclass
class Batch:
    """One that was sent."""

    api: str
    name: str
    asked: dict[str, dict[str, Any]]
    """Bodies of questions by `custom_id`."""
    metadata: dict[str, str] = field(default_factory=dict)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: str = ""
    """As its server says it; empty: under way."""

    def answer(self, custom_id: str, text: str = "", **more: Any) -> dict[str, Any]:
        """One result: a reply, or with `error`, `expired` or `canceled` none."""
        text = text or f"to {self.question(custom_id)}"
        if self.api == "anthropic":
            message = {
                "type": "message",
                "model": MODELS["anthropic"],
                "content": [{"type": "text", "text": text}],
                "stop_reason": "end_turn",
                "usage": {"input_tokens": TOKENS[0], "output_tokens": TOKENS[1]},
            }
            result: dict[str, Any] = {"type": "succeeded", "message": message}
            if error := more.get("error"):
                kind, said = error
                inner = {"type": kind, "message": said}
                result = {"type": "errored", "error": {"type": "error", "error": inner}}
            for gone in ("expired", "canceled"):
                result = {"type": gone} if more.get(gone) else result
            return {"custom_id": custom_id, "result": result}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        body: dict[str, Any] = {
            "model": MODELS["openai"],
            "choices": [{**choice, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": TOKENS[0], "completion_tokens": TOKENS[1]},
        }
        line: dict[str, Any] = {"custom_id": custom_id, "error": None}
        if error := more.get("error"):
            kind, said = error
            body = {"error": {"type": kind, "code": kind, "message": said}}
        for gone, code in (("expired", "batch_expired"), ("canceled", "batch_cancelled")):
            if more.get(gone):
                return {**line, "response": None, "error": {"code": code, "message": "gone"}}
        return {**line, "response": {"status_code": more.get("status", 200), "body": body}}

    def question(self, custom_id: str) -> str:
        return str(self.asked[custom_id]["messages"][-1]["content"])


def all_answered(batch: Batch) -> bytes:
    """In another order, with a stranger among them."""
    lines = [batch.answer(each) for each in reversed(batch.asked)]
    lines.insert(1, {**lines[0], "custom_id": "somebody-else"})
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class BatchServer(ThreadingHTTPServer):
    """Both endpoints."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.batches: list[Batch] = []
        self.files: dict[str, bytes] = {}
        self.lines: Lines = all_answered
        self.refusals: list[tuple[int, dict[str, Any]]] = []
        """Answers to the next POSTs, in place of taking them."""
        self.kills: int | None = None
        """The process that is killed once a batch of its own was taken."""
        self.listing: dict[str, Any] = {}
        """What else its list of batches says."""
        self.more: dict[str, Any] = {}
        """What else it says of each batch."""
        self.faults: list[tuple[int, dict[str, Any]]] = []
        """Answers to the next GETs."""
        self.looks = 0
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def end(self, status: str = "") -> None:
        """All that was sent has ended."""
        for batch in self.batches:
            usual = "ended" if batch.api == "anthropic" else "completed"
            batch.status = batch.status or status or usual

    def shown(self, batch: Batch) -> dict[str, Any]:
        return {**self._usual(batch), **self.more}

    def _usual(self, batch: Batch) -> dict[str, Any]:
        if batch.api == "anthropic":
            return {
                "id": batch.name,
                "type": "message_batch",
                "processing_status": batch.status or "in_progress",
                "request_counts": {"processing": len(batch.asked), "succeeded": 0},
                "created_at": batch.created.isoformat(),
                "expires_at": (batch.created + timedelta(days=1)).isoformat(),
                "results_url": "http://elsewhere.invalid/steal",
            }
        ended = bool(batch.status) and batch.status != "failed"
        return {
            "id": batch.name,
            "object": "batch",
            "status": batch.status or "in_progress",
            "created_at": int(batch.created.timestamp()),
            "metadata": batch.metadata,
            "output_file_id": f"out-{batch.name}" if ended else None,
            "errors": {"data": [{"code": "invalid", "message": "no such model"}]},
        }


class _Handler(BaseHTTPRequestHandler):
    server: BatchServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(f"POST {self.path}")
        if self.server.refusals:
            self._say(*self.server.refusals.pop(0))
            return
        name = f"batch_{len(self.server.batches)}"
        if self.path == "/v1/messages/batches":
            asked = {one["custom_id"]: one["params"] for one in json.loads(body)["requests"]}
            batch = Batch("anthropic", name, asked)
        elif self.path == "/v1/files":
            head = f"content-type: {self.headers['content-type']}\n\n".encode()
            parts = email.message_from_bytes(head + body, policy=email.policy.HTTP).iter_parts()
            file = next(part for part in parts if part.get_filename())
            self.server.files[name] = file.get_content()
            self._say(200, {"id": name, "object": "file"})
            return
        else:
            sent = json.loads(body)
            lines = self.server.files[sent["input_file_id"]].splitlines()
            asked = {one["custom_id"]: one["body"] for one in map(json.loads, lines)}
            batch = Batch("openai", name, asked, sent["metadata"])
        self.server.batches.append(batch)
        if self.server.kills is not None:
            os.kill(self.server.kills, signal.SIGKILL)
        self._say(200, self.server.shown(batch))

    def do_GET(self) -> None:
        path = self.path.split("?")[0].rstrip("/")
        self.server.paths.append(f"GET {path}")
        if self.server.faults:
            self._say(*self.server.faults.pop(0))
            return
        for batch in self.server.batches:
            if path.endswith(f"/{batch.name}"):
                self.server.looks += 1
                self._say(200, self.server.shown(batch))
                return
            if path in (
                f"/v1/messages/batches/{batch.name}/results",
                f"/v1/files/out-{batch.name}/content",
            ):
                self._send(200, self.server.lines(batch))
                return
        if path.endswith("/batches"):
            listed = [self.server.shown(each) for each in reversed(self.server.batches)]
            self._say(200, {"data": listed, "has_more": False, **self.server.listing})
        else:
            self._say(404, {"error": {"type": "not_found_error", "message": "no such thing"}})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def batch_server() -> Iterator[BatchServer]:
    """The double, on a port of this machine."""
    with BatchServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
