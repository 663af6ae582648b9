"""One attribute of a class or a module, replaced and put back exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patcher.bench import UsageError, VerificationError


class AttributePatch:
    """`owner.name`, ours while it is in."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.original: Any = getattr(owner, name)
        self._own = owner.__dict__.get(name)
        self._ours: Any = None

    @property
    def label(self) -> str:
        return f"{self.owner.__name__}.{self.name}"

    def must_be_the_engines(self) -> None:
        """A fingerprint is of the text in a file, and knows nothing of a later assignment.

        Raises:
            VerificationError: someone has put another function there.
        """
        found: Any = getattr(self.owner, self.name)
        code = getattr(found, "__code__", None)
        package = getattr(found, "__module__", "").partition(".")[0]
        home = Path(code.co_filename).parts if code is not None else ()
        if package not in home or package not in ("vllm", "triton_kernels"):
            raise VerificationError(
                f"{self.label} is patched already", "take the other patch out first"
            )

    def install(self, replacement: Any) -> None:
        """Raises UsageError where it is in already."""
        if self._ours is not None:
            raise UsageError(f"{self.label} is replaced already", "remove it first")
        self._ours = replacement
        # so that the source text of what is here stays the engine's
        replacement.__wrapped__ = self.original
        setattr(self.owner, self.name, replacement)

    def remove(self) -> None:
        """Put it back; once more is the same as once.

        Raises:
            VerificationError: someone put a function of their own over ours, which stays.
        """
        if self._ours is None:
            return
        ours, self._ours = self._ours, None
        if self.owner.__dict__.get(self.name) is not ours:
            raise VerificationError(
                f"{self.label} was patched by someone else while this patch was in",
                "take patches out in the reverse order; start the engine again",
            )
        if self._own is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._own)


def remove_all(swaps: list[AttributePatch]) -> None:
    """Put all of them back, last first, even where one was patched over.

    Raises:
        VerificationError: see `AttributePatch.remove`.
    """
    first: VerificationError | None = None
    for swap in reversed(swaps):
        try:
            swap.remove()
        except VerificationError as error:
            first = first or error
    if first is not None:
        raise first
