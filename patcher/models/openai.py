"""The OpenAI Chat Completions API through the official SDK, streamed: OpenAI's own server, or any
that speaks the same protocol (vLLM, SGLang, llama.cpp, Ollama, TensorRT-LLM, gateways)."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai

from patcher.models import Reply, Request
from patcher.models.api import QUIET_S, ApiModel
from patcher.models.registry import ModelEntry

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}
"""As the Messages API names them."""
_OLD, _NEW = "max_tokens", "max_completion_tokens"
"""How the room is called: other servers know the old name, OpenAI's own models want the new one."""


class OpenAIModel(ApiModel):
    """A model behind Chat Completions."""

    _sdk = openai

    def __init__(
        self, entry: ModelEntry, run_dir: Path | None = None, *, quiet_s: float = QUIET_S
    ) -> None:
        super().__init__(entry, run_dir, quiet_s=quiet_s)
        self._room_name = _NEW if entry.own_server else _OLD
        self._client = openai.OpenAI(**self._connection)

    def _stream(self, request: Request) -> Reply:
        try:
            return self._once(request)
        except openai.BadRequestError as error:
            if error.code != "unsupported_parameter" or error.param != self._room_name:
                raise
            # Which name a gateway knows, only its refusal tells; nothing was billed for that.
            self._room_name = _NEW if self._room_name == _OLD else _OLD
            return self._once(request)

    def _once(self, request: Request) -> Reply:
        room: dict[str, Any] = {self._room_name: self._room(request)}
        text: list[str] = []
        refused, stop, model = False, "", self.name
        tokens: tuple[int, int] | None = None
        with self._client.chat.completions.create(
            model=self.name,
            messages=self._messages(request),
            stream=True,
            stream_options={"include_usage": True},
            **room,
        ) as stream:
            for chunk in stream:
                self._started = True
                model = chunk.model or model
                if chunk.usage:  # in the last chunk, which has no choices
                    tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                for choice in chunk.choices:
                    text.append(choice.delta.content or "")
                    refused = refused or bool(choice.delta.refusal)
                    stop = choice.finish_reason or stop
        if not stop:
            raise self._broken("it ended before its last event")
        reason = "refusal" if refused else _STOP_REASONS.get(stop, stop)
        return self._reply(request, "".join(text), model, reason, tokens)

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
