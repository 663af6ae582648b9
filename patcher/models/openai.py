"""The OpenAI Chat Completions API through the official SDK, streamed: OpenAI's own server, or any
that speaks the same protocol (vLLM, SGLang, llama.cpp, Ollama, TensorRT-LLM, gateways)."""

from __future__ import annotations

import base64
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai

from patcher.models import Reply, Request
from patcher.models.api import QUIET_S, ApiModel
from patcher.models.gate import Draft, inside
from patcher.models.registry import ModelEntry

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam

_COUNTS = (
    ("input", "prompt_tokens"),
    ("cached", "prompt_tokens_details", "cached_tokens"),
    ("output", "completion_tokens"),
)
_OLD, _NEW = "max_tokens", "max_completion_tokens"
"""How the room is called: other servers know the old name, OpenAI's own models want the new one."""


def _take(content: object, draft: Draft) -> None:
    """A text, or parts of one as in a request, where some servers put the thinking, too."""
    if not isinstance(content, list):
        draft.add(content)
        return
    for part in content:
        if inside(part, "type") == "text":
            draft.add(inside(part, "text"))
        thought = inside(part, "thinking")
        draft.think(thought)
        for each in thought if isinstance(thought, list) else ():
            draft.think(inside(each, "text"))


class OpenAIModel(ApiModel):
    """A model behind Chat Completions."""

    _sdk = openai

    def __init__(
        self, entry: ModelEntry, run_dir: Path | None = None, *, quiet_s: float = QUIET_S
    ) -> None:
        super().__init__(entry, run_dir, quiet_s=quiet_s)
        self._room_name = _NEW if entry.own_server else _OLD
        self._client = openai.OpenAI(**self._connection)

    def _once(self, request: Request) -> Reply:
        try:
            return super()._once(request)
        except openai.BadRequestError as error:
            if error.code != "unsupported_parameter" or error.param != self._room_name:
                raise
            # Which name a gateway knows, only its refusal tells; nothing was billed for that.
            self._room_name = _NEW if self._room_name == _OLD else _OLD
            return super()._once(request)

    def _open(self, request: Request) -> AbstractContextManager[Any]:
        more: dict[str, Any] = {self._room_name: self._room(request)}
        streamed = self.entry.stream is not False
        more["stream"] = streamed
        if streamed:
            more["stream_options"] = {"include_usage": True}
        if self.entry.effort:
            more["reasoning_effort"] = self.entry.effort
        if schema := self._schema(request):
            form = {"name": request.role, "schema": schema, "strict": True}
            more["response_format"] = {"type": "json_schema", "json_schema": form}
        return self._client.chat.completions.with_streaming_response.create(
            model=self.name,
            messages=self._messages(request),
            extra_body=self.entry.sampling or None,
            **more,
        )

    def _hear(self, event: dict[str, Any], draft: Draft) -> None:
        draft.named(event.get("model"))
        usage = event.get("usage")  # in the last chunk, which has no choices
        for ours, *path in _COUNTS:
            draft.counted(ours, inside(usage, *path))
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            index = inside(choice, "index")
            if type(index) is int and index:
                continue  # one was asked for
            # `message` where the server does not stream
            said = inside(choice, "delta") or inside(choice, "message")
            _take(inside(said, "content"), draft)
            for name in ("reasoning_content", "reasoning"):
                draft.think(inside(said, name))
            draft.refused = draft.refused or bool(inside(said, "refusal"))
            draft.stopped(inside(choice, "finish_reason"))

    def _messages(self, request: Request) -> list[ChatCompletionMessageParam]:
        parts: list[ChatCompletionContentPartParam] = [
            {
                "type": "image_url",
                "image_url": {
                    "url": f"data:image/png;base64,{base64.b64encode(picture).decode()}",
                    "detail": "high",
                },
            }
            for picture in self._pictures(request)
        ]
        parts.append({"type": "text", "text": request.prompt})
        return [
            {"role": "system", "content": request.system},
            {"role": "user", "content": parts if request.images else request.prompt},
        ]
