"""The OpenAI Chat Completions API through the official SDK, streamed: OpenAI's own server, or any
that speaks the same protocol (vLLM, SGLang, llama.cpp, Ollama, TensorRT-LLM, gateways)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai

from patcher.models import ModelError, Reply, Request
from patcher.models.api import QUIET_S, ApiModel
from patcher.models.batch_endpoint import BatchEndpoint, BatchLine, BatchState, IsOurs
from patcher.models.faults import NoBatchError
from patcher.models.gate import Draft, inside
from patcher.models.registry import ModelEntry
from patcher.models.wire import json_lines

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam

_COUNTS = (
    ("input", "prompt_tokens"),
    ("cached", "prompt_tokens_details", "cached_tokens"),
    ("output", "completion_tokens"),
    ("total", "total_tokens"),
)
"""xAI and Google count thinking, which is billed as output, in the total alone."""
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

    def batch_endpoint(self) -> BatchEndpoint:
        return OpenAIBatches(self, self._client)

    def fields(self, request: Request) -> dict[str, Any]:
        """Of one question, as Chat Completions take it."""
        more: dict[str, Any] = {self._room_name: self._room(request)}
        if self.entry.effort:
            more["reasoning_effort"] = self.entry.effort
        if schema := self._schema(request):
            form = {"name": request.role, "schema": schema, "strict": True}
            more["response_format"] = {"type": "json_schema", "json_schema": form}
        return {"model": self.name, "messages": self._messages(request), **more}

    def reply_in_batch(self, request: Request, status: int | None, body: object) -> Reply:
        code, param = (inside(body, "error", name) for name in ("code", "param"))
        if code == "unsupported_parameter" and param == self._room_name:
            self._room_name = _NEW if self._room_name == _OLD else _OLD
            raise ModelError("the server calls the room otherwise", trouble="refused")
        return super().reply_in_batch(request, status, body)

    def _open(self, request: Request) -> AbstractContextManager[Any]:
        more: dict[str, Any] = {"stream": self.entry.stream is not False}
        if more["stream"]:
            more["stream_options"] = {"include_usage": True}
        return self._client.chat.completions.with_streaming_response.create(
            extra_body=self.entry.sampling or None, **self.fields(request), **more
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


class OpenAIBatches(BatchEndpoint):
    """Batches of a file of Chat Completions."""

    def __init__(self, model: OpenAIModel, client: openai.OpenAI) -> None:
        super().__init__(model)
        self._asked = model
        self._batches = client.batches.with_streaming_response
        self._files = client.files.with_streaming_response

    def create(self, tag: str, asked: Mapping[str, Request]) -> str:
        lines = [
            {
                "custom_id": name,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {**self._asked.fields(each), **self._asked.entry.sampling},
            }
            for name, each in asked.items()
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = (f"{tag}.jsonl", content, "application/jsonl")
        sent = self.document(self._files.create(file=file, purpose="batch"))
        return self.name_of(
            self.document(
                self._batches.create(
                    input_file_id=self.name_of(sent),
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    metadata={"patcher": tag},
                )
            )
        )

    def look(self, batch: str) -> BatchState:
        found = self.document(self._batches.retrieve(batch))
        status = found.get("status")
        if status == "failed":
            faults = inside(found, "errors", "data")
            first = faults[0] if isinstance(faults, list) and faults else None
            return BatchState(ended=True, refused={"error": first or {"message": "no reason"}})
        ids = [found.get(name) for name in ("output_file_id", "error_file_id")]
        files = tuple(self.name_of({"id": each}) for each in ids if each)
        ended = status in ("completed", "expired", "cancelled")
        if ended and not files and inside(found, "request_counts", "completed"):
            raise NoBatchError("a batch has answers, and names no file", "try patcher resume later")
        return BatchState(
            ended=ended,
            gone={"expired": "expired", "cancelled": "canceled"}.get(str(status), ""),
            files=files,
        )

    def results(self, batch: str, state: BatchState, most: int) -> Iterator[Iterator[object]]:
        for file in state.files:
            yield self.model.values(self._files.content(file), json_lines, self.bounds(most))

    def line(self, value: dict[str, Any]) -> BatchLine:
        answered = value.get("response")
        status, body = inside(answered, "status_code"), inside(answered, "body")
        if error := value.get("error"):
            body = {"error": error}
        code = inside(error, "code")
        return BatchLine(
            custom_id=value.get("custom_id"),
            status=status if type(status) is int else None,
            body=body,
            gone={"batch_expired": "expired", "batch_cancelled": "canceled"}.get(str(code), ""),
        )

    def find(self, tag: str, count: int, since_s: float, is_ours: IsOurs) -> str | None:
        for each in self.listed("after", self._batches.list, self._created_s, since_s):
            if inside(each, "metadata", "patcher") == tag:
                return self.name_of(each)
        return None

    @staticmethod
    def _created_s(batch: dict[str, Any]) -> float | None:
        said = batch.get("created_at")
        return float(said) if type(said) is int else None
