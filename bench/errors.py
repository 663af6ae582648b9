"""Errors a user can act on: each carries its kind, what to do next, and the exit code of the
command line.
"""

from __future__ import annotations

from typing import ClassVar


class PatcherError(Exception):
    """Base of every expected error. `message` says what is wrong in one sentence, `hint` what to
    do next.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message, "hint": self.hint}


class UsageError(PatcherError):
    """Wrong usage, or an input that cannot be read."""

    kind = "usage"
    exit_code = 2


class MissingError(PatcherError):
    """Something this machine lacks: a GPU, a profiler, a compiler, a key."""

    kind = "missing"
    exit_code = 3


class BudgetError(PatcherError):
    """A budget (money, time, iterations) is spent."""

    kind = "budget"
    exit_code = 4


class VerificationError(PatcherError):
    """A digest, fingerprint or receipt does not match what was promised."""

    kind = "verification"
    exit_code = 5


class WaitingError(PatcherError):
    """The run waits for a reply from outside; resume when it is there."""

    kind = "waiting"
    exit_code = 6


def relayed(told: dict[str, str]) -> PatcherError:
    """The expected error that another process told of by `as_dict`."""
    kinds = {kind.kind: kind for kind in PatcherError.__subclasses__()}
    return kinds.get(told["kind"], PatcherError)(told["message"], told["hint"])
