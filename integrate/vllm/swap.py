"""Replace one attribute of a class or a module, and restore it exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patcher.bench import UsageError, VerificationError


class AttributePatch:
    """A replacement of `owner.name`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.original: Any = getattr(owner, name)
        self._own = owner.__dict__.get(name)
        self._ours: Any = None

    @property
    def label(self) -> str:
        """The attribute's name for messages."""
        return f"{self.owner.__name__}.{self.name}"

    def must_be_the_engines(self) -> None:
        """Check that the attribute is the engine's own.

        A fingerprint covers the text of a file, so it does not show a later assignment.

        Raises:
            VerificationError: other code has replaced the attribute.
        """
        value: Any = getattr(self.owner, self.name)
        code = getattr(value, "__code__", None)
        package = getattr(value, "__module__", "").partition(".")[0]
        home = Path(code.co_filename).parts if code is not None else ()
        if package not in home or package not in ("vllm", "triton_kernels"):
            raise VerificationError(
                f"{self.label} is already patched", "remove the other patch first"
            )

    def install(self, replacement: Any) -> None:
        """Replace the attribute.

        Raises:
            UsageError: it is already replaced.
        """
        if self._ours is not None:
            raise UsageError(f"{self.label} is already replaced", "remove it first")
        self._ours = replacement
        # so that the attribute's source text stays the engine's
        replacement.__wrapped__ = self.original
        setattr(self.owner, self.name, replacement)

    def remove(self) -> None:
        """Restore the attribute; idempotent.

        Raises:
            VerificationError: other code replaced our function; its replacement stays.
        """
        if self._ours is None:
            return
        ours, self._ours = self._ours, None
        if self.owner.__dict__.get(self.name) is not ours:
            raise VerificationError(
                f"{self.label} was patched by other code while this patch was installed",
                "remove patches in reverse order; restart the engine",
            )
        if self._own is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._own)


def remove_all(swaps: list[AttributePatch]) -> None:
    """Restore all attributes, the last first, even if one of them fails.

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
