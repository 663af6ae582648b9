"""What a run's journal says of the questions that it sent in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from patcher.models.ceilings import RESERVED, SPENT
from patcher.runs.journal import Event

BATCH = "batch"
"""The subject of notes on batches."""


@dataclass(frozen=True)
class SentQuestion:
    """A question in a batch, by the journal."""

    tag: str
    """Of the batch: ours, drawn when it was begun."""
    custom_id: str
    """Of the question, within the batch."""
    digest: str
    """`Request.digest`."""
    model: str
    sending: int = 0
    """Questions of a batch that was about to be sent; 0: it never was."""
    since_s: float = 0.0
    """When, in Unix time."""
    batch: str | None = None
    """As its server names it; None: not known."""

    def is_beside(self, custom_id: str) -> bool:
        """Whether a question of that name is of the same batch."""
        head, _, number = custom_id.rpartition("-")
        return head == self.tag and number in map(str, range(self.sending))


def sent_questions(events: Iterable[Event]) -> dict[str, SentQuestion]:
    """The questions that wait for their answers, by step."""
    found: dict[str, SentQuestion] = {}
    for event in events:
        data = event.data
        if event.kind != "note":
            continue
        if event.step == BATCH and "tag" in data:
            more: dict[str, object] = {"batch": data.get("id")}
            if "id" not in data:
                more["sending"] = data["sending"]
                more["since_s"] = datetime.fromisoformat(event.time).timestamp()
            for step, each in found.items():
                if each.tag == data["tag"]:
                    found[step] = replace(each, **more)  # type: ignore[arg-type]
        elif f"{RESERVED}_usd" in data or f"{SPENT}_usd" in data:
            found.pop(event.step, None)
            if "tag" in data:
                known = {name: data[name] for name in ("tag", "custom_id", "digest", "model")}
                found[event.step] = SentQuestion(**known)
    return found


def waiting_batches(events: Iterable[Event]) -> tuple[str, ...]:
    """Those that were sent and are not answered, in words: to whom, and since when."""
    sent = [each for each in sent_questions(events).values() if each.sending or each.batch]
    counts = Counter(each.tag for each in sent)
    return tuple(
        f"{counts[tag]} question{'s' * (counts[tag] != 1)} to {each.model} in the batch "
        f"{each.batch or 'that has no name yet'}, sent "
        f"{datetime.fromtimestamp(each.since_s, UTC):%Y-%m-%d %H:%M} UTC"
        for tag, each in {each.tag: each for each in sent}.items()
    )
