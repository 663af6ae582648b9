"""The batch endpoint of a model's server: many questions sent at once, answered within a day at a
lower price. What it sends is as little believed as a reply."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patcher.bench import WaitingError
from patcher.models import ModelError, Request
from patcher.models.wire import UNREADABLE, Bounds, events

if TYPE_CHECKING:
    from patcher.models.api import ApiModel

HINT = "a batch may take 24 hours; then: patcher resume"
SKEW_S = 3600.0
"""How far this machine's clock may be from the server's."""
MOST_PAGES = 20
"""Of a list of batches."""


@dataclass(frozen=True)
class BatchState:
    """How a batch stands."""

    ended: bool
    gone: str = ""
    """What became of questions without a result: `expired` or `canceled`."""
    refused: dict[str, Any] | None = None
    """The error that the whole batch was refused with."""
    files: tuple[str, ...] = ()
    """Where its results are, if not under its own name."""


@dataclass(frozen=True)
class BatchLine:
    """One result, not yet believed."""

    custom_id: object = None
    status: int | None = None
    body: object = None
    """A whole reply, or an error."""
    gone: str = ""
    """`expired`, `canceled` or `missing`, where there is neither."""


@dataclass
class BatchResults:
    """What a batch answered to the questions that were looked for."""

    lines: dict[str, BatchLine] = field(default_factory=dict)
    """By the name of the question; the first of several counts."""
    strangers: int = 0
    """Lines that answer nothing that was asked."""
    whole: bool = False
    """Whether the results came to their end."""


IsOurs = Callable[[str, BatchState], bool]
"""Whether the results of an ended batch are of the one that is looked for."""


class BatchEndpoint(ABC):
    """Of one model."""

    def __init__(self, model: ApiModel) -> None:
        self.model = model

    @abstractmethod
    def create(self, tag: str, asked: Mapping[str, Request]) -> str:
        """Send questions by their names, which all begin with the tag; returns the batch's name.

        Raises:
            ModelError: `charged` where the batch may have been taken all the same; and whatever
                else `ApiModel.ask` raises.
        """

    @abstractmethod
    def look(self, batch: str) -> BatchState: ...

    @abstractmethod
    def results(self, batch: str, state: BatchState, most: int) -> Iterator[Iterator[object]]:
        """The values of each file of results, which are of at most `most` questions."""

    @abstractmethod
    def line(self, value: dict[str, Any]) -> BatchLine: ...

    @abstractmethod
    def find(self, tag: str, count: int, since_s: float, is_ours: IsOurs) -> str | None:
        """The name of a batch of `count` questions that may have been sent since then (Unix time)
        by a process that was killed; None: it never was.

        Raises:
            WaitingError: that cannot be told yet.
        """

    def read(
        self,
        batch: str,
        state: BatchState,
        most: int,
        wanted: Callable[[str], bool],
        found: BatchResults,
    ) -> None:
        """Read the results of an ended batch into `found`, which keeps what came if it fails."""
        found.strangers, cut = 0, False
        for values in self.results(batch, state, most):
            last: object = None
            for last in values:
                line = self.line(last) if isinstance(last, dict) else BatchLine()
                if isinstance(line.custom_id, str) and wanted(line.custom_id):
                    found.lines.setdefault(line.custom_id, line)
                else:
                    found.strangers += 1
            cut = cut or last is UNREADABLE
        found.whole = not cut

    def document(self, opened: AbstractContextManager[Any]) -> dict[str, Any]:
        """The object of JSON that the server answers with."""
        values = list(self.model.values(opened, events, Bounds.of(0)))
        found = next((each for each in values if isinstance(each, dict)), None)
        if found is None:
            raise _broken("the server's answer is no object of JSON")
        return found

    def name_of(self, answer: Mapping[str, Any]) -> str:
        """The name that the server gives a batch or a file."""
        name = answer.get("id")
        if not isinstance(name, str) or not re.fullmatch(r"[\w.:-]{1,128}", name, re.ASCII):
            raise _broken("the server's answer names no batch")
        if self.model.holds_key(name):
            raise _broken("the server's answer names no batch, but the key")
        return name

    def bounds(self, most: int) -> Bounds:
        """For the results of so many questions."""
        one = Bounds.of(self.model.max_output_tokens)
        return Bounds(one.bytes * most, one.seconds * 2)

    def listed(
        self,
        cursor: str,
        call: Callable[..., AbstractContextManager[Any]],
        created_s: Callable[[dict[str, Any]], float | None],
        since_s: float,
    ) -> Iterator[dict[str, Any]]:
        """The account's batches since then, the newest first."""
        more: dict[str, Any] = {}
        for _ in range(MOST_PAGES):
            page = self.document(call(limit=100, **more))
            data = page.get("data")
            if not isinstance(data, list):  # an empty one would say that nothing was sent
                raise _broken("the server's list of batches is none")
            entries = [each for each in data if isinstance(each, dict)]
            for each in entries:
                created = created_s(each)
                if created is not None and created < since_s - SKEW_S:
                    return
                yield each
            if page.get("has_more") is not True or not entries:
                return
            more = {cursor: self.name_of(entries[-1])}
        raise self.undecided()

    def undecided(self) -> WaitingError:
        return WaitingError(
            f"whether {self.model.name} got this run's questions before it was killed will be "
            "known when the account's batches have ended",
            HINT,
        )


def _broken(why: str) -> ModelError:
    return ModelError(why, "the run is kept: patcher resume", trouble="broken", charged=True)


@contextmanager
def closing_call(call: Callable[[], Any]) -> Iterator[Any]:
    """A call of an SDK whose response is closed in the end."""
    response = call()
    try:
        yield response
    finally:
        response.close()
