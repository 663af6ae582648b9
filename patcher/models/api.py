"""What the two APIs have in common: key, price, worst case, limits."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from patcher.bench import MissingError, PatcherError, UsageError
from patcher.models import ModelError, Reply, Request, Usage
from patcher.models.faults import Faults, message_of, words_of
from patcher.models.gate import Cleaner, Counts, Draft, inside, reply_of
from patcher.models.limits import CHARACTERS_PER_TOKEN, LEAST_ROOM, NamedLimit, named_limit
from patcher.models.registry import ModelEntry
from patcher.models.wire import UNREADABLE, Bounds, GateError, TooLong, bounded, events

if TYPE_CHECKING:
    from patcher.models.batch_endpoint import BatchEndpoint

QUIET_S = 300.0
"""A server silent for so long is given up; a model that thinks may be silent for a while."""
FILTERED = {"content_filter", "content_policy_violation", "invalid_prompt"}
IMAGE_TOKENS = 10_000
"""More than an API charges for an image, whatever its size."""
_AFTER_ITS_END = "the connection failed after its end"
OVERHEAD_TOKENS = 500
"""More than a server wraps around a prompt."""


class ApiModel(ABC):
    """A model behind an official SDK, whose own retries and redirects are off, and whose parsing is
    not used: every byte of the server's goes through `patcher.models.gate`.

    Raises:
        MissingError: no key.
    """

    _sdk: ModuleType
    """`anthropic` or `openai`: both name their exceptions alike."""

    def __init__(
        self, entry: ModelEntry, run_dir: Path | None = None, *, quiet_s: float = QUIET_S
    ) -> None:
        self.entry = entry
        self.name = entry.model
        self.images = entry.sees_images
        self.max_output_tokens = entry.max_output_tokens
        self.context_tokens: int | None = None
        """For prompt and reply together, as its server named it in an earlier run."""
        self.named: NamedLimit | None = None
        """The limit that its server named last."""
        self._structured = entry.holds_to_schemas
        self._run_dir = run_dir
        self._bounds = Bounds.of(entry.max_output_tokens)
        key = _key(entry)
        self._clean = Cleaner(key)
        self._faults = Faults(entry, self._clean)
        if entry.stream is False:  # nothing comes before all of it
            quiet_s = max(quiet_s, self._bounds.seconds)
        timeout = self._sdk.Timeout(quiet_s, connect=10.0)
        self._connection: dict[str, Any] = {
            "api_key": key,
            "base_url": entry.address,
            "max_retries": 0,
            "timeout": timeout,
            "default_headers": {"accept-encoding": "identity"},
            "http_client": self._sdk.DefaultHttpxClient(
                follow_redirects=False,
                # no cookie is kept: a broken one would spoil every later request
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                timeout=timeout,
                event_hooks={"response": [bounded(lambda: self._bounds)]},
            ),
        }
        """For the SDK's client."""

    def holds_key(self, text: str) -> bool:
        """Whether a plain text has the key in it, or half of it."""
        return self._clean.text(text) != text

    def worst_tokens(self, request: Request) -> int:
        """An upper bound: a tokenizer over bytes makes no more tokens than bytes."""
        return self._worst_input(request) + self._room(request)

    def _worst_input(self, request: Request) -> int:
        prompt = len((request.system + request.prompt).encode())
        # servers of one's own may cut an image into patches of 16 pixels without a limit
        images = sum(
            max(IMAGE_TOKENS, image.width * image.height // 256) for image in request.images
        )
        return prompt + images + OVERHEAD_TOKENS

    def worst_cost_usd(self, request: Request) -> float | None:
        if self.entry.price is None:
            return None
        return self.entry.price.cost_usd(
            self._worst_input(request), self._room(request), written=self._kept(request)
        )

    def _kept(self, request: Request) -> int:
        """Bytes, and so at most tokens, that the server is asked to keep in a cache."""
        if not (request.head and self.entry.keeps_prompts):
            return 0
        return self._worst_input(request) - len(request.prompt[request.head :].encode())

    def late(self, request: Request) -> ModelError:
        """The error of a call that was given up after `patience_s`."""
        return self._faults.late(self.patience_s(request))

    def patience_s(self, request: Request) -> float:
        """Seconds after which a call is given up even if bytes of the reply's head still come."""
        return Bounds.of(self._room(request)).seconds + 60.0

    def over_room(self, request: Request, characters: int) -> tuple[int, float]:
        """Tokens and dollars that a text of this length took beyond the room, at the least."""
        tokens = max(0, characters // 4 - self._room(request))
        return tokens, self.entry.price.cost_usd(0, tokens) if self.entry.price else 0.0

    def ask(self, request: Request) -> Reply:
        """Stream one reply; one try, but again at once with less room where the server names its
        limit.

        Raises:
            MissingError: the key is refused.
            BudgetError: the account has no credit left.
            UsageError: the server refuses the request, e.g. an unknown model, or images.
            VerificationError: an image of the request was changed.
            ModelError: another try may help.
        """
        if request.images and not self.images:
            raise UsageError(
                f"{self.name} takes no images",
                "use a model that does; for a server of your own say images = true in "
                "[models.NAME] of patcher.toml",
            )
        for _ in range(2):
            try:
                return self._once(request)
            except self._sdk.APIStatusError as error:
                if words_of(error.body) & FILTERED:
                    return self._refusal(request)
                said = message_of(error.body)
                if error.status_code != 400 or not self._asked_too_much(request, said):
                    raise self._told(error) from None
        try:
            return self._once(request)
        except self._sdk.APIStatusError as error:
            raise self._told(error) from None

    @abstractmethod
    def batch_endpoint(self) -> BatchEndpoint:
        """Where its server takes many questions at once."""

    def values(
        self,
        opened: AbstractContextManager[Any],
        read: Callable[[Iterable[bytes]], Iterator[object]],
        bounds: Bounds,
    ) -> Iterator[object]:
        """What the server answers on a batch, as values of JSON.

        Args:
            opened: the SDK's response, whose body was not read yet.
            read: makes values of its bytes.

        Raises:
            PatcherError: as `ask`;
        """
        draft, self._bounds = Draft(self.name), bounds
        try:
            with opened as response:
                draft.started = True
                yield from read(response.iter_bytes())
                if getattr(response.http_response.stream, "cut", False):
                    yield TooLong(bounds.bytes)
        except self._sdk.APIStatusError as error:
            if error.status_code == 404:
                raise self._faults.no_batch(error.body) from None
            raise self._told(error) from None
        except GateError as error:
            raise self._faults.refused(error, draft) from None
        except PatcherError:
            raise
        except Exception as error:  # as in `_once`
            raise self._faults.lost(error, draft) from None

    def reply_in_batch(self, request: Request, status: int | None, body: object) -> Reply:
        """The reply to one question of a batch.

        Args:
            status: HTTP's, where the server says it of this question.
            body: a whole reply, or an error.

        Raises:
            ModelError: another try may help; and whatever else `ask` raises.
        """
        draft = Draft(self.name, started=True)
        if not inside(body, "error"):
            self._take(iter((body,)), draft)
            return self._record(request, draft)
        if words_of(body) & FILTERED:
            return self._refusal(request)
        if self._asked_too_much(request, message_of(body)):
            raise ModelError("the server takes less than was asked for", trouble="refused")
        raise self._faults.told(status, body, {})

    def _asked_too_much(self, request: Request, message: str) -> bool:
        """Whether a server refuses a schema or names a limit; the next question keeps to it."""
        if self._no_schema(request, message):
            self._structured = False  # an older model; nothing was billed for that
            return True
        named = named_limit(message, self._room(request), self._prompt_tokens(request))
        if named is not None:
            self.named, self.max_output_tokens = named, named.room
        return named is not None

    def _schema(self, request: Request) -> dict[str, Any] | None:
        """What the server is asked to hold the reply to."""
        return request.answer_schema if self._structured else None

    def _no_schema(self, request: Request, message: str) -> bool:
        """Whether a server refuses for the schema."""
        words = ("output_config", "output_format", "response_format", "json_schema", "structured")
        return self._schema(request) is not None and any(word in message for word in words)

    def _once(self, request: Request) -> Reply:
        draft = Draft(self.name)
        self._bounds = Bounds.of(self._room(request))
        try:
            with self._open(request) as response:
                if response.http_response.status_code in (204, 205):
                    raise self._faults.nothing(response.http_response.status_code)
                draft.started = True
                self._take(events(response.iter_bytes()), draft)
                if getattr(response.http_response.stream, "cut", False):
                    draft.too_long = True
        except (PatcherError, self._sdk.APIStatusError):
            raise
        except GateError as error:
            if not draft.whole:
                raise self._faults.refused(error, draft) from None
            draft.repair(_AFTER_ITS_END)
        except Exception as error:
            # What a broken server sends ends in whatever exception of the SDK or of its HTTP
            # client. From None: those of the SDK hold the request and its headers.
            if not draft.whole:
                raise self._faults.lost(error, draft) from None
            draft.repair(_AFTER_ITS_END)
        return self._record(request, draft)

    def _record(self, request: Request, draft: Draft) -> Reply:
        """The reply, now that all of it came."""
        if draft.broken:
            raise self._faults.broken(draft.broken, draft)
        counts = Counts(
            len(request.system) + len(request.prompt),
            self._worst_input(request),
            self._room(request),
            self._kept(request),
        )
        return reply_of(draft, request, self._clean, counts, self.entry.price_of)

    def _take(self, values: Iterator[object], draft: Draft) -> None:
        for value in values:
            if isinstance(value, TooLong):
                draft.too_long = True
                draft.characters += value.bytes
            elif value is UNREADABLE:
                draft.holes = True
            elif isinstance(value, dict):
                if inside(value, "error") or "error" in (value.get("type"), value.get("object")):
                    raise self._faults.told(None, value, {}, draft)
                draft.heard = True
                self._hear(value, draft)
                if draft.closed:
                    return
            else:
                draft.repair("an event that is no object was passed over")

    @abstractmethod
    def _open(self, request: Request) -> AbstractContextManager[Any]:
        """The SDK's response, whose body was not read yet."""

    @abstractmethod
    def _hear(self, event: dict[str, Any], draft: Draft) -> None:
        """Take over what one event says; what nobody knows is passed over."""

    def _pictures(self, request: Request) -> list[bytes]:
        if request.images and self._run_dir is None:
            raise ValueError("images are files of a run, and there is none")
        return [image.read(self._run_dir or Path()) for image in request.images]

    def _room(self, request: Request) -> int:
        room = min(request.max_tokens, self.max_output_tokens)
        if self.context_tokens is None:
            return room
        return min(room, max(self.context_tokens - self._prompt_tokens(request), LEAST_ROOM))

    def _prompt_tokens(self, request: Request) -> int:
        return len(request.system + request.prompt) // CHARACTERS_PER_TOKEN

    def _refusal(self, request: Request) -> Reply:
        """A prompt refused by a filter is a refusal, as when the model itself declines."""
        return Reply(
            text="",
            model=self.name,
            usage=Usage(input_tokens=0, output_tokens=0, cost_usd=0.0),
            stop_reason="refusal",
            source="api",
            prompt_digest=request.digest,
        )

    def _told(self, error: Any) -> PatcherError:
        return self._faults.told(error.status_code, error.body, error.response.headers)


def _key(entry: ModelEntry) -> str:
    name = entry.key_name
    if name is None:
        return "none"  # the SDKs insist on one
    key = os.environ.get(name, "").strip()
    if not key:
        raise MissingError(
            f"no key for {entry.model}: {name} is not set",
            f"set {name}, or answer the prompts yourself with --model exchange:DIR",
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise MissingError(f"{name} holds characters that no key has", f"set {name} again")
    return key
