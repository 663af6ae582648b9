"""Damaged streams of both protocols, through the gate: what comes is a clean reply or our error.

`python tests/support/gate_fuzz.py [COUNT] [FIRST SEED]` tries a million inputs, about 1,500 a
second and core; `test_gate.py` tries a few.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import sys
from copy import deepcopy
from functools import cache
from typing import Any
from unittest.mock import patch

from model_servers import APIS, KEY, Api

from patcher.bench import PatcherError
from patcher.models import Reply, Request
from patcher.models.api import ApiModel
from patcher.models.faults import message_of
from patcher.models.gate import Draft
from patcher.models.limits import LEAST_ROOM, smaller_room
from patcher.models.retry import retry_after_s
from patcher.models.wire import GateError, events, unpacked

REQUEST = Request(step="op/0/ask", role="generate", system="s", prompt="p" * 900, max_tokens=4000)
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**18, float("nan"), float("inf"), "", "x", [], {}, [[]], [{}]),
    *(KEY, f"a{KEY}b", KEY[3:], "\ud800", "\x1b[2J", "\0", "\u202e", "<script>", "y" * 5000),
    *("text_delta", "message_stop", "error", "refusal", "max_tokens", {"error": {"type": KEY}}),
)
UNCLEAN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


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
    size = rng.choice((1, 7, 100, 10_000))
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    return chunks, "gzip" if packed else ""


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
    room = smaller_room(message_of(body), 4000)
    assert room is None or LEAST_ROOM <= room < 4000
    wait = retry_after_s(headers)
    assert wait is None or wait > 0
    said: object = body if rng.random() < 0.9 else rng.choice(ODD)
    return model._faults.told(rng.choice((None, 204, 302, 400, 401, 429, 500)), said, headers)


@cache
def _model(name: str) -> ApiModel:
    with patch.dict(os.environ, {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY}):
        return APIS[name].open(None)


def check(seed: int) -> Reply | None:
    """Try one input: the reply that came of it, if one did."""
    rng = random.Random(seed)
    model = _model(rng.choice(sorted(APIS)))
    if rng.random() < 0.1:
        _clean_sentence(str(refusal(rng, model)), seed)
        return None
    chunks, encoding = stream(rng, APIS[model.entry.provider])
    draft = Draft(model.name)
    try:
        model._take(events(unpacked(chunks, encoding)), draft)
        reply = model._record(REQUEST, draft)
    except (PatcherError, GateError) as error:
        _clean_sentence(str(error), seed)
        return None
    stored = reply.model_dump_json()
    assert Reply.model_validate_json(stored) == reply, seed
    assert KEY[:-2] not in stored, seed
    for text in (reply.text, reply.model, reply.stop_reason, *reply.repairs):
        assert not UNCLEAN.search(text), seed
    usage = reply.usage
    assert (usage.input_tokens is None) == (usage.output_tokens is None), seed
    if usage.input_tokens is not None and usage.output_tokens is not None:
        assert 0 < usage.input_tokens <= model.worst_tokens(REQUEST), seed
        assert 0 <= usage.output_tokens <= max(4000, 4 * draft.characters), seed
    return reply


def _clean_sentence(said: str, seed: int) -> None:
    assert not UNCLEAN.search(said), seed
    assert KEY[:-2] not in said, seed
    assert len(said) < 600, seed


def main() -> None:
    """Try many."""
    count, first = (int(each) for each in [*sys.argv[1:], *("1000000", "0")[len(sys.argv) - 1 :]])
    replies = sum(check(seed) is not None for seed in range(first, first + count))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{count:,} inputs: {replies:,} replies, {count - replies:,} errors; peak {peak} MiB")


if __name__ == "__main__":
    main()
