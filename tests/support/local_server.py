"""A double of the server of llama-cpp-python, the one of the page "A local model in ten minutes":
whole replies of Chat Completions with their counts, no key, no JSON schema. What it answers was
written before; no model runs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ADVICE = {
    "analyst": {"bottleneck": "latency", "change": "unroll", "expected_speedup": 1.1},
    "audit": {"critical_issue": "none", "why_it_matters": "none", "minimal_fix": "none"},
}
"""By a word of the system prompt."""


class LocalServer(ThreadingHTTPServer):
    """Answers questions for a source with each of `sources` in turn, the last one for ever."""

    daemon_threads = True

    def __init__(self, sources: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Chat)
        self._sources = list(sources)
        self.seen: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, asked: dict[str, Any]) -> str:
        self.seen.append(asked)
        system = asked["messages"][0]["content"]
        for word, advice in ADVICE.items():
            if word in system:
                return json.dumps(advice)
        return self._sources.pop(0) if len(self._sources) > 1 else self._sources[0]


class _Chat(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, LocalServer)
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = server.answer(asked)
        usage = {"prompt_tokens": 3000, "completion_tokens": max(1, len(text) // 4)}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        choice["finish_reason"] = "stop"
        body = json.dumps({"model": asked["model"], "choices": [choice], "usage": usage}).encode()
        self.send_response(200 if self.path == "/v1/chat/completions" else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def local_server(sources: Sequence[str]) -> Iterator[LocalServer]:
    """The double, on a port of this machine."""
    with LocalServer(sources) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
