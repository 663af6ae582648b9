"""The installed engine that a patch is for, and where an op goes in it."""

from __future__ import annotations

import importlib.metadata

from patcher.bench import MissingError, Op, PatchPointSpec, UsageError


def patch_point(op: Op, engine: str) -> PatchPointSpec:
    """Where the op goes in an engine.

    Raises:
        UsageError: nowhere.
    """
    from patcher.integrate.points import specs_of

    points = specs_of(op, engine)
    if not points:
        raise UsageError(
            f"{op.name} has no patch point in {engine}", f"see `patcher ops show {op.name}`"
        )
    return points[0]


def engine_version(engine: str) -> str:
    """The engine's installed version.

    Raises:
        MissingError: the engine is not installed.
    """
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        raise MissingError(f"{engine} is not installed", f"pip install {engine}") from None
