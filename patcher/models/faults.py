"""One reading of every failure of a model server: by its cause, in one sentence, with the setting
that cures it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from patcher.bench import BudgetError, MissingError, PatcherError, UsageError
from patcher.models import ModelError, Trouble
from patcher.models.gate import MESSAGE_LIMIT, NAME_LIMIT, Cleaner, Draft, inside
from patcher.models.registry import ModelEntry
from patcher.models.retry import LONGEST_WISH_S, retry_after_s
from patcher.models.wire import GateError

_RESUME = "the run is kept: patcher resume"
_ROOM = "set max_output_tokens in [models.NAME] of patcher.toml"
_SMALLER = f"lower prompt_tokens, or {_ROOM}"
_AUTHENTICATION = {"authentication_error", "invalid_api_key"}
_QUOTA = {
    "billing_error",
    "billing_hard_limit_reached",
    "billing_not_active",
    "insufficient_quota",
}
_RATE_LIMIT = {"rate_limit_error", "rate_limit_exceeded", "requests", "tokens"}
_QUEUED = {"token_limit_exceeded"}
"""The account has too much in other batches."""
_MAYBE_BILLED = {408, 502, 504}
"""A gateway gave up waiting; the model behind it may have answered, and billed."""


class NoBatchError(UsageError):
    """The server has no such batch, or no results of it."""


@dataclass(frozen=True)
class Faults:
    """Our errors for those of one model's server."""

    entry: ModelEntry
    clean: Cleaner

    def told(
        self,
        status: int | None,
        body: object,
        headers: Mapping[str, str],
        draft: Draft | None = None,
    ) -> PatcherError:
        """Our error for the server's, by its type first: inside a stream the status is 200."""
        words = words_of(body)
        kind = self.clean.line(inside(body, "error", "type"), NAME_LIMIT)
        said = self.clean.line(message_of(body), MESSAGE_LIMIT) or f"HTTP {status}"
        server = f"the {self.entry.provider} server"
        if words & _AUTHENTICATION or status == 401 or "api key not valid" in said.lower():
            return MissingError(
                f"{server} refused the key: {said}",
                f"set a valid {self.entry.key_name or 'key_variable in [models.NAME]'}; {_RESUME}",
            )
        if words & _QUOTA or status == 402 or "credit balance" in said.lower():
            return BudgetError(f"the account cannot pay: {said}", f"add credit; {_RESUME}")
        if "permission_error" in words or status == 403:
            return MissingError(
                f"the key may not do this: {said}", f"use a key that may; {_RESUME}"
            )
        if status is not None and 300 <= status < 400:
            where = self.clean.line(headers.get("location", ""), NAME_LIMIT) or "nowhere"
            return UsageError(
                f"{server} sends the request on to {where}, which is not followed",
                f"set {self.entry.address_setting} to the address that answers; {_RESUME}",
            )
        if "not_found_error" in words or status == 404:
            return UsageError(
                f"{server} does not know {self.entry.model}: {said}",
                f"choose another --model, or set {self.entry.address_setting}",
            )
        if status == 413 or "request_too_large" in words:
            return UsageError(f"the request is too large: {said}", _SMALLER)
        if not words & _QUEUED and (words & {"invalid_request_error"} or status in (400, 422)):
            hint = _SMALLER if "token" in said or "context" in said else "choose another --model"
            return UsageError(f"{server} refused the request: {said}", hint)
        trouble: Trouble = "server"
        if words & (_RATE_LIMIT | _QUEUED) or status == 429:
            trouble = "rate_limit"
        elif words & {"overloaded_error", "overloaded"} or status in (503, 529):
            trouble = "overloaded"
        elif status in (408, 504) or "timeout_error" in words:
            trouble = "timeout"
        wish = retry_after_s(headers)
        later = wish if wish and wish > LONGEST_WISH_S else None
        return ModelError(
            f"{server} is failing ({kind or status or 'no reason given'}): {said}",
            f"it may be asked again in {later / 60:,.0f} minutes; {_RESUME}" if later else _RESUME,
            trouble=trouble,
            charged=draft is not None or status in _MAYBE_BILLED,
            retry_after_s=wish,
            received_characters=draft.characters if draft else 0,
        )

    def nothing(self, status: int) -> UsageError:
        """A success without a reply, of something that is no model's server."""
        return UsageError(
            f"the {self.entry.provider} server answered with HTTP {status}, which holds no reply",
            f"set {self.entry.address_setting} to the address of an API; {_RESUME}",
        )

    def no_batch(self, body: object) -> NoBatchError:
        """HTTP 404 to a question about batches."""
        said = self.clean.line(message_of(body), MESSAGE_LIMIT) or "HTTP 404"
        return NoBatchError(
            f"the {self.entry.provider} server has no such batch, or no batches at all: {said}",
            f"check the key and {self.entry.address_setting}, or drop batch from [models.NAME] "
            f"(what a lost batch held is then asked, and perhaps paid, again); {_RESUME}",
        )

    def late(self, seconds: float) -> ModelError:
        """The whole call took too long, although the server was never silent for long."""
        return ModelError(
            f"the {self.entry.provider} server took more than {seconds:.0f} s for one reply",
            _RESUME,
            trouble="timeout",
            charged=True,
        )

    def refused(self, error: GateError, draft: Draft) -> PatcherError:
        if error.web_page:
            return UsageError(
                f"the {self.entry.provider} server answered with a web page (HTML), not with the "
                "protocol of a model",
                f"set {self.entry.address_setting} to the address of an API; a proxy may want a "
                f"login first; {_RESUME}",
            )
        return self.broken(str(error), draft)

    def lost(self, error: Exception, draft: Draft) -> ModelError:
        """The connection failed, before the reply or in the midst of it."""
        chain = [error, *_causes(error)]
        names = " ".join(type(each).__name__ for each in chain)
        if draft.started:
            went = "the server went silent" if "Timeout" in names else "the connection ended"
            return self.broken(went, draft)
        trouble: Trouble = "timeout" if "Timeout" in names else "network"
        # Only a connection that was never made is surely free of charge.
        unsent = "ConnectError" in names or "ConnectTimeout" in names
        server, hint = f"the {self.entry.provider} server", _RESUME
        if any(isinstance(each, ssl.SSLError) for each in chain) or "SSL" in str(error.__cause__):
            what = "no TLS there, or none that is trusted, where the address says https"
            hint = f"check {self.entry.address_setting}; {_RESUME}"
        elif unsent:
            what, hint = "no connection", f"is it up? {_RESUME}"
        elif trouble == "timeout":
            what = "no answer in time"
        elif "ProtocolError" in names:
            what = "it closed the connection without an answer, or what it sent is no HTTP"
        else:
            what = "the connection failed, or what it sent cannot be read"
        return ModelError(
            f"{server}: {what}",
            hint,
            trouble="network" if unsent else trouble,
            charged=not unsent,
        )

    def broken(self, why: str, draft: Draft) -> ModelError:
        """A reply that has no end: some of it may have been billed."""
        return ModelError(
            f"the reply broke off: {why}",
            _RESUME,
            trouble="broken",
            charged=True,
            received_characters=draft.characters,
        )


def words_of(body: object) -> set[str]:
    """The type and the code of an error, to compare with what is known."""
    inner = _inner(body)
    return {word for name in ("type", "code") if isinstance(word := inside(inner, name), str)}


def message_of(body: object) -> str:
    """What an error says, as it came: in either protocol, in a list (Google), as `detail` of
    FastAPI, or as text that is no web page."""
    inner = _inner(body)
    said = inside(inner, "message") or inside(inner, "detail") or inner
    if isinstance(said, list):  # FastAPI's, one for each field
        fields = [(inside(each, "loc"), inside(each, "msg")) for each in said[:5]]
        said = "; ".join(
            f"{loc[-1]}: {message}" if isinstance(loc, list) and loc else message
            for loc, message in fields
            if isinstance(message, str)
        )
    return said if isinstance(said, str) and not said.lstrip().startswith("<") else ""


def _inner(body: object) -> object:
    first = body[0] if isinstance(body, list) and body else body
    return inside(first, "error") or first


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What led to it, and what led to that."""
    seen = 0
    while (error := error.__cause__ or error.__context__) and seen < 20:  # type: ignore[assignment]
        seen += 1
        yield error
