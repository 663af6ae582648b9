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
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from patcher.bench import (
    Contract,
    MissingError,
    Op,
    PatchPointSpec,
    Registry,
    UsageError,
    VerificationError,
    load_ops,
)

if TYPE_CHECKING:
    from patcher.integrate.dispatch import Dispatcher

POINTS: Registry[Mapping[str, type[PatchPoint]]] = Registry("patch_points")
"""Patch points by engine: built-in ones, and those of other packages. Entry points have the
engine's name, or it with a dot and a suffix (`vllm.mine`); they are imported when a patch needs the
engine."""


FORMER: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "layernorm.rms_norm": "add_norm",
        "linear.unquantized": "linear",
        "gpt_oss.attention": "rope_kv",
        "gpt_oss.experts_to_norm": "experts_to_norm",
        "triton_kernels.routing.routing": "router.oai",
        "triton_kernels.matmul_ogs.gate_up": "experts.gate_up.mxfp4",
        "triton_kernels.matmul_ogs.down": "experts.down.mxfp4",
        "triton_kernels.matmul_ogs.reduce_grouped": "experts.sum.oai",
    }
}
"""By engine, the present name of each patch point that was renamed, so that older bundles, stores
and results still name it."""


log = logging.getLogger("patcher")
_READING = threading.Lock()


class PatchPoint(Protocol):
    """One place in an engine."""

    engine: ClassVar[str]
    name: ClassVar[str]
    op: ClassVar[str]
    """The contract of calls at the point. If that contract does not name the point, since it is
    another package's, the class has `spec`, the `PatchPointSpec` for the contract."""

    def __init__(self, target: Any = None) -> None:
        """Set up the adapter; `target` is a built model, or None if the engine's classes are
        patched.
        """

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of the code that is replaced and relied on, as installed; a `Fingerprint` can show
        what changed.

        Raises:
            MissingError: the engine is not installed.
        """
        ...

    def find(self) -> str:
        """Describe where the point is.

        Raises:
            VerificationError: it is missing, or already patched.
        """
        ...

    def install(self, kernel: Dispatcher) -> None:
        """Install the kernel.

        Raises:
            VerificationError: see `find`.
            UsageError: it is already installed.
        """
        ...

    def remove(self) -> None:
        """Restore the engine's code exactly; idempotent.

        Raises:
            VerificationError: another patch was installed over this one; this one is removed, the
                other stays.
        """
        ...


def present_name(engine: str, name: str) -> str:
    """The present name of a patch point that may be named as in an earlier version."""
    return FORMER.get(engine, {}).get(name, name)


def find_point(engine: str, name: str) -> type[PatchPoint]:
    """The adapter of a patch point; built-in ones take precedence over other packages'.

    Args:
        engine: the engine's name.
        name: the point's name, present or former.

    Raises:
        UsageError: there is none, or two packages have one of that name.
        MissingError: its engine is not installed, or a package that adds points to it cannot be
            imported.
    """
    ours, name = _ours(engine), present_name(engine, name)
    if name in ours:
        return ours[name]
    found: dict[str, type[PatchPoint]] = {}
    brought, broken = _read(entries_of(engine))
    for points in brought:
        if name in found and name in points:
            raise UsageError(
                f"two packages bring a patch point {name} in {engine}", "uninstall one of them"
            )
        found = {**points, **found}
    if name not in found:
        if broken:
            raise broken[-1]
        known = ", ".join({**ours, **found}) or "none"
        raise UsageError(
            f"no patch point {name} in {engine}; there are: {known}", "see docs/extending.md"
        )
    return found[name]


def engine_wants(engine: str, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Engine arguments without which points (by default all of the engine) are never called; most
    need none.

    Raises:
        UsageError, MissingError: see `find_point`.
    """
    if names is None:
        names = dict.fromkeys([*_ours(engine), *chain(*_importable(entries_of(engine)))])
    found: dict[str, Any] = {}
    for name in names:
        found |= getattr(find_point(engine, name), "wants", {})
    return found


def specs_of(op: Op, engine: str) -> list[PatchPointSpec]:
    """Patch points of the op in an engine, by its contract or from other packages.

    Raises:
        UsageError, MissingError: see `find_point`.
    """
    named = [spec for spec in op.contract.patch_points if spec.engine == engine]
    if named:
        return named
    brought, broken = _read(entries_of(engine))
    found = _specs(op, brought)
    if broken and not found:
        raise broken[-1]
    return found


def all_specs(op: Op) -> list[PatchPointSpec]:
    """Patch points of the op in every engine: its contract's, and those of other packages. A
    package that cannot be imported is logged."""
    return [*op.contract.patch_points, *_specs(op, _importable(POINTS.entries()))]


