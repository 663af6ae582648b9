"""One spelling for kernels: nsys, Kineto and ncu write the same kernel in three ways.

All of it is one pass over the name: a profile is foreign input, and its names may be hostile.
"""

from __future__ import annotations

import re
from functools import cache

from patcher.hotspot.rules import rules

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
LONGEST = 20_000
"""Characters; no real name has more, and hostile ones are cut here."""
_PLAIN = re.compile(r"[\w$.]*")
"""Mangled, Triton and C names: nothing in them is spelled in two ways."""
_ANONYMOUS = re.compile(r"<unnamed>|\(anonymous namespace\)|_NV_ANON_NAMESPACE|_GLOBAL__N_\w*")
_INSTANCE = re.compile(r" ?\(instance (\d+)\)\]")
_TOKEN = re.compile(r"\(anonymous\)|[^\W\d]\w*|\d\w*|::|->|\s+|.")
_WORD = re.compile(r"\w|\(anonymous\)")
_LITERAL = re.compile(r"(\d+)[uUlL]+")
_BOOLEANS = {"true": "1", "false": "0"}
_LENGTHS = frozenset(["unsigned", "signed", "long", "short"])
_SIZED = _LENGTHS | {"int", "char", "double"}
_KEYWORDS = frozenset(["struct", "class", "enum", "typename", "volatile"])
_QUALIFIERS = re.compile(r"(?<!\w)(?:(?:[^\W\d]\w*|\(anonymous\))::)+(?=[^\W\d])(?!operator\b)")

MODULE = "module::"
"""Prefix of the ranges that `hotspot.target` puts around modules, and of the rows made of them."""


def printable(name: str) -> str:
    """The name without control characters: a profile must not steer the reader's terminal."""
    return _CONTROL.sub(" ", name[:LONGEST])


def normalise(name: str) -> str:
    """The name as classification and matching see it: Kineto's spelling without what differs.

    Argument lists go, those of functions inside template arguments too, because nsys writes
    `T1 *` where Kineto writes the type; so do return types, casts of template arguments and
    suffixes of literals, which Kineto or ncu leave out. `true` is `1`: ncu and casts say so.
    """
    name = name[:LONGEST]
    module, slash, inside = name.partition("/")
    if slash and module.startswith(MODULE):  # see row_name
        return module + slash + _spelled(inside)
    return _spelled(name)


def _spelled(name: str) -> str:
    if _PLAIN.fullmatch(name):
        return name
    name = _ANONYMOUS.sub("(anonymous)", name.strip())
    name = _INSTANCE.sub(r"#\1}", name.replace("[lambda(", "{lambda("))
    return _Writer(_TOKEN.findall(name)).written() or name


def match_key(name: str) -> str:
    """The key under which ncu's spelling meets the others: ncu leaves out some namespaces."""
    return _QUALIFIERS.sub("", normalise(name))


def family(name: str) -> str:
    """The name without what a tuner or a code generator appended, by the folds of families.toml."""
    name = name[:LONGEST]
    for pattern, replacement in _folds():
        name = pattern.sub(replacement, name)
    return name


@cache
def _folds() -> list[tuple[re.Pattern[str], str]]:
    folds = rules("families")["fold"]
    return [(re.compile(fold["pattern"]), fold["replacement"]) for fold in folds]


class _Writer:
    """Writes tokens again, in one spelling. A segment is one argument of a list, or the name."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._closing = _matches(tokens)
        self._out: list[str] = []
        self._segments: list[list[int]] = [[0, 0]]
        """Of each open list: where its last argument starts in `_out`, and whether a `const` that
        came first is still to be written behind the type."""

    def written(self) -> str:
        at = 0
        while at < len(self._tokens):
            at = self._step(at, self._tokens[at])
        self._end_type()
        return "".join(self._out).strip()

    def _step(self, at: int, token: str) -> int:
        """Write what starts at a token; where to go on."""
        out, segments = self._out, self._segments
        if token == "(":
            if out[-2:] == ["{", "lambda"]:
                out.append("(")
                segments.append([len(out), 0])
                return at + 1
            end = self._closing.get(at, len(self._tokens))  # never closed: the name was clipped
            return self._after_constness(end + 1)
        if token == "operator":
            return self._operator(at)
        if token == "const":
            if len(out) == segments[-1][0]:
                segments[-1][1] = 1
            else:
                out.append(" const")
        elif token in "*&,>)":
            self._end_type()
            out.append(", " if token == "," else token)
            if token in ">)" and len(segments) > 1:
                segments.pop()
            elif token == ",":
                segments[-1] = [len(out), 0]
        elif token == "<":
            out.append(token)
            segments.append([len(out), 0])
        elif not token.isspace():
            self._word(at, token)
        return at + 1

    def _word(self, at: int, token: str) -> None:
        out, start = self._out, self._segments[-1][0]
        spaced = at > 0 and self._tokens[at - 1].isspace()
        if spaced and len(out) > start and _WORD.match(token):
            if out[-1] in _KEYWORDS or (out[-1] in _LENGTHS and token in _SIZED):
                out.append(" ")
            else:  # all of the segment up to here was a return type
                del out[start:]
                self._segments[-1][1] = 0
        literal = _LITERAL.fullmatch(token)
        out.append(literal[1] if literal else _BOOLEANS.get(token, token))

    def _operator(self, at: int) -> int:
        """`operator()`, `operator ()`, `operator->`: its signs are no brackets."""
        near = range(at + 1, min(at + 6, len(self._tokens)))
        signs = [index for index in near if not self._tokens[index].isspace()]
        if [self._tokens[index] for index in signs[:2]] == ["(", ")"]:
            self._word(at, "operator()")
            return signs[1] + 1
        end = at + 1
        while end in signs and end < at + 4 and self._tokens[end] in "<>=!-+*/%&|^~[]->":
            end += 1
        self._word(at, "".join(self._tokens[at:end]))
        return end

    def _after_constness(self, at: int) -> int:
        """Past the `const` of a member function."""
        tokens = self._tokens
        if tokens[at : at + 2] == [" ", "const"]:
            return at + 2
        return at

    def _end_type(self) -> None:
        if self._segments[-1][1]:
            self._out.append(" const")
            self._segments[-1][1] = 0


def _matches(tokens: list[str]) -> dict[int, int]:
    """Where each parenthesis closes."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for index, token in enumerate(tokens):
        if token == "(":
            opened.append(index)
        elif token == ")" and opened:
            closing[opened.pop()] = index
    return closing


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
