"""The Anthropic Messages API through the official SDK: streamed, retried by the SDK, priced from a
table."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from bench import BudgetError, MissingError, PatcherError, UsageError
from patcher.models import ModelError, Reply, Request, Usage
from patcher.models.prices import price, prices, worst_cost_usd

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message

_RESUME = "the run is kept: patcher resume"


class AnthropicModel:
    """A Claude model. Key from ANTHROPIC_API_KEY, server from ANTHROPIC_BASE_URL.

    Raises:
        MissingError: no key.
    """

    def __init__(self, model: str | None = None, *, max_retries: int = 4) -> None:
        import anthropic

        self.name = model or prices().default
        self._key = os.environ.get("ANTHROPIC_API_KEY", "").strip()
        if not self._key:
            raise MissingError(
                "no key for the Anthropic API",
                "set ANTHROPIC_API_KEY, or answer the prompts yourself with --model exchange:DIR",
            )
        self._client = anthropic.Anthropic(api_key=self._key, max_retries=max_retries)

    def worst_cost_usd(self, request: Request) -> float | None:
        return worst_cost_usd(self.name, request)

    def ask(self, request: Request) -> Reply:
        """Stream one reply. Rate limits, overload, 5xx and lost connections are retried by the SDK
        first.

        Raises:
            MissingError: the key is refused.
            BudgetError: the account has no credit left.
            UsageError: the server refuses the request, e.g. an unknown model.
            ModelError: still failing after the retries, or the stream broke.
        """
        import anthropic

        started = False
        try:
            with self._client.messages.stream(
                model=self.name,
                max_tokens=request.max_tokens,
                system=request.system,
                messages=[{"role": "user", "content": request.prompt}],
            ) as stream:
                for _ in stream:
                    started = True
                message = stream.get_final_message() if started else None
        except anthropic.APIStatusError as error:
            raise self._refused(error, started) from None
        except anthropic.APIConnectionError as error:
            # Only a connection that was never made is surely free of charge.
            unsent = type(error.__cause__).__name__.startswith("Connect")
            raise ModelError(
                f"no connection to the Anthropic API: {type(error).__name__}",
                _RESUME,
                charged=not unsent,
            ) from None
        except anthropic.AnthropicError as error:
            raise ModelError(self._clean(str(error)), _RESUME, charged=True) from None
        except Exception as error:
            # A stream breaks below the SDK: in the HTTP client, whose exceptions it does not wrap,
            # or in an event cut short.
            if not (
                type(error).__module__.startswith("http") or isinstance(error, json.JSONDecodeError)
            ):
                raise
            raise ModelError(
                f"the reply broke off: {type(error).__name__}", _RESUME, charged=True
            ) from None
        if message is None or message.stop_reason is None:
            raise ModelError("the reply ended before its last event", _RESUME, charged=True)
        return self._reply(request, message, message.stop_reason)

    def _reply(self, request: Request, message: Message, stop_reason: str) -> Reply:
        used = message.usage
        # Caches are not asked for; a gateway that adds them bills their tokens on top of
        # input_tokens.
        cached = (used.cache_creation_input_tokens or 0) + (used.cache_read_input_tokens or 0)
        paid = price(self.name)
        input_tokens = used.input_tokens + cached
        return Reply(
            text="".join(block.text for block in message.content if block.type == "text"),
            model=message.model,
            usage=Usage(
                input_tokens=input_tokens,
                output_tokens=used.output_tokens,
                cost_usd=paid.cost_usd(input_tokens, used.output_tokens) if paid else None,
            ),
            stop_reason=stop_reason,
            source="api",
            prompt_digest=request.digest,
        )

    def _refused(self, error: anthropic.APIStatusError, started: bool) -> PatcherError:
        """Our error for the server's, by its type first: inside a stream the status is 200."""
        said = self._clean(error.api_message or f"HTTP {error.status_code}")
        kind = error.type or ""
        if kind == "authentication_error" or error.status_code == 401:
            return MissingError(
                f"the Anthropic API refused the key: {said}", "set a valid ANTHROPIC_API_KEY"
            )
        if kind == "permission_error" or error.status_code == 403:
            return MissingError(
                f"the key may not do this: {said}", "use a key that may, or another --model"
            )
        if kind == "billing_error" or error.status_code == 402 or "credit balance" in said.lower():
            return BudgetError(f"the account cannot pay: {said}", f"add credit; {_RESUME}")
        if kind == "not_found_error" or error.status_code == 404:
            return UsageError(
                f"the Anthropic API does not know {self.name}: {said}", "choose another --model"
            )
        if kind == "invalid_request_error" or error.status_code in (400, 413, 422):
            return UsageError(
                f"the Anthropic API refused the request: {said}", "choose another --model"
            )
        return ModelError(
            f"the Anthropic API is failing ({kind or error.status_code}): {said}",
            _RESUME,
            charged=started,
        )

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "[key]")[:500]
