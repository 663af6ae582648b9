"""Limits that servers name: read from refusals, and kept to by later runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from command_line import patcher
from model_servers import Api, ApiServer, Item, Slept

from patcher.bench import UsageError
from patcher.models import Request
from patcher.models.api import ApiModel
from patcher.models.budget import Budget
from patcher.models.client import ModelClient
from patcher.models.limits import LimitsFile, list_limits, named_limit
from patcher.runs.run import Run

ROOM = 32_000
REQUEST = Request(step="op/0/ask", role="generate", system="s", prompt="p" * 3000, max_tokens=ROOM)
CONTEXT = "This model's maximum context length is 16384 tokens, and you sent 2012 input tokens"


def of_vllm(room: int, prompt: str) -> str:
    """As vLLM 0.25.1 to 0.28.0 refuse."""
    return (
        f"This model's maximum context length is 16384 tokens. However, you requested {room} "
        f"output tokens and your prompt contains {prompt} input tokens, for a total of more"
    )


@pytest.mark.parametrize(
    ("message", "room", "context"),
    [
        ("max_tokens: 32000 > 8,192, which is the maximum", 8192, None),
        ("max_tokens is too large: 32000. This model supports at most 16384 tokens", 16_384, None),
        ("`max_tokens` exceed context limit: 190000 + 32000 > 200000", 10_000, 200_000),
        (CONTEXT, 14_372, 16_384),
        (of_vllm(ROOM, "2012"), 14_372, 16_384),
        (of_vllm(ROOM, "at least 2012"), 13_384, 16_384),  # of the prompt that it cut to count it
        (of_vllm(ROOM, "at least 4000"), 6192, 16_384),
        (of_vllm(ROOM, "at least 16000"), None, None),
        (
            "Requested token count exceeds the model's maximum context length of 16384 tokens. You "
            "requested a total of 34012 tokens: 2012 tokens from the input messages and 32000",
            14_372,
            16_384,
        ),
        (
            "This endpoint's maximum context length is 16384 tokens. However, you requested about "
            "34012 tokens (2012 of text input, 32000 in the output).",
            14_372,
            16_384,
        ),
        ("the request exceeds the available context size (16384 tokens)", 13_384, 16_384),
        ("request (17000 tokens) exceeds the available context size (16384)", None, None),
        ("max_tokens: 32000 > 1", None, None),
        ("the model is 8192 times too small", None, None),
        ("max_tokens: no", None, None),
    ],
)
def test_limits_that_servers_name(message: str, room: int | None, context: int | None) -> None:
    found = named_limit(message, ROOM, prompt_tokens=3000)
    assert (found and found.room, found and found.context) == (room, context)


def ask(folder: Path, model: ApiModel, server: ApiServer, *script: Item) -> tuple[list[int], str]:
    """Ask in a new run: the rooms that were asked for, and what was said."""
    said: list[str] = []
    server.script, before = list(script), len(server.seen)
    with Run.create(folder / "runs", command="optimize") as run:
        ModelClient(Budget(run), clock=Slept().clock, say=said.append).ask(model, REQUEST)
    names = ("max_tokens", "max_completion_tokens")
    rooms = [seen[name] for seen in server.seen[before:] for name in names if name in seen]
    return rooms, "\n".join(said)


def refusal(api: Api, said: str) -> Item:
    return api.failure(400, "invalid_request_error", said)


def test_the_next_run_keeps_to_what_was_named(api: Api, server: ApiServer, tmp_path: Path) -> None:
    named = refusal(api, f"max_tokens: {ROOM} > 8192, the maximum")
    assert ask(tmp_path, api.open(server), server, named, api.reply())[0] == [ROOM, 8192]
    rooms, said = ask(tmp_path, api.open(server), server, api.reply())
    assert rooms == [8192]
    assert "8,192 tokens for a reply" in said
    own = api.open(server, max_output_tokens=16_000)  # a person's word counts
    assert ask(tmp_path, own, server, api.reply())[0] == [16_000]
    other = api.open(server).entry.model_copy(update={"model": "other"})
    assert ask(tmp_path, type(own)(other), server, api.reply())[0] == [ROOM]

    [shown] = json.loads(patcher("models", "--json", cwd=tmp_path).stdout)["named_limits"]
    assert (shown["model"], shown["max_output_tokens"]) == (api.model, 8192)
    assert server.url in shown["server"]
    assert "8,192" in patcher("models", cwd=tmp_path).stdout


def test_a_context_leaves_room_for_the_prompt(api: Api, server: ApiServer, tmp_path: Path) -> None:
    named = refusal(api, CONTEXT)
    assert ask(tmp_path, api.open(server), server, named, api.reply())[0] == [ROOM, 14_372]
    rooms, said = ask(tmp_path, api.open(server), server, api.reply())
    assert rooms == [16_384 - 1000]  # of 3,001 characters
    assert "16,384 tokens for prompt and reply" in said
    both = refusal(api, f"max_tokens: {16_384 - 1000} > 4096")
    assert ask(tmp_path, api.open(server), server, both, api.reply())[0][-1] == 4096
    [known], _ = list_limits()
    assert (known.max_output_tokens, known.context_tokens) == (4096, 16_384)


def test_a_prompt_that_was_not_counted_to_its_end(
    api: Api, server: ApiServer, tmp_path: Path
) -> None:
    refused = refusal(api, of_vllm(16_000, "at least 385"))
    model = api.open(server, max_output_tokens=16_000)
    assert ask(tmp_path, model, server, refused, api.reply())[0] == [16_000, 15_384]


def changed(**values: Any) -> Callable[[Path], None]:
    """A change of fields."""

    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("[" * 4000),
        lambda path: path.write_bytes(b"\xff\0" * 99),
        lambda path: path.write_text(" " * 9999),
        changed(max_output_tokens=1),
        changed(max_output_tokens="\x1b[2J"),
        changed(max_output_tokens=10**30),
        changed(model="another"),
        changed(more=1),
        _fifo,
        _folder,
    ],
)
def test_a_damaged_file_is_passed_over_with_a_word(
    damage: Callable[[Path], object], api: Api, server: ApiServer, tmp_path: Path
) -> None:
    model = api.open(server)
    file = LimitsFile.of(model.entry.address, model.name)
    file.keep(8192, None)
    damage(file.path)
    rooms, said = ask(tmp_path, model, server, api.reply())
    assert rooms == [ROOM]
    assert "is passed over" in said
    assert "\x1b" not in said
    if file.path.is_file():
        file.keep(4096, None)
        known = file.read()
        assert known is not None
        assert known.max_output_tokens == 4096


def test_what_was_named_long_ago_is_no_longer_kept_to(
    api: Api, server: ApiServer, tmp_path: Path
) -> None:
    model = api.open(server)
    file = LimitsFile.of(model.entry.address, model.name)
    file.keep(8192, None)
    today = datetime.now(UTC).date()
    for days, room in ((-29, 8192), (-40, ROOM), (9, ROOM)):
        changed(named_on=(today + timedelta(days=days)).isoformat())(file.path)
        assert ask(tmp_path, api.open(server), server, api.reply())[0] == [room]


def test_no_secret_of_an_address_is_written_down(server: ApiServer) -> None:
    file = LimitsFile.of("http://me:secret@host:8000/v1?key=secret#secret", "m")
    file.keep(8192, None)
    assert "secret" not in file.path.read_text()
    assert file == LimitsFile.of("http://host:8000/v1", "m")


def test_where_it_cannot_be_written_the_run_goes_on(
    api: Api, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "file"))
    named = refusal(api, f"max_tokens: {ROOM} > 8192, the maximum")
    rooms, said = ask(tmp_path, api.open(server), server, named, api.reply())
    assert rooms == [ROOM, 8192]
    assert "later runs will not know it" in said
    with pytest.raises(UsageError):
        LimitsFile("s", "m").read()
