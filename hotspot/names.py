"""One spelling for kernels: nsys, Kineto and ncu write the same kernel in three ways.

nsys: `void f<(int)128, (bool)0>(T1 *)`, Kineto: `void f<128, false>(float*)`, ncu: without most
namespaces. What tells a kernel apart is its name and template arguments; the rest is dropped.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache, lru_cache
from importlib import resources

LONGEST = 20_000
"""No real name is longer; hostile ones are cut here."""
MODULE = "module::"
"""Prefix of the ranges that `hotspot.target` puts around modules, and of the rows made of them."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_REWRITES = (
    (re.compile(r"<unnamed>|\(anonymous namespace\)|_NV_ANON_NAMESPACE"), "(anonymous)"),
    # casts of template arguments: (int)128, (unsigned long)2
    (re.compile(r"\((?:unsigned |signed )?(?:int|bool|char|short|long|long long)\)(?=-?\d)"), ""),
    (re.compile(r"\b(\d+)(?:u|l|ul|ll|ull)\b"), r"\1"),
    (re.compile(r"\btrue\b"), "1"),
    (re.compile(r"\bfalse\b"), "0"),
    (re.compile(r"\{lambda\(([^(){}]{0,2000})\)#(\d+)\}"), r"[lambda(\1) (instance \2)]"),
    # const stands before or after the type, and tells no two kernels apart
    (re.compile(r"\bconst\b"), ""),
    (re.compile(r"\s+"), " "),
    (re.compile(r"\b(?:void|__global__) (?=[\w(])"), ""),
    (re.compile(r" ?([^\w ]) ?"), r"\1"),
)
_RETURN = re.compile(r"^(?:int|float|double|bool|static) (?=\w)")
# not a function around a lambda, which is all that tells some kernels apart
_QUALIFIER = re.compile(r"(?:\b\w+|\(anonymous\))::(?!\[|operator)")


def printable(name: str) -> str:
    """The name without control characters: a profile must not steer the reader's terminal."""
    return _CONTROL.sub(" ", name[:LONGEST])


@lru_cache(maxsize=20_000)
def normalise(name: str) -> str:
    """The name as classification and matching see it: one spelling, template arguments kept,
    argument lists and return types dropped. Module rows stay as they are.
    """
    name = name[:LONGEST].strip()
    if name.startswith(MODULE):
        return name
    for pattern, replacement in _REWRITES:
        name = pattern.sub(replacement, name)
    return without_arguments(_RETURN.sub("", name.strip()))


def match_key(name: str) -> str:
    """What ncu's spelling shares with the others': the normalised name without namespaces."""
    return _QUALIFIER.sub("", normalise(name))


def without_arguments(name: str) -> str:
    """The name without its argument list, and without those of functions that enclose a lambda:
    `f<int>(float *)` becomes `f<int>`, `g(int)::[lambda()]` becomes `g::[lambda()]`.
    """
    closing = _pairs(name)
    kept: list[str] = []
    index = 0
    while index < len(name):
        end = closing.get(index)
        if end is not None and _is_argument_list(name, index, end):
            index = end + 1
            continue
        kept.append(name[index])
        index += 1
    return "".join(kept).strip() or name


def _pairs(name: str) -> dict[int, int]:
    """Each opening parenthesis with its closing one, as far as they match."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for index, character in enumerate(name):
        if character == "(":
            opened.append(index)
        elif character == ")" and opened:
            pairs[opened.pop()] = index
    return pairs


def _is_argument_list(name: str, begin: int, end: int) -> bool:
    before, after = name[:begin][-9:], name[end + 1 : end + 3]
    follows = begin > 0 and (before[-1].isalnum() or before[-1] in "_>)")
    if not follows or before.endswith("lambda"):
        return False
    if before.rstrip().endswith("operator"):
        return False  # operator() itself; its arguments come next
    return after == "" or after in ("::", " [")


def family(name: str) -> str:
    """The name with what an autotuner or a code generator appended folded away: see `fold` in
    families.toml.
    """
    for pattern, replacement in _folds():
        name = pattern.sub(replacement, name)
    return name


@cache
def _folds() -> list[tuple[re.Pattern[str], str]]:
    text = resources.files("hotspot").joinpath("families.toml").read_text(encoding="utf-8")
    rules = tomllib.loads(text)["fold"]
    return [(re.compile(rule["pattern"]), rule["replacement"]) for rule in rules]


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
