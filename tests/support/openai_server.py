"""A double of an engine's server: it speaks the streaming protocol of OpenAI's completions.

    openai_server.py --port N [--first-ms 5] [--token-ms 1] [--patch ID] [--die-after N]
        [--meet DIR] [--takes-all] [--hang]

Delays are known: the first token comes after one, each other token after the other. `/delays` says
what they are. With `--patch` it writes receipts as a patched engine does, two calls a request.
Given a share of the memory and `--meet`, it serves once another server waits there, too.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OPTIONS = argparse.Namespace()
STATES = ("/sleep", "/wake_up", "/reset_prefix_cache")
"""What is answered, and changes nothing here."""
SEEN: list[dict[str, Any]] = []
LOCK = threading.Lock()


class Completions(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""

    def do_GET(self) -> None:
        answers = {
            "/health": {},
            "/v1/models": {"data": [{"id": "model"}]},
            "/delays": {"first_ms": OPTIONS.first_ms, "token_ms": OPTIONS.token_ms},
        }
        found = answers.get(self.path)
        self._whole(404 if found is None else 200, found or {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/completions":
            self._whole(200 if self.path.split("?")[0] in STATES else 404, {})
            return
        asked = json.loads(body)
        with LOCK:
            SEEN.append(asked)
            count = len(SEEN)
            write_receipt(count)
        if OPTIONS.die_after and count > OPTIONS.die_after:
            print("out of luck", flush=True)
            os._exit(3)
        tokens = int(asked["max_tokens"])
        if OPTIONS.hang:
            time.sleep(600)
        if not asked.get("ignore_eos") or asked.get("temperature") != 0:
            self._whole(400, {"error": "lengths and tokens are not those that were asked for"})
            return
        if not asked.get("stream"):
            self._whole(200, {"choices": [{"text": " t5" * tokens}]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for index in range(tokens):
                time.sleep((OPTIONS.token_ms if index else OPTIONS.first_ms) / 1e3)
                self._event({"choices": [{"index": 0, "text": " t5", "finish_reason": None}]})
        except (BrokenPipeError, ConnectionResetError):  # the client went away
            self.close_connection = True
            return
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": tokens}
            self._event({"choices": [], "usage": {**usage, "total_tokens": sum(usage.values())}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def _whole(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def write_receipt(requests: int) -> None:
    """What a worker with that patch would have written by now."""
    if not OPTIONS.patch:
        return
    folder = Path(os.environ["PATCHER_RECEIPTS"])
    folder.mkdir(parents=True, exist_ok=True)
    receipt = {"patch_id": OPTIONS.patch, "digest": "0" * 64, "pid": os.getpid()}
    receipt |= {"calls": {"kernel": 2 * requests}}
    half = folder / "receipt.part"
    half.write_text(json.dumps(receipt))
    half.replace(folder / "receipt.json")


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as a test opens."""

    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-ms", type=float, default=5.0)
    parser.add_argument("--token-ms", type=float, default=1.0)
    parser.add_argument("--patch", default="")
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--hang", action="store_true", help="answer no request")
    parser.add_argument("--meet", type=Path)
    parser.add_argument("--takes-all", action="store_true", help="of the memory, whatever is said")
    OPTIONS = parser.parse_args()
    if OPTIONS.gpu_memory_utilization and OPTIONS.takes_all:
        raise SystemExit("out of memory")
    if OPTIONS.gpu_memory_utilization and OPTIONS.meet:
        (OPTIONS.meet / f"{os.getpid()}.here").touch()
        while len(list(OPTIONS.meet.glob("*.here"))) < 2:
            time.sleep(0.02)
    Server(("127.0.0.1", OPTIONS.port), Completions).serve_forever()
