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
