"""The gate: where what a model server sent becomes our own record. Nothing of it goes past as it
came.

A server is a stranger. `patcher.models.wire` bounds its bytes. Here each text is made valid and
visible, without the key, and then cut. Each count is checked. A field that does not fit costs that
field alone and is told as a repair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from patcher.models import Reply, Request, Usage
from patcher.models.prices import UNKNOWN_CACHE, Price, same_model
from patcher.visible import one_line, visible

TEXT_CHARACTERS = 4 << 20
"""So much of a reply's text is kept. The longest room holds about a tenth."""
NAME_LIMIT, MESSAGE_LIMIT = 120, 300
"""Characters of a server's name for something, and of its message."""
MOST_PER_TOKEN = 64
"""No text has so many characters a token."""
CUT_PER_TOKEN = 6
"""No prompt of ours has so many (3.3 to 3.7 seen): the server read a part of it alone."""
STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "content_filter": "refusal",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    **{
        name: name
        for name in ("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal")
    },
    "model_context_window_exceeded": "model_context_window_exceeded",
}
"""As the Messages API names them; the first five are Chat Completions'."""

PriceOf = Callable[[str], Price | None]


def inside(value: object, *names: str) -> Any:
    """What an object of JSON holds below these names; None where there is no such thing."""
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


