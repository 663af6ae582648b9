"""What is not installed, and which extra of patcher brings it."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from patcher.bench import MissingError

NAMES = {"pynvml": "nvidia-ml-py", "cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
"""Packages whose import name is another."""
COMMANDS = {
    "demo": "all",
    "optimize": "agent",
    "read_run": "report",
    "record": "agent",
    "replay": "agent",
    "resume": "all",
    "run": "all",
    "throughput": "profile",
    "train": "trl",
}
"""The extra of a command, where it is not named like it."""

P = ParamSpec("P")
R = TypeVar("R")


def missing_package(error: ImportError, command: str = "") -> MissingError:
    """The error for a package that is not installed, with the command that installs it.

    Args:
        command: what was asked for; its extra is named where it brings the package.
    """
    module = (error.name or "").partition(".")[0]
    if not module:
        return MissingError(str(error), "pip install it")
    package = NAMES.get(module, canonicalize_name(module))
    extra = extra_of(package, command)
    what = f"'patcher[{extra}]'" if extra else package
    return MissingError(f"{module} is not installed", f"pip install {what}")


def extra_of(package: str, command: str = "") -> str | None:
    """The extra that brings a package: the command's own, else the smallest; None: none does."""
    direct = _direct()
    whole = {extra: set(_closure(extra, direct)) for extra in direct}
    holding = [extra for extra, packages in whole.items() if package in packages]
    own = COMMANDS.get(command, command)
    if own in holding:
        return own
    return min(holding, key=lambda extra: len(whole[extra]), default=None)


def missing_of(extra: str) -> list[str]:
    """The packages of an extra that are not installed, sorted."""
    installed = {canonicalize_name(one.name) for one in importlib.metadata.distributions()}
    return sorted(set(_closure(extra, _direct())) - installed)


def _direct() -> dict[str, list[Requirement]]:
    """Requirements by extra; none in a checkout that is not installed."""
    try:
        lines = importlib.metadata.requires("patcher") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    direct: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, lines):
        for extra in _extras(requirement):
            direct.setdefault(extra, []).append(requirement)
    return direct


def _extras(requirement: Requirement) -> Iterator[str]:
    """The extras whose marker holds for it."""
    if requirement.marker is not None:
        for word in str(requirement.marker).split("extra == ")[1:]:
            yield word.split('"')[1]


def _closure(extra: str, direct: dict[str, list[Requirement]]) -> Iterator[str]:
    """Names of its packages, those of the extras that it takes in, too."""
    for requirement in direct.get(extra, []):
        if requirement.name == "patcher":
            for other in requirement.extras:
                yield from _closure(other, direct)
        else:
            yield canonicalize_name(requirement.name)


def names_its_extra(function: Callable[P, R]) -> Callable[P, R]:
    """A function that raises `MissingError` where a package of an extra is not installed."""

    @functools.wraps(function)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ModuleNotFoundError as error:
            raise missing_package(error, function.__name__) from error

    return told
