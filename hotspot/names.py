"""One spelling for kernels: nsys, Kineto and ncu write the same kernel in three ways."""

from __future__ import annotations

import re

_REWRITES = (
    (re.compile(r"<unnamed>|\(anonymous namespace\)|_NV_ANON_NAMESPACE"), "(anonymous)"),
    (re.compile(r"\((?:int|bool|unsigned int|long|unsigned long)\)(?=-?\d)"), ""),
    (re.compile(r"\{lambda\((.*?)\)#(\d+)\}"), r"[lambda(\1) (instance \2)]"),
    (re.compile(r"\s+"), " "),
)
_RETURN = re.compile(r"^(?:void|int|float|double|bool) (?=\S)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_LONGEST = 20_000

MODULE = "module::"
"""Prefix of the ranges that `hotspot.target` puts around modules, and of the rows made of them."""


def printable(name: str) -> str:
    """The name without control characters: a profile must not steer the reader's terminal."""
    return _CONTROL.sub(" ", name[:_LONGEST])


def normalise(name: str) -> str:
    """The name as classification and matching see it: one spelling, no return type."""
    for pattern, replacement in _REWRITES:
        name = pattern.sub(replacement, name)
    return _RETURN.sub("", name.strip())


def without_arguments(name: str) -> str:
    """The name without its argument list: `f<int>(float *)` becomes `f<int>`."""
    if not name.endswith(")"):
        return name
    depth = 0
    for index in range(len(name) - 1, -1, -1):
        depth += (name[index] == ")") - (name[index] == "(")
        if depth == 0:
            return name[:index] or name
    return name


def is_whole(module: str) -> bool:
    """Whether all that runs in this range is one row: a norm, where an op of the library sits."""
    return module.endswith("RMSNorm")


def row_name(module: str | None, name: str) -> str:
    """The row that a kernel or operator belongs to, given the innermost module range around it.

    What a decoder layer runs outside of its parts is the residual add, so it is kept apart.
    """
    if module is not None and is_whole(module):
        return module
    if module is not None and module.endswith("DecoderLayer"):
        return f"{module}/{name}"
    return name


def family(name: str) -> str:
    return re.sub(r"_\d+(x\d+){2,}|(?<=[a-z])_\d+$", "", name)
