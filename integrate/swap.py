"""Replace one attribute of a class or a module, and restore it exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patcher.bench import UsageError, VerificationError

ENGINES = ("sglang", "triton_kernels", "vllm")
"""The packages whose functions patches may replace."""
_HOOKS = ("plugins", "hook_registry.py")
"""Where SGLang wraps its own functions for plugins; a wrapper has the name of what it wraps."""
_DECORATOR = ("torch", "utils", "_contextlib.py")
"""Where PyTorch's `inference_mode` and `no_grad` make the function that stands for another."""


class AttributePatch:
    """A replacement of `owner.name`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.original: Any = getattr(owner, name)
        self._own = owner.__dict__.get(name)
        self._ours: Any = None
        self.parts: dict[str, Any] = {}
        """What each point has in a replacement that several share."""

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
        if code is not None and Path(code.co_filename).parts[-3:] == _DECORATOR:
            value = value.__wrapped__
            code = getattr(value, "__code__", None)
        package = (getattr(value, "__module__", None) or "").partition(".")[0]
        home = Path(code.co_filename).parts if code is not None else ()
        if package not in home or package not in ENGINES or home[-2:] == _HOOKS:
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


class SharedPatch:
    """A replacement of `owner.name` that several patch points share, each with a part of its own.

    The parts lie on the replacement alone, so nothing is left when the last point is removed.
    """

    def __init__(
        self, owner: Any, name: str, point: str, make: Callable[[Any, dict[str, Any]], Any]
    ) -> None:
        """Prepare the replacement.

        Args:
            owner: a class or a module.
            name: the attribute's name.
            point: the name of the patch point.
            make: the replacement, from the original and the parts by point; both are looked up at
                each call. All points give the same function.
        """
        self._owner, self._name, self._point, self._make = owner, name, point, make
        self._swap: AttributePatch | None = None
        """The replacement that holds our part."""

    def must_have_room(self) -> None:
        """Check that the part can be added.

        Raises:
            VerificationError: the point is in, or other code has replaced the attribute.
        """
        swap = self._installed()
        if swap is None:
            AttributePatch(self._owner, self._name).must_be_the_engines()
        elif self._point in swap.parts:
            raise VerificationError(
                f"{self._point} is already patched", "remove the other patch first"
            )

    def install(self, part: Any) -> None:
        """Add the part, and replace the attribute if this is the first one."""
        swap = self._installed()
        if swap is None:
            swap = AttributePatch(self._owner, self._name)
            replacement = self._make(swap.original, swap.parts)
            replacement.shared = swap
            swap.install(replacement)
        swap.parts[self._point] = part
        self._swap = swap

    def remove(self) -> None:
        """Take the part out, and restore the attribute if it was the last one; idempotent.

        Raises:
            VerificationError: see `AttributePatch.remove`.
        """
        swap, self._swap = self._swap, None
        if swap is not None:
            del swap.parts[self._point]
            if not swap.parts:
                swap.remove()

    def _installed(self) -> AttributePatch | None:
        value: AttributePatch | None = getattr(getattr(self._owner, self._name), "shared", None)
        return value


def remove_all(swaps: Sequence[AttributePatch | SharedPatch]) -> None:
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
