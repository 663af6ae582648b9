"""One spelling for kernel names: nsys, Kineto and ncu each write the same kernel differently.

Normalisation takes one pass over the name, since a profile is untrusted input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache

from patcher.hotspot.rules import rules

_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb\U000e0000-\U000e007f]+"
)
LONGEST = 20_000
"""Maximum length in characters; no real name is longer, and hostile ones are truncated."""
_PLAIN = re.compile(r"[\w$.]*")
"""Mangled, Triton and C names, which all profilers spell alike."""
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
_EATEN_BRACKET = re.compile(r"(?<=\w)<unnamed>::")
_BARE_UNNAMED = re.compile(r"(?<![<\w])unnamed>::")
_LENGTH = re.compile(r"[1-9]\d{0,4}")

_NORM = re.compile(r"RMSNorm(\.\w+(\((\d+), (\d+)\))?)?$")
MODULE = "module::"
"""Prefix of the ranges that `hotspot.target` puts around modules, and of their rows."""


def printable(name: str) -> str:
    """The name without characters that could drive a terminal, turn its text around, or hide."""
    return _CONTROL.sub(" ", name[:LONGEST])


def normalise(name: str) -> str:
    """The name as classification and matching use it: the part that all profilers agree on.

    Argument lists are dropped, inside template arguments too, because nsys writes `T1 *` where
    Kineto writes the type. Return types, casts of template arguments and suffixes of literals are
    dropped, since Kineto or ncu omits them. `true` becomes `1`, as in ncu and in casts.
    """
    name = name[:LONGEST]
    module, slash, inside = name.partition("/")
    if slash and module.startswith(MODULE):  # see row_name
        return module + slash + _respell(inside)
    return _respell(name)


def _respell(name: str) -> str:
    if _PLAIN.fullmatch(name):
        return name
    name = _ANONYMOUS.sub("(anonymous)", name.strip())
    name = _INSTANCE.sub(r"#\1}", name.replace("[lambda(", "{lambda("))
    return _Writer(_TOKEN.findall(name)).text() or name


def match_key(name: str) -> str:
    """A key that ncu's spelling shares with the others: the name without namespaces.

    ncu removes namespaces from the text and takes brackets along: `f<ns::<unnamed>::x>` becomes
    `f<unnamed>::x>`, and `g() const::[lambda(` becomes `g() lambda(`.
    """
    name = name[:LONGEST]
    if "unnamed>::" in name:
        name = _BARE_UNNAMED.sub("", _EATEN_BRACKET.sub("<", name))
    if ") lambda(" in name:
        name = name.replace(") lambda(", ")::[lambda(")
    return _QUALIFIERS.sub("", normalise(name))


def function_key(name: str) -> str:
    """The function's name alone, mangled or not, as `ncu --kernel-name-base function` prints it."""
    if name.startswith("_Z"):
        return _mangled_function(name[:LONGEST])
    return match_key(name).partition("<")[0]


def _mangled_function(name: str) -> str:
    """The last identifier of a mangled function's own name; the name itself if there is none."""
    identifiers, _ = mangled_parts(name)
    return identifiers[-1] if identifiers else name


def mangled_parts(name: str) -> tuple[list[str], str]:
    """The identifiers of a mangled function's own name, and the rest; none if it is not mangled."""
    if not name.startswith("_Z"):
        return [], name
    nested = name.startswith("_ZN")
    at = 3 if nested else 2
    found: list[str] = []
    while (match := _LENGTH.match(name, at)) is not None and (nested or not found):
        at = match.end() + int(match[0])
        found.append(name[match.end() : at])
    return found, name[at:]


def family(name: str) -> str:
    """The name without suffixes of tuners and code generators, by the folds of families.toml."""
    name = name[:LONGEST]
    for pattern, replacement in _folds():
        name = pattern.sub(replacement, name)
    return name


@cache
def _folds() -> list[tuple[re.Pattern[str], str]]:
    folds = rules("families")["fold"]
    return [(re.compile(fold["pattern"]), fold["replacement"]) for fold in folds]


