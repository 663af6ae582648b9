"""Patch points: places in an engine where a kernel can be put. An adapter is one class.

To add one, write its four methods and name its module in `_ADAPTERS`: CONTRIBUTING.md, Add an
engine.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from patcher.bench import MissingError, UsageError, VerificationError

if TYPE_CHECKING:
    from patcher.integrate.dispatch import Dispatcher

_ADAPTERS = {
    "tensorrt_llm": "patcher.integrate.tensorrt_llm",
    "transformers": "patcher.integrate.transformers",
    "vllm": "patcher.integrate.vllm.points",
}
"""Engine to the module whose `POINTS` are its adapters; imported when a patch asks for one."""


_READING = threading.Lock()


class PatchPoint(Protocol):
    """One place in an engine."""

    engine: ClassVar[str]
    name: ClassVar[str]
    op: ClassVar[str]
    """The contract by which the kernel is called there."""

    def __init__(self, target: Any = None) -> None:
        """`target`: a built model, or None where the engine's classes are patched."""

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of the source text of what is replaced and relied on, as installed.

        Raises:
            MissingError: the engine is not installed.
        """
        ...

    def find(self) -> str:
        """Where it is, in words.

        Raises:
            VerificationError: it is not there, or patched already.
        """
        ...

    def install(self, kernel: Dispatcher) -> None:
        """Put the kernel in.

        Raises:
            VerificationError: see `find`.
            UsageError: it is in already.
        """
        ...

    def remove(self) -> None:
        """Put everything back as it was; once more is the same as once.

        Raises:
            VerificationError: someone else patched over it; ours is out, theirs stays.
        """
        ...


def find_point(engine: str, name: str) -> type[PatchPoint]:
    """The adapter of a patch point.

    Raises:
        UsageError: there is none.
        MissingError: its engine is not installed.
    """
    points = _points_of(engine)
    if name not in points:
        known = ", ".join(points) or "none"
        raise UsageError(
            f"no patch point {name} in {engine}; there are: {known}",
            "see CONTRIBUTING.md, Add an engine",
        )
    return points[name]


def engine_wants(engine: str, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Arguments of the engine without which points, all of its where none are named, are never
    called; most want none.

    Raises:
        UsageError, MissingError: see `find_point`.
    """
    chosen = _points_of(engine) if names is None else names
    found: dict[str, Any] = {}
    for name in chosen:
        found |= getattr(find_point(engine, name), "wants", {})
    return found


def _points_of(engine: str) -> dict[str, type[PatchPoint]]:
    module = _ADAPTERS.get(engine)
    if module is None:
        return {}
    try:
        points: dict[str, type[PatchPoint]] = importlib.import_module(module).POINTS
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("patcher"):
            raise
        raise MissingError(
            f"{error.name} is not installed", f"install {engine} in this environment"
        ) from None
    return points


class Fingerprint(str):
    """sha256 of source text, which remembers the text, so that what changed can be told."""

    __slots__ = ("parts",)
    parts: dict[str, str]
    """Source text by the name of the function or class, in order."""


def source_text(part: Any) -> str:
    """`inspect.getsource`, by one thread at a time: it parses the file, and Python 3.11 may raise
    SystemError where two threads parse (cpython issue 106905). Arms load side by side.
    """
    with _READING:
        return inspect.getsource(part)


def source_digest(*parts: Any) -> Fingerprint:
    """Of the source text of functions and classes, in order.

    Raises:
        VerificationError: one has no source text: it was put there while the program ran.
    """
    texts: dict[str, str] = {}
    for part in parts:
        name = getattr(part, "__qualname__", None) or part.__name__
        try:
            text = source_text(part)
        except (OSError, TypeError) as error:
            raise VerificationError(
                f"{name} has no source text", "remove what replaced it first"
            ) from error
        texts[name if name not in texts else f"{part.__module__}.{name}"] = text
    found = Fingerprint(hashlib.sha256("".join(texts.values()).encode()).hexdigest())
    found.parts = texts
    return found
