"""A double of a client: it sends one request, and writes the times that the server's delays say.

    served_client_double PORT REQUESTS CONCURRENCY RESULT [--request-rate RATE]

So figures are exact, whatever else the machine does.
"""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path

port, requests, concurrency, result, *rest = sys.argv[1:]
lines = [json.loads(line) for line in Path(requests).read_text().splitlines()]


def answer(method: str, path: str, body: object = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    connection.request(method, path, None if body is None else json.dumps(body))
    return connection.getresponse().read()


delays = json.loads(answer("GET", "/delays"))
body = {"prompt": lines[0]["prompt"], "max_tokens": 2, "stream": True}
body |= {"ignore_eos": True, "temperature": 0}
assert answer("POST", "/v1/completions", body).endswith(b"data: [DONE]\n\n")
tokens = [line["output_tokens"] for line in lines]
each = [delays["first_ms"] + (count - 1) * delays["token_ms"] for count in tokens]
duration = sum(each) / 1e3 / int(concurrency)
if "--request-rate" in rest:  # requests come one after the other, however fast they are served
    assert int(concurrency) == len(lines)
    duration = len(lines) / float(rest[rest.index("--request-rate") + 1])
found = {
    "duration": duration,
    "input_lens": [len(line["prompt"].split()) for line in lines],
    "output_lens": tokens,
    "ttfts": [delays["first_ms"] / 1e3] * len(lines),
    "itls": [[delays["token_ms"] / 1e3] * (count - 1) for count in tokens],
}
Path(result).write_text(json.dumps(found))