class _Writer:
    """Rewrites tokens in one spelling. A segment is one argument of a list, or the name."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._closing = _matches(tokens)
        self._out: list[str] = []
        self._segments: list[list[int]] = [[0, 0]]
        """For each open list: where its last argument starts in `_out`, and whether a leading
        `const` is still to be written after the type."""

    def text(self) -> str:
        at = 0
        while at < len(self._tokens):
            at = self._step(at, self._tokens[at])
        self._end_type()
        return "".join(self._out).strip()

    def _step(self, at: int, token: str) -> int:
        """Write the construct that starts at a token; return the index after it."""
        out, segments = self._out, self._segments
        if token == "(":
            if out[-2:] == ["{", "lambda"]:
                out.append("(")
                segments.append([len(out), 0])
                return at + 1
            end = self._closing.get(at, len(self._tokens))  # unclosed: the name was truncated
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
            else:  # the segment up to here was a return type
                del out[start:]
                self._segments[-1][1] = 0
        literal = _LITERAL.fullmatch(token)
        out.append(literal[1] if literal else _BOOLEANS.get(token, token))

    def _operator(self, at: int) -> int:
        """`operator()`, `operator ()`, `operator->`: these signs are not brackets."""
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
        """The index after the `const` of a member function, if there is one."""
        tokens = self._tokens
        if tokens[at : at + 2] == [" ", "const"]:
            return at + 2
        return at

    def _end_type(self) -> None:
        if self._segments[-1][1]:
            self._out.append(" const")
            self._segments[-1][1] = 0


def _matches(tokens: list[str]) -> dict[int, int]:
    """The index of the closing parenthesis for each opening one."""
    stack: list[int] = []
    closing: dict[int, int] = {}
    for index, token in enumerate(tokens):
        if token == "(":
            stack.append(index)
        elif token == ")" and stack:
            closing[stack.pop()] = index
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


def module_name(module: object, path: str, in_layer: bool) -> str:
    """The name of a module's range.

    A norm within a part of a layer (of queries and keys, of low-rank states) has another place and
    other sizes than those of the residual stream, so that it is a row of its own:
    `module::Qwen3RMSNorm.q_norm`.

    Args:
        module: the module.
        path: its name in the model: `model.layers.0.self_attn.q_norm`.
        in_layer: whether it belongs to a part of a layer.
    """
    name = MODULE + type(module).__name__
    return f"{name}.{path.rpartition('.')[2]}" if in_layer and is_whole(name) else name


def with_sizes(name: str, sizes: Sequence[int]) -> str:
    """The name of a norm within a part of a layer, with the rows and the elements of a row that it
    has in a step: `module::Qwen3RMSNorm.q_norm(32, 128)`. Other names stay.
    """
    if not sizes or not is_within(name):
        return name
    return f"{name}({math.prod(sizes[:-1])}, {sizes[-1]})"


def sizes_in(name: str) -> tuple[int, int] | None:
    """Rows and elements of a row of a norm within a part of a layer; None if its row has no such
    sizes, as a profile of an earlier version."""
    match = _NORM.search(name)
    return None if match is None or match[2] is None else (int(match[3]), int(match[4]))


def is_within(name: str) -> bool:
    """Whether a row is of a norm within a part of a layer, see `module_name`."""
    match = _NORM.search(name)
    return name.startswith(MODULE) and match is not None and match[1] is not None


def is_whole(module: str) -> bool:
    """Whether all kernels in this module's range form one row: a norm, which an op replaces."""
    return _NORM.search(module) is not None


def row_name(module: str | None, name: str) -> str:
    """The row of a kernel or operator, given the innermost module range around it.

    A decoder layer runs only the residual add outside its parts, so that add has its own row.
    """
    if module is not None and is_whole(module):
        return module
    if module is not None and module.endswith("DecoderLayer"):
        return f"{module}/{name}"
    return name
