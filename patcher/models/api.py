"""What the two APIs have in common: key, price, worst case, and one reading of every failure."""

from __future__ import annotations

import email.utils
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from patcher.bench import BudgetError, MissingError, PatcherError, UsageError
from patcher.models import ModelError, Reply, Request, Trouble, Usage
from patcher.models.registry import ModelEntry

QUIET_S = 300.0
"""A server silent for so long is given up; a model that thinks may be silent for a while."""
IMAGE_TOKENS = 10_000
"""More than an API charges for an image, whatever its size."""

_RESUME = "the run is kept: patcher resume"
_AUTHENTICATION = {"authentication_error", "invalid_api_key"}
_QUOTA = {
    "billing_error",
    "billing_hard_limit_reached",
    "billing_not_active",
    "insufficient_quota",
}
_RATE_LIMIT = {"rate_limit_error", "rate_limit_exceeded", "requests", "tokens"}
_MAYBE_BILLED = {408, 502, 504}
"""A gateway gave up waiting; the model behind it may have answered, and billed."""


class ApiModel(ABC):
    """A model behind an official SDK, whose own retries are off: `patcher.models.retry` decides.

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
        self._run_dir = run_dir
        self._started = False
        self._key = _key(entry)
        self._connection: dict[str, Any] = {
            "api_key": self._key,
            "base_url": entry.address,
            "max_retries": 0,
            "timeout": self._sdk.Timeout(quiet_s, connect=10.0),
        }
        """For the SDK's client."""

    def worst_tokens(self, request: Request) -> int:
        """An upper bound: a tokenizer over bytes makes no more tokens than bytes."""
        prompt = len((request.system + request.prompt).encode())
        # servers of one's own may cut an image into patches of 16 pixels without a limit
        images = sum(
            max(IMAGE_TOKENS, image.width * image.height // 256) for image in request.images
        )
        return prompt + images + 500 + self._room(request)

    def worst_cost_usd(self, request: Request) -> float | None:
        if self.entry.price is None:
            return None
        room = self._room(request)
        return self.entry.price.cost_usd(self.worst_tokens(request) - room, room)

    def ask(self, request: Request) -> Reply:
        """Stream one reply; one try.

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
        self._started = False
        try:
            return self._stream(request)
        except PatcherError:
            raise
        except self._sdk.APIStatusError as error:
            if refusal := self._content_filter(request, error):
                return refusal
            raise self._failed(error.status_code, error.body, error.response.headers) from None
        except self._sdk.APITimeoutError as error:
            raise self._lost("timeout", "no answer in time", error) from None
        except self._sdk.APIConnectionError as error:
            raise self._lost("network", "no connection", error) from None
        except self._sdk.APIError as error:  # told of inside the stream
            raise self._failed(None, error.body, {}) from None
        except Exception as error:
            # What a broken server sends ends in whatever exception of the SDK, of its HTTP client
            # or of a JSON parser. From None: those of the SDK hold the request and its headers.
            raise self._broken(f"{type(error).__name__}: {error}"[:200]) from None

    @abstractmethod
    def _stream(self, request: Request) -> Reply:
        """Ask, setting `_started` at the first event."""

    def _reply(
        self,
        request: Request,
        text: str,
        model: str,
        stop_reason: str,
        tokens: tuple[int, int] | None,
    ) -> Reply:
        """`tokens`: of input and output, where the server says."""
        usage = Usage()
        if tokens:
            price = self.entry.price
            usage = Usage(
                input_tokens=tokens[0],
                output_tokens=tokens[1],
                cost_usd=price.cost_usd(*tokens) if price else None,
            )
        return Reply(
            text=self._clean(text),
            model=self._clean(model),
            usage=usage,
            stop_reason=stop_reason,
            source="api",
            prompt_digest=request.digest,
        )

    def _pictures(self, request: Request) -> list[bytes]:
        if request.images and self._run_dir is None:
            raise ValueError("images are files of a run, and there is none")
        return [image.read(self._run_dir or Path()) for image in request.images]

    def _room(self, request: Request) -> int:
        return min(request.max_tokens, self.max_output_tokens)

    def _content_filter(self, request: Request, error: Any) -> Reply | None:
        """A prompt refused by a filter is a refusal, as when the model itself declines."""
        kind, code, _ = _told(error.body)
        if {kind, code} & {"content_filter", "content_policy_violation", "invalid_prompt"}:
            return self._reply(request, "", self.name, "refusal", (0, 0))
        return None

    def _failed(self, status: int | None, body: object, headers: Mapping[str, str]) -> PatcherError:
        """Our error for the server's, by its type first: inside a stream the status is 200."""
        kind, code, message = _told(body)
        said = self._clean(message or f"HTTP {status}")
        words, server = {kind, code}, f"the {self.entry.provider} server"
        if words & _AUTHENTICATION or status == 401:
            return MissingError(
                f"{server} refused the key: {said}",
                f"set a valid {self.entry.key_name or 'key_variable in [models.NAME]'}; {_RESUME}",
            )
        if words & _QUOTA or status == 402 or "credit balance" in said.lower():
            return BudgetError(f"the account cannot pay: {said}", f"add credit; {_RESUME}")
        if kind == "permission_error" or status == 403:
            return MissingError(
                f"the key may not do this: {said}", f"use a key that may; {_RESUME}"
            )
        if kind == "not_found_error" or status == 404:
            return UsageError(
                f"{server} does not know {self.name}: {said}", "choose another --model"
            )
        if kind == "invalid_request_error" or status in (400, 413, 422):
            return UsageError(f"{server} refused the request: {said}", "choose another --model")
        trouble: Trouble = "server"
        if words & _RATE_LIMIT or status == 429:
            trouble = "rate_limit"
        elif kind in ("overloaded_error", "overloaded") or status in (503, 529):
            trouble = "overloaded"
        elif status in (408, 504) or kind == "timeout_error":
            trouble = "timeout"
        return ModelError(
            f"{server} is failing ({kind or code or status}): {said}",
            _RESUME,
            trouble=trouble,
            charged=self._started or status in _MAYBE_BILLED,
            retry_after_s=_retry_after_s(headers),
        )

    def _lost(self, trouble: Trouble, what: str, error: Exception) -> ModelError:
        if self._started:
            return self._broken(type(error.__cause__ or error).__name__)
        # Only a connection that was never made is surely free of charge.
        unsent = type(error.__cause__).__name__.startswith("Connect")
        return ModelError(
            f"the {self.entry.provider} server: {what}",
            f"is it up? {_RESUME}" if unsent else _RESUME,
            trouble="network" if unsent else trouble,
            charged=not unsent,
        )

    def _broken(self, why: str) -> ModelError:
        """A reply that has no end: some of it may have been billed."""
        return ModelError(
            f"the reply broke off: {self._clean(why)}", _RESUME, trouble="broken", charged=True
        )

    def _clean(self, text: str) -> str:
        """Without the key, which a hostile or helpful server may repeat."""
        return text.replace(self._key, "[key]") if len(self._key) >= 8 else text


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


def _told(body: object) -> tuple[str, str, str]:
    """Kind, code and message of an error's body; empty where it says nothing."""
    inner = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(inner, str):
        return "", "", inner[:500]
    if not isinstance(inner, dict):
        return "", "", ""
    kind, code, message = (str(inner.get(name) or "") for name in ("type", "code", "message"))
    return kind, code, message[:500]


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from `retry-after-ms` or `retry-after` (a number, or a date of HTTP)."""
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        said = headers.get(name, "")
        try:
            seconds = float(said) / per_second
        except ValueError:
            continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    try:
        when = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(when.timestamp() - time.time(), 0.0)
