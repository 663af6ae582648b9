"""A source without its comments and string literals, line by line, in time linear in its length.

Python's `tokenize` takes quadratic time on hostile text, and reads f-strings differently from
version to version. So each language has one regular expression here, and no alternative of it
gives back what it has taken.
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
# An identifier or a number is taken whole: its quote or its R begins no literal.
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
    """Three views of one source with the same lines. In the latter two, runs of blanks are one,
    and there are none in `torch . backends`."""

    all: str
    text: str
    """Without comments and docstrings."""
    code: str
    """Without string literals too; what an f-string computes stays."""


def views(source: str, language: Language) -> Views:
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
    for match, kept, computed in _literals(source) if native else _python_literals(source):
        between = source[at : match.start()]
        text += between, kept
        code += between, computed, "\n" * (match[0].count("\n") - computed.count("\n"))
        at = match.end()
    return Views(source, *(_tidy("".join(part) + source[at:], native) for part in (text, code)))


def _literals(source: str) -> Iterator[tuple[re.Match[str], str, str]]:
    """Each comment and string with what the text and what the code keep of it."""
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
    """Whether nothing else is on the lines of a string: a docstring, outside of brackets."""
    before = source[max(0, match.start() - 200) : match.start()]
    after = source[match.end() : match.end() + 200].partition("\n")[0].strip()
    line_before, newline, indent = before.rpartition("\n")
    begins = bool(newline) or match.start() <= 200
    continued = line_before.rstrip().endswith("\\")
    return begins and not indent.strip() and not continued and (not after or after[0] == "#")


def _computed(literal: str) -> str:
    """What stands in the braces of an f-string."""
    found, depth = [], 0
    for letter in literal.replace("{{", "").replace("}}", ""):
        depth += (letter == "{") - (letter == "}" and depth > 0)
        found.append(letter if depth else "")
    return "".join(found)


def _spliced(source: str) -> str:
    """Each line that ends in a backslash joined to the next; their newlines come after both."""
    done: list[str] = []
    owed = 0
    for line in source.split("\n"):
        if end := _BACKSLASH_AT_END.search(line):
            done.append(line[: end.start()])
            owed += 1
        else:
            done.append(line + "\n" * (owed + 1))
            owed = 0
    return "".join(done).removesuffix("\n")


def _tidy(code: str, native: bool) -> str:
    return _LINKS.sub(r"\1", _SPACES.sub(" ", code if native else _spliced(code)))


def _blank(text: str) -> str:
    return " " + "\n" * text.count("\n")
