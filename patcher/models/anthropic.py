"""The Anthropic Messages API through the official SDK, streamed."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

import anthropic

from patcher.models import Reply, Request
from patcher.models.api import QUIET_S, ApiModel
from patcher.models.registry import ModelEntry

if TYPE_CHECKING:
    from anthropic.types import ContentBlockParam


class AnthropicModel(ApiModel):
    """A Claude model, or what speaks the same protocol."""

    _sdk = anthropic

    def __init__(
        self, entry: ModelEntry, run_dir: Path | None = None, *, quiet_s: float = QUIET_S
    ) -> None:
        super().__init__(entry, run_dir, quiet_s=quiet_s)
        self._client = anthropic.Anthropic(**self._connection)

    def _stream(self, request: Request) -> Reply:
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
        content.append({"type": "text", "text": request.prompt})
        with self._client.messages.stream(
            model=self.name,
            max_tokens=self._room(request),
            system=request.system,
            messages=[
                {"role": "user", "content": content if request.images else request.prompt},
            ],
        ) as stream:
            for _ in stream:
                self._started = True
            message = stream.get_final_message() if self._started else None
        if message is None or message.stop_reason is None:
            raise self._broken("it ended before its last event")
        used = message.usage
        # Caches are not asked for; a gateway that adds them bills their tokens on top of
        # input_tokens.
        cached = (used.cache_creation_input_tokens or 0) + (used.cache_read_input_tokens or 0)
        return self._reply(
            request,
            "".join(block.text for block in message.content if block.type == "text"),
            message.model,
            message.stop_reason,
            (used.input_tokens + cached, used.output_tokens),
        )