@dataclass(frozen=True)
class Cleaner:
    """Makes a server's text ours: valid, visible, without the key or most of it."""

    key: str

    def text(self, text: str) -> str:
        """Of any length."""
        # the two halves of a character may have come in two events
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._without_key(visible(text.replace("\r\n", "\n")))

    def line(self, text: object, limit: int) -> str:
        """One line; the key goes before it is cut."""
        return one_line(self.text(text), limit) if isinstance(text, str) else ""

    def _without_key(self, text: str) -> str:
        """Without the key, and without any part of it that is half as long."""
        key = self.key
        if len(key) < 8:
            return text
        length = max(8, (len(key) + 1) // 2)
        parts = [key[begin : begin + length] for begin in range(len(key) - length + 1)]
        if not any(part in text for part in parts):
            return text
        marks = bytearray(len(text))
        for part in parts:
            for at in _places(text, part):
                marks[at : at + length] = b"\1" * length
        kept: list[str] = []
        done = 0
        for span in re.finditer(b"\1+", marks):
            kept.append(text[done : span.start()] + "[key]")
            done = span.end()
        return "".join(kept) + text[done:]


def _places(text: str, part: str) -> Iterator[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


@dataclass
class Draft:
    """A reply as it comes: what the server said, not yet believed."""

    asked_model: str
    pieces: list[str] = field(default_factory=list)
    characters: int = 0
    """Of text and thinking, also of what was not kept."""
    model: object = None
    stop: object = None
    refused: bool = False
    heard: bool = False
    """Whether anything came that is an event of a model's protocol, as far as its form goes."""
    started: bool = False
    """Whether the server began to answer."""
    ended: bool = False
    """Whether a reason to stop came."""
    closed: bool = False
    """Whether nothing more is to come."""
    too_long: bool = False
    holes: bool = False
    """Whether a part is lost: the rest must not be used."""
    counts: dict[str, object] = field(default_factory=dict)
    """Of tokens, by our names: input, written_to_cache, read_from_cache, output, total."""
    repairs: list[str] = field(default_factory=list)

    def named(self, model: object) -> None:
        """The model that says it answers; the last word counts."""
        if model is not None:
            self.model = model

    def add(self, text: object) -> None:
        """A piece of the text."""
        if text is None:
            return
        if not isinstance(text, str):
            self.repair("a text that is no text was left out")
            return
        if text and self.ended:
            self.holes = True  # in the wrong order
        self.characters += len(text)
        if self.characters > TEXT_CHARACTERS:
            self.too_long = True
        else:
            self.pieces.append(text)

    def think(self, text: object) -> None:
        """A piece of what is not the answer; it is counted, not kept."""
        if isinstance(text, str):
            self.characters += len(text)

    def stopped(self, reason: object) -> None:
        """Why it ended; some servers send an empty reason with every event before."""
        if reason is not None and reason != "":
            self.stop, self.ended = reason, True

    def counted(self, name: str, said: object) -> None:
        """A number of tokens by our name for it; of several numbers the greatest counts."""
        before = self.counts.get(name)
        if isinstance(said, int) and not isinstance(said, bool) and isinstance(before, int):
            said = max(before, said)
        if said is not None:
            self.counts[name] = said

    @property
    def whole(self) -> bool:
        """Whether it can be used although its last bytes did not come."""
        return self.ended and not self.holes

    @property
    def broken(self) -> str:
        """Why it is no reply, if so."""
        if self.holes:
            return "a part of it cannot be read"
        if self.ended or (self.too_long and self.characters and self.pieces):
            return ""
        if self.too_long:
            return "more came than a reply can hold"
        if not self.heard:
            return "nothing in it is the protocol of a model"
        return "it ended before its last event"

    def repair(self, what: str) -> None:
        """Note once how something was read that was not as it should be."""
        if what not in self.repairs:
            self.repairs.append(what)


def count(value: object, least: int, most: int) -> int | None:
    """A number of tokens; None where that is none: no whole number, or one that cannot be."""
    return value if type(value) is int and least <= value <= most else None


@dataclass(frozen=True)
class Counts:
    """What a call can have taken at most, to check a server's counts by."""

    sent_characters: int
    input_tokens: int
    room: int
    kept: int = 0
    """Tokens at most that were to be kept in a cache; 0: no cache was asked for."""

    def usage(self, draft: Draft, price: Price | None) -> Usage:
        """The server's counts where they can be true, else none: the worst case is booked then."""
        said = draft.counts
        cached = [said.get(name) for name in ("written_to_cache", "read_from_cache")]
        parts = [said.get("input"), *(each for each in cached if each is not None)]
        known = [count(each, 0, self.input_tokens) for each in parts]
        whole = None if None in known else sum(each or 0 for each in known)
        given = count(whole, self.sent_characters // MOST_PER_TOKEN, self.input_tokens)
        # more than the room that was asked for, only where more came
        most = max(self.room, 4 * draft.characters)
        written = count(said.get("output"), -(-draft.characters // MOST_PER_TOKEN), most)
        total = said.get("total")  # some count thinking in it alone, and bill it as output
        if given is not None and written is not None and type(total) is int:
            written = count(max(written, total - given), written, most)
        if given is None or written is None:
            said_any = any(each is not None for each in said.values())
            what = "cannot be true" if said_any else "are missing"
            draft.repair(f"its counts of tokens {what}: the worst case is booked")
            return Usage()
        if given * CUT_PER_TOKEN < self.sent_characters:
            draft.repair(
                f"its server counted {given:,} tokens for a prompt of {self.sent_characters:,} "
                "characters, so it may have cut the prompt: give it a longer context (Ollama: "
                "OLLAMA_CONTEXT_LENGTH)"
            )
        wrote, read = (count(each, 0, given) or 0 for each in cached)
        if not self.kept and price:  # a cache of somebody else's, of which no price is known
            price = price.model_copy(update={"cache": UNKNOWN_CACHE})
        return Usage(
            input_tokens=given,
            output_tokens=written,
            cached_tokens=count(said.get("cached", cached[1]), 0, given),
            cost_usd=price.cost_usd(given, written, read=min(read, self.kept), written=wrote)
            if price
            else None,
        )


def reply_of(
    draft: Draft, request: Request, clean: Cleaner, counts: Counts, prices: PriceOf
) -> Reply:
    """Our record of a reply that came to its end, or that is longer than any may be."""
    asked = draft.asked_model
    model = clean.line(draft.model, NAME_LIMIT) or asked
    if draft.model is not None and not isinstance(draft.model, str):
        draft.repair("the name of the model is no text: the one that was asked stands")
    price = prices(asked)
    if not same_model(model, asked):
        price = prices(model)
        how = "at its own price" if price else "at the worst case, as its price is not known"
        draft.repair(f"{model} answered, where {asked} was asked: booked {how}")
    said = "".join(draft.pieces)
    text = clean.text(said)
    if text != said.replace("\r\n", "\n"):
        draft.repair("characters that no text should hold, or a key, were replaced in it")
    if len(text) > TEXT_CHARACTERS:  # what is invisible takes more room once it is shown
        text, draft.too_long = text[:TEXT_CHARACTERS], True
    stop = STOP_REASONS.get(draft.stop, "") if isinstance(draft.stop, str) else ""
    if draft.too_long:
        stop = "too_long"
        draft.repair(
            f"it is too long, so that it was not kept whole: {draft.characters:,} characters"
        )
    elif draft.refused:
        stop = "refusal"
    elif not stop:
        stop = clean.line(draft.stop, NAME_LIMIT) or "unknown"
        draft.repair(f"its reason to stop is not known: {stop}")
    return Reply(
        text=text,
        model=model,
        usage=counts.usage(draft, price),
        stop_reason=stop,
        source="api",
        prompt_digest=request.digest,
        repairs=tuple(draft.repairs),
        received_characters=draft.characters,
    )
