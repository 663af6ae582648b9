"""The Anthropic Messages API through the official SDK, streamed."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anthropic

from patcher.models import Request
from patcher.models.api import QUIET_S, ApiModel
from patcher.models.batch_endpoint import (
    BatchEndpoint,
    BatchLine,
    BatchState,
    IsOurs,
    closing_call,
)
from patcher.models.gate import Draft, inside
from patcher.models.registry import ModelEntry
from patcher.models.wire import json_lines

if TYPE_CHECKING:
    from anthropic._types import RequestOptions
    from anthropic.types import CacheControlEphemeralParam, ContentBlockParam

_COUNTS = {
    "input": "input_tokens",
    "written_to_cache": "cache_creation_input_tokens",
    "read_from_cache": "cache_read_input_tokens",
    "output": "output_tokens",
}
"""Tokens of caches, also of one that a gateway adds, are billed on top of input_tokens."""


class AnthropicModel(ApiModel):
    """A Claude model, or what speaks the same protocol."""

    _sdk = anthropic

    def __init__(
        self, entry: ModelEntry, run_dir: Path | None = None, *, quiet_s: float = QUIET_S
    ) -> None:
        super().__init__(entry, run_dir, quiet_s=quiet_s)
        self._client = anthropic.Anthropic(**self._connection)

    def batch_endpoint(self) -> BatchEndpoint:
        return AnthropicBatches(self, self._client)

    def fields(self, request: Request) -> dict[str, Any]:
        """Of one question, as the Messages API takes it."""
        content: list[ContentBlockParam] = [
            {
                "type": "image",
                "source": {
                    "type": "base64",
                    "media_type": "image/png",
                    "data": base64.b64encode(picture).decode(),
                },
            }
            for picture in self._pictures(request)
        ]
        head = request.prompt[: request.head] if self.entry.keeps_prompts else ""
        if head:  # all up to here is kept: system, images and this
            kept: CacheControlEphemeralParam = {"type": "ephemeral"}
            content.append({"type": "text", "text": head, "cache_control": kept})
        if rest := request.prompt[len(head) :]:
            content.append({"type": "text", "text": rest})
        settings: dict[str, Any] = {"effort": self.entry.effort} if self.entry.effort else {}
        if schema := self._schema(request):
            settings["format"] = {"type": "json_schema", "schema": schema}
        more: dict[str, Any] = {"output_config": settings} if settings else {}
        asked = content if len(content) > 1 else request.prompt
        return {
            "model": self.name,
            "max_tokens": self._room(request),
            "system": request.system,
            "messages": [{"role": "user", "content": asked}],
            **more,
        }

    def _open(self, request: Request) -> AbstractContextManager[Any]:
        return self._client.messages.with_streaming_response.create(
            stream=True, extra_body=self.entry.sampling or None, **self.fields(request)
        )

    def _hear(self, event: dict[str, Any], draft: Draft) -> None:
        match event.get("type"):
            case "message_start":
                draft.named(inside(event, "message", "model"))
                self._count(inside(event, "message", "usage"), draft)
            case "content_block_start":
                self._block(event.get("content_block"), draft)
            case "content_block_delta":
                delta = event.get("delta")
                if inside(delta, "type") == "text_delta":
                    draft.add(inside(delta, "text"))
                draft.think(inside(delta, "thinking"))
            case "message_delta":
                draft.stopped(inside(event, "delta", "stop_reason"))
                self._count(event.get("usage"), draft)
            case "message_stop":
                draft.closed = draft.ended
            case "message":  # a whole reply: the server does not stream
                draft.named(event.get("model"))
                blocks = event.get("content")
                for block in blocks if isinstance(blocks, list) else ():
                    self._block(block, draft)
                draft.stopped(event.get("stop_reason"))
                self._count(event.get("usage"), draft)

    def _block(self, block: object, draft: Draft) -> None:
        if inside(block, "type") == "text":
            draft.add(inside(block, "text"))
        draft.think(inside(block, "thinking"))

    def _count(self, usage: object, draft: Draft) -> None:
        for ours, theirs in _COUNTS.items():
            draft.counted(ours, inside(usage, theirs))


class AnthropicBatches(BatchEndpoint):
    """Message Batches."""

    def __init__(self, model: AnthropicModel, client: anthropic.Anthropic) -> None:
        super().__init__(model)
        self._asked, self._client = model, client
        self._batches = client.messages.batches.with_streaming_response

    def create(self, tag: str, asked: Mapping[str, Request]) -> str:
        requests: list[Any] = [
            {
                "custom_id": name,
                "params": {**self._asked.fields(each), **self._asked.entry.sampling},
            }
            for name, each in asked.items()
        ]
        return self.name_of(self.document(self._batches.create(requests=requests)))

    def look(self, batch: str) -> BatchState:
        found = self.document(self._batches.retrieve(batch))
        return BatchState(ended=found.get("processing_status") == "ended")

    def results(self, batch: str, state: BatchState, most: int) -> Iterator[Iterator[object]]:
        # The SDK's own call goes, with the key, wherever `results_url` says.
        path = f"/v1/messages/batches/{quote(batch, safe='')}/results"
        options: RequestOptions = {"headers": {"X-Stainless-Raw-Response": "stream"}}
        opened = closing_call(lambda: self._client.get(path, cast_to=object, options=options))
        yield self.model.values(opened, json_lines, self.bounds(most))

    def line(self, value: dict[str, Any]) -> BatchLine:
        result = value.get("result")
        kind = inside(result, "type")
        body = inside(result, "message" if kind == "succeeded" else "error")
        gone = kind if kind in ("expired", "canceled") else ""
        return BatchLine(custom_id=value.get("custom_id"), body=body, gone=gone)

    def find(self, tag: str, count: int, since_s: float, is_ours: IsOurs) -> str | None:
        """Batches have no name of ours: the results say which one it is, once it has ended."""
        running = False
        for each in self.listed("after_id", self._batches.list, self._created_s, since_s):
            counts = each.get("request_counts")
            known = counts.values() if isinstance(counts, dict) else ()
            whole = [one for one in known if type(one) is int]
            if whole and sum(whole) != count:
                continue
            name = self.name_of(each)
            state = BatchState(ended=each.get("processing_status") == "ended")
            if not state.ended:
                running = True
            elif is_ours(name, state):
                return name
        if running:
            raise self.undecided()
        return None

    @staticmethod
    def _created_s(batch: dict[str, Any]) -> float | None:
        try:
            return datetime.fromisoformat(str(batch.get("created_at"))).timestamp()
        except (ValueError, OverflowError):
            return None
