"""Servers of engines and the clients that people drive them with, as data (`serving.toml`)."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from patcher.bench.engines.architecture import full_config
from patcher.bench.errors import UsageError
from patcher.bench.records import Record, write_atomically
from patcher.bench.toolchains import cache_root

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "eos_token": "<eos>",
    "clean_up_tokenization_spaces": False,
}


class OfflineBench(Record):
    """A client that starts the engine in its own process, once for each point."""

    trace: str
    """The trace whose lengths all prompts have; it has one part."""
    sizes: tuple[int, ...] = ()
    """Numbers of prompts at a time, in place of the trace's concurrencies."""
    result: Literal["latency", "throughput"]
    """How its result is read: see `patcher.bench.ab.offline.READERS`."""
    begins: str
    """What it prints when the engine has started, before its warm-up."""
    brief: tuple[str, ...] = ()
    """Further arguments where it only compiles."""
    vocabulary: int = 1
    """It draws prompts from that many token ids, which a model must have."""


class ServingClient(Record):
    """One client with the server that it drives, or one that starts the engine itself.

    Words in braces are filled in: `python`, `model`, `tokenizer`, `host`, `port`, `dtype`, `seed`,
    `context` (tokens of the longest sequence), `users` (the largest concurrency), and for a run
    `requests` (the file with them), `count`, `concurrency`, `rate`, `run` (a seed), `folder`,
    `result`. One without a server has `input_len` and `output_len` in place of `requests`, `count`,
    `rate` and `run`.
    """

    engine: str
    """A name of `patcher.bench.engines.ENGINES`."""
    package: str
    """The distribution of the engine."""
    needs: tuple[str, ...] = ()
    """Other modules that the client imports."""
    install: str
    """The command that installs what it needs."""
    plugins: str
    """The group of entry points from which the engine loads patcher in each of its processes."""
    serve: tuple[str, ...] = ()
    """The server's command; empty: there is none, and `offline` is given."""
    random_weights: tuple[str, ...] = ()
    """Arguments of the engine for random weights; empty: it cannot serve any."""
    random_environment: dict[str, str] = Field(default_factory=dict)
    health: str = ""
    """A path that answers with 200 once requests are served."""
    imports: str = ""
    """What takes the client long to import; it is imported while the server loads."""
    bench: tuple[str, ...] = Field(min_length=1)
    """A module, as `python -m` takes it, and its arguments. It writes a file whose last line is a
    JSON object with `duration`, and by request `input_lens`, `output_lens`, `ttfts` and `itls`; see
    `patcher.bench.ab.served.run_of`. One without a server writes the JSON that `offline` names."""
    rate: tuple[str, ...] = ()
    """Arguments of the client for a run at `rate` requests a second, whose `concurrency` is then
    the number of all requests; empty: it cannot."""
    request: str = ""
    """A line of the file of requests; `prompt` and `answer`, of as many tokens as are asked for,
    are JSON strings."""
    offline: OfflineBench | None = None
    """What is given where there is no server."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        of_server = (self.serve, self.health, self.imports, self.request)
        if not (all(of_server) if self.offline is None else not any(of_server)):
            raise ValueError("a client has serve, health, imports and request, or offline")
        return self


@cache
def clients() -> dict[str, ServingClient]:
    """All clients of `serving.toml`."""
    text = (
        resources.files("patcher.bench.engines")
        .joinpath("serving.toml")
        .read_text(encoding="utf-8")
    )
    return {name: ServingClient(**fields) for name, fields in tomllib.loads(text).items()}


def client_of(name: str | None, engine: str) -> tuple[str, ServingClient]:
    """The client of that name, by default the engine's first.

    Raises:
        UsageError: there is none, or it drives another engine.
    """
    fitting = [key for key, one in clients().items() if one.engine == engine]
    listed = ", ".join(f"{key} (--engine {one.engine})" for key, one in clients().items())
    if name is None and fitting:
        name = fitting[0]
    if name is None:
        raise UsageError(f"no client drives {engine}", f"clients are: {listed}")
    if name not in clients():
        raise UsageError(f"unknown client {name!r}", f"clients are: {listed}")
    if name not in fitting:
        raise UsageError(f"{name} drives another engine than {engine}", f"clients are: {listed}")
    return name, clients()[name]


def filled(words: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    """A command line with its words in braces filled in."""
    return [word.format_map({key: str(value) for key, value in values.items()}) for word in words]


def request_line(template: str, prompt: str, answer: str, output_len: int) -> str:
    """One line of a client's file of requests."""
    parts = {"prompt": json.dumps(prompt), "answer": json.dumps(answer)}
    parts["output_len"] = str(output_len)
    # at once, since a prompt may contain such a word, too
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], template)


def flags(arguments: Mapping[str, JsonValue]) -> list[str]:
    """Arguments of an engine as its command line spells them: `--name value`, `--name`, `--no-name`
    for false, and JSON for tables and lists.
    """
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                words.append(f"--{option}")
            case False:
                words.append(f"--no-{option}")
            case str() | int() | float():
                words += [f"--{option}", str(value)]
            case _:
                words += [f"--{option}", json.dumps(value)]
    return words


def word_tokenizer(model: str) -> Path:
    """The folder of a tokenizer for random weights: one word a token, `t5` is token 5.

    Raises:
        UsageError: as `full_config`, or the cache cannot be written.
    """
    size = int(full_config(model)["vocab_size"])
    folder = cache_root() / "word-tokenizers" / str(size)
    ends = ("<unk>", "<eos>")
    vocabulary = {ends[token] if token < len(ends) else f"t{token}": token for token in range(size)}
    whole: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": ends[0]},
    }
    try:
        write_atomically(folder / "tokenizer.json", json.dumps(whole))
        write_atomically(folder / "tokenizer_config.json", json.dumps(TOKENIZER_CONFIG))
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}", "set PATCHER_CACHE to a writable folder"
        ) from error
    return folder
