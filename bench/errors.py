"""Errors that a user can act on, each with a kind, a hint, and an exit code of the command line."""

from __future__ import annotations

from typing import ClassVar


class PatcherError(Exception):
    """Base class of every expected error.

    Args:
        message: what is wrong, in one sentence.
        hint: what to do next.
    """

    kind: ClassVar[str] = "error"
    """Short name of the class, as in JSON output."""
    exit_code: ClassVar[int] = 1
    """Exit code of the command line."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_dict(self) -> dict[str, str]:
        """The error as `kind`, `message` and `hint`; `relayed` turns it back into an error."""
        return {"kind": self.kind, "message": self.message, "hint": self.hint}


class UsageError(PatcherError):
    """Invalid usage, or an input that cannot be read."""

    kind = "usage"
    exit_code = 2


class MissingError(PatcherError):
    """This machine lacks something: a GPU, a profiler, a compiler or an API key."""

    kind = "missing"
    exit_code = 3


class BusyError(MissingError):
    """Other programs leave this machine too little time to measure; it may have more later."""

    kind = "busy"


class BudgetError(PatcherError):
    """A budget of money, time or iterations is exhausted."""

    kind = "budget"
    exit_code = 4


class VerificationError(PatcherError):
    """A digest, fingerprint or receipt does not match the expected one."""

    kind = "verification"
    exit_code = 5


class WaitingError(PatcherError):
    """The run waits for an external reply; resume it once the reply exists."""

    kind = "waiting"
    exit_code = 6


class Interrupted(PatcherError):
    """A signal stopped the command.

    Args:
        hint: how to go on.
    """

    kind = "interrupted"
    exit_code = 130

    def __init__(self, hint: str = "") -> None:
        super().__init__("the command was stopped before its end", hint)


def relayed(error: dict[str, str]) -> PatcherError:
    """Rebuild an error that another process sent as `PatcherError.as_dict`.

    Args:
        error: `kind`, `message` and `hint`.

    Returns:
        An error of the class with that kind; a `PatcherError` if the kind is unknown.
    """
    # a class without a kind of its own is a detail of the process that raised it
    classes: tuple[type[PatcherError], ...] = (*PatcherError.__subclasses__(), BusyError)
    kinds = {one.kind: one for one in classes if "kind" in vars(one)}
    return kinds.get(error["kind"], PatcherError)(error["message"], error["hint"])
