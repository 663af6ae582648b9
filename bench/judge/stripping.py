"""Remove comments and string literals from a source, in time linear in its length.

Python's `tokenize` takes quadratic time on hostile text, and parses f-strings differently in
different versions. So each family of languages has one regular expression here, none of whose
alternatives backtracks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from patcher.bench.ops.candidate import Language

_PYTHON = re.compile(
    r"""
    (?P<comment> \#[^\n]*+ )
  | (?P<open> [(\[{] ) | (?P<close> [)\]}] )
  | (?P<string> (?P<prefix> (?<!\w) [bBfFrRuUtT]{1,2} )?
      (?: "{3} (?: [^"\\]++ | \\. | "(?!"") )*+ (?: "{3} )?+
        | '{3} (?: [^'\\]++ | \\. | '(?!'') )*+ (?: '{3} )?+
        | " (?: [^"\\\n]++ | \\. )*+ "?+
        | ' (?: [^'\\\n]++ | \\. )*+ '?+ ) )
    """,
    re.VERBOSE | re.DOTALL,
)
# An identifier or a number is matched whole: a quote or an R in it begins no literal.
_NATIVE = re.compile(
    r"""
    (?P<comment> //[^\n]*+ | /\* (?: [^*]++ | \*(?!/) )*+ (?: \*/ )?+ )
  | (?P<string> (?: u8 | [uUL] )?
      (?: R" (?P<mark> [^()\\\s"]{0,16} ) \( .*? (?: \) (?P=mark) " | \Z )
        | " (?: [^"\\\n]++ | \\. )*+ "?+
        | ' (?: [^'\\\n]++ | \\. )*+ '?+ ) )
  | \.?+ \d (?: [eEpP][+-] | '?+[\w.] )*+
  | \w++
    """,
    re.VERBOSE | re.DOTALL,
)
_SPACES = re.compile(r"[ \t\f\v]+")
_LINKS = re.compile(r" ?(\.(?!\.)|::|->) ?")
_BACKSLASH_AT_END = re.compile(r"\\[ \t]*\Z")


@dataclass(frozen=True)
class Views:
    """Three views of a source with the same line numbers.

    In `text` and `code`, runs of blanks become one blank, and `torch . backends` has none.
    """

    all: str
    """The source."""
    text: str
    """The source without comments and docstrings."""
    code: str
    """The source also without string literals; expressions of f-strings stay."""


def views(source: str, language: Language) -> Views:
    """The three views of a source."""
    native = not language.in_python
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    if native:
        source = _spliced(source)
    elif not source.isascii():
        # Python compares identifiers in this form: a full-width `exec` is `exec`
        source = unicodedata.normalize("NFKC", source)
    text: list[str] = []
    code: list[str] = []
    at = 0
    for match, literal, computed in _literals(source) if native else _python_literals(source):
        between = source[at : match.start()]
        text += between, literal
        code += between, computed, "\n" * (match[0].count("\n") - computed.count("\n"))
        at = match.end()
    return Views(source, *(_tidy("".join(part) + source[at:], native) for part in (text, code)))


def _literals(source: str) -> Iterator[tuple[re.Match[str], str, str]]:
    """Yield each comment and string with its replacements in `text` and in `code`."""
    for match in _NATIVE.finditer(source):
        if match["comment"] is not None:
            yield match, _blank(match[0]), " "
        elif match["string"] is not None:
            yield match, match[0], '""'


def _python_literals(source: str) -> Iterator[tuple[re.Match[str], str, str]]:
    depth = 0
    for match in _PYTHON.finditer(source):
        if match["string"] is None and match["comment"] is None:
            depth = max(0, depth + (1 if match["open"] else -1))
        elif match["comment"] is not None or (not depth and _alone(source, match)):
            yield match, _blank(match[0]), " "
        else:
            formatted = set(match["prefix"] or "") & set("fFtT")
            yield match, match[0], '""' + _computed(match[0]) if formatted else '""'


def _alone(source: str, match: re.Match[str]) -> bool:
    """Whether a string outside brackets has its lines to itself, as a docstring does."""
    before = source[max(0, match.start() - 200) : match.start()]
    after = source[match.end() : match.end() + 200].partition("\n")[0].strip()
    line_before, newline, indent = before.rpartition("\n")
    begins = bool(newline) or match.start() <= 200
    continued = line_before.rstrip().endswith("\\")
    return begins and not indent.strip() and not continued and (not after or after[0] == "#")


def _computed(literal: str) -> str:
    """The expressions in the braces of an f-string."""
    letters, depth = [], 0
    for letter in literal.replace("{{", "").replace("}}", ""):
        depth += (letter == "{") - (letter == "}" and depth > 0)
        letters.append(letter if depth else "")
    return "".join(letters)


def _spliced(source: str) -> str:
    """Join each line that ends in a backslash with the next; the newlines follow the result."""
    lines: list[str] = []
    pending = 0
    for line in source.split("\n"):
        if end := _BACKSLASH_AT_END.search(line):
            lines.append(line[: end.start()])
            pending += 1
        else:
            lines.append(line + "\n" * (pending + 1))
            pending = 0
    return "".join(lines).removesuffix("\n")


def _tidy(code: str, native: bool) -> str:
    return _LINKS.sub(r"\1", _SPACES.sub(" ", code if native else _spliced(code)))


def _blank(text: str) -> str:
    return " " + "\n" * text.count("\n")