def verify_calls(contract: Contract) -> None:
    """Check that patch points call the op with the arguments of this contract.

    A contract may change after a patch was made; then each call would fall back. An op that is not
    in the library, such as another package's, is left to the guards.

    Raises:
        VerificationError: the op has other arguments now.
    """
    ops = load_ops()
    now = ops[contract.name].contract if contract.name in ops else contract
    if now.signature() != contract.signature():
        raise VerificationError(
            f"the patch takes {contract.signature()}, but its op is now {now.signature()}",
            "judge the kernel again by the present contract, and make the patch again",
        )


def naming(contract: Contract, spec: PatchPointSpec) -> Contract:
    """The contract, extended by that patch point."""
    if spec in contract.patch_points:
        return contract
    return contract.model_copy(update={"patch_points": (*contract.patch_points, spec)})


def names_taken(target: str) -> list[str]:
    """Patch points of another package's entry point that are ignored, since built-in ones have
    their names.

    Raises:
        MissingError: it cannot be imported.
    """
    entry = next(each for each in POINTS.entries() if each.value == target)
    return sorted(_ours(_engine(entry)).keys() & points_of(entry).keys())


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


def points_of(entry: EntryPoint) -> Mapping[str, type[PatchPoint]]:
    """What an entry point of another package names.

    Raises:
        MissingError: it cannot be imported, or is no mapping of names to adapters.
    """
    found: Any = POINTS.load_entry(entry)
    wrong = "" if isinstance(found, Mapping) else f"is a {type(found).__name__}, no mapping"
    for name, point in found.items() if not wrong else ():
        lacks = [each for each in _ADAPTER if not hasattr(point, each)]
        spec = getattr(point, "spec", None)
        if lacks:
            wrong = f"has a patch point {name} without {lacks[0]}"
        elif point.name != name:
            wrong = f"has a patch point {name} whose class is named {point.name}"
        elif spec is not None and (not isinstance(spec, PatchPointSpec) or spec.point != name):
            wrong = f"has a patch point {name} whose spec is no PatchPointSpec of that name"
    if wrong:
        raise MissingError(
            f"{entry.value}, the entry point {entry.name}, {wrong}", "see docs/extending.md"
        )
    points: Mapping[str, type[PatchPoint]] = found
    return points


_ADAPTER = ("engine", "name", "op", "fingerprint", "find", "install", "remove")
"""What a patch point of another package has to have."""


def entries_of(engine: str) -> list[EntryPoint]:
    """The entry points of other packages for the engine."""
    return [entry for entry in POINTS.entries() if _engine(entry) == engine]


Points = Mapping[str, type[PatchPoint]]


def _read(entries: Iterable[EntryPoint]) -> tuple[list[Points], list[MissingError]]:
    """What packages bring, and why others cannot be read: those that can are served."""
    found: list[Points] = []
    broken: list[MissingError] = []
    for entry in entries:
        try:
            found.append(points_of(entry))
        except MissingError as error:
            broken.append(error)
    return found, broken


def _importable(entries: Iterable[EntryPoint]) -> list[Points]:
    """What packages bring; one that cannot be read is logged."""
    found, broken = _read(entries)
    for error in broken:
        log.warning("%s", error.message)
    return found


def _specs(op: Op, brought: Iterable[Points]) -> list[PatchPointSpec]:
    points = chain(*(each.values() for each in brought))
    specs = [getattr(point, "spec", None) for point in points if point.op == op.name]
    return [spec for spec in specs if spec is not None]


def _engine(entry: EntryPoint) -> str:
    return entry.name.partition(".")[0]


class Fingerprint(str):
    """sha256 of source text, with the text itself, so that later changes can be shown."""

    __slots__ = ("parts", "unread")
    parts: dict[str, str]
    """Source text by the name of the function or class, in order."""
    unread: dict[str, str] | None
    """Of an adapter that was written for several versions of its engine: the parts that none of
    those versions has, each with a diff of what is new. If it is empty, a patch that was made with
    any version fits. None if the adapter keeps no record of versions, so that only the code of the
    version that a patch was made with fits."""

    def __new__(
        cls, digest: str, parts: dict[str, str], unread: dict[str, str] | None = None
    ) -> Fingerprint:
        made = super().__new__(cls, digest)
        made.parts, made.unread = parts, unread
        return made


def source_text(part: Any) -> str:
    """`inspect.getsource` in one thread at a time. It parses the file, and Python 3.11 may raise
    SystemError if two threads parse (cpython issue 106905). Arms load in parallel.
    """
    with _READING:
        return inspect.getsource(part)


def source_digest(*parts: Any) -> Fingerprint:
    """Fingerprint of the source text of functions and classes, in order.

    Raises:
        VerificationError: one has no source text, since it was defined while the program ran.
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
    return Fingerprint(hashlib.sha256("".join(texts.values()).encode()).hexdigest(), texts)
