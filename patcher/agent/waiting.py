"""Several effects that may each have to wait for an answer from outside: all are begun before the
loop waits for any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from patcher.bench import WaitingError


class Waiting:
    """Collects the waits of a round.

    Attributes:
        errors: of those that wait, in order.
    """

    def __init__(self) -> None:
        self.errors: list[WaitingError] = []

    @contextmanager
    def begun(self) -> Iterator[None]:
        """An effect whose wait does not keep the next one from being begun."""
        try:
            yield
        except WaitingError as error:
            self.errors.append(error)

    def settle(self) -> None:
        """Go on only when nothing waits.

        Raises:
            WaitingError: something does; the first is named, and how many others there are.
        """
        if not self.errors:
            return
        first, others = self.errors[0], len(self.errors) - 1
        more = f" (and {others} more)" if others else ""
        raise WaitingError(first.message + more, first.hint) from first
