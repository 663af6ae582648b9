"""Patch points: places in an engine where a kernel can be put. An adapter is one class.

To add one, write its four methods and name it by an entry point `patcher.patch_points`, or in
`bench/plugins.toml`.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from patcher.bench import (
    Contract,
    MissingError,
    Op,
    PatchPointSpec,
    Registry,
    UsageError,
    VerificationError,
)

if TYPE_CHECKING:
    from patcher.integrate.dispatch import Dispatcher

POINTS: Registry[Mapping[str, type[PatchPoint]]] = Registry("patch_points")
"""By engine: ours, and those of other packages, whose entry points are called by the engine, or by
the engine, a dot and anything (`vllm.mine`); imported when a patch asks for the engine."""


log = logging.getLogger("patcher")
_READING = threading.Lock()


class PatchPoint(Protocol):
    """One place in an engine."""

    engine: ClassVar[str]
    name: ClassVar[str]
    op: ClassVar[str]
    """The contract by which the kernel is called there. Where that contract does not name the
    point, since the point is another package's, the class has `spec`, the `PatchPointSpec` that it
    would have there."""

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
    """The adapter of a patch point, ours before one that another package brings.

    Raises:
        UsageError: there is none, or two packages bring one of that name.
        MissingError: its engine is not installed, or a package that adds points to it cannot be
            imported.
    """
    ours = _ours(engine)
    if name in ours:
        return ours[name]
    found: dict[str, type[PatchPoint]] = {}
    for entry in _entries(engine):
        if name in found and name in POINTS.load_entry(entry):
            raise UsageError(
                f"two packages bring a patch point {name} in {engine}", "uninstall one of them"
            )
        found = {**POINTS.load_entry(entry), **found}
    if name not in found:
        known = ", ".join({**ours, **found}) or "none"
        raise UsageError(
            f"no patch point {name} in {engine}; there are: {known}", "see docs/extending.md"
        )
    return found[name]


def engine_wants(engine: str, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Arguments of the engine without which points, all of its where none are named, are never
    called; most want none.

    Raises:
        UsageError, MissingError: see `find_point`.
    """
    if names is None:
        names = dict.fromkeys([*_ours(engine), *_importable(engine)])
    found: dict[str, Any] = {}
    for name in names:
        found |= getattr(find_point(engine, name), "wants", {})
    return found


def specs_of(op: Op, engine: str) -> list[PatchPointSpec]:
    """Where the op goes in an engine: what its contract says, or else points of other packages.

    Raises:
        UsageError, MissingError: see `find_point`.
    """
    named = [spec for spec in op.contract.patch_points if spec.engine == engine]
    if named:
        return named
    brought = [point for entry in _entries(engine) for point in POINTS.load_entry(entry).values()]
    return [point.spec for point in brought if point.op == op.name and hasattr(point, "spec")]


def naming(contract: Contract, spec: PatchPointSpec) -> Contract:
    """The contract with that patch point among its own."""
    if spec in contract.patch_points:
        return contract
    return contract.model_copy(update={"patch_points": (*contract.patch_points, spec)})


def names_taken(target: str) -> list[str]:
    """Patch points of another package's entry point that have no effect: their names are ours.

    Raises:
        MissingError: it cannot be imported.
    """
    entry = next(each for each in POINTS.entries() if each.value == target)
    return sorted(_ours(_engine(entry)).keys() & POINTS.load_entry(entry).keys())


def _ours(engine: str) -> Mapping[str, type[PatchPoint]]:
    if not POINTS.ours(engine):
        return {}
    try:
        return POINTS.load(engine)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("patcher"):
            raise
        raise MissingError(
            f"{error.name} is not installed", f"install {engine} in this environment"
        ) from None


def _entries(engine: str) -> list[EntryPoint]:
    """Those of other packages that are for the engine."""
    return [entry for entry in POINTS.entries() if _engine(entry) == engine]


def _importable(engine: str) -> list[str]:
    """Names of other packages' points; a package that cannot be imported is named in the log."""
    found: list[str] = []
    for entry in _entries(engine):
        try:
            found += POINTS.load_entry(entry)
        except MissingError as error:
            log.warning("%s", error.message)
    return found


def _engine(entry: EntryPoint) -> str:
    return entry.name.partition(".")[0]


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
