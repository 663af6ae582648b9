"""The Anthropic Messages API through the official SDK, streamed."""

from __future__ import annotations

import base64
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic

from patcher.models import Request
from patcher.models.api import QUIET_S, ApiModel
from patcher.models.gate import Draft, inside
from patcher.models.registry import ModelEntry

if TYPE_CHECKING:
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

    def _open(self, request: Request) -> AbstractContextManager[Any]:
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
        return self._client.messages.with_streaming_response.create(
            model=self.name,
            max_tokens=self._room(request),
            system=request.system,
            messages=[
                {"role": "user", "content": content if len(content) > 1 else request.prompt},
            ],
            stream=True,
            extra_body=self.entry.sampling or None,
            **more,
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
