"""GitHub Markdown out of hostile text: it cannot leave its cell, open markup or notify a person."""

from __future__ import annotations

import re
from collections.abc import Sequence

from patcher.report import wording
from patcher.visible import visible


def plain(text: str) -> str:
    """Text as itself on one line: markup characters escaped, mentions and links broken."""
    line = " ".join(visible(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", line)
    return line.replace("@", "&#64;").replace("://", "&#58;//")


def code(text: str, limit: int = 120) -> str:
    """An inline code span, also inside a table."""
    line = wording.clip(" ".join(visible(text).split()), limit).replace("|", "\\|")
    ticks = "`" * (_longest_run(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") or not line else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def fence(text: str, language: str = "") -> str:
    """A code block that its content cannot close."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    tag = language if re.fullmatch(r"[\w+-]*", language) else ""
    return f"{ticks}{tag}\n{visible(text)}\n{ticks}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """`right` has an `r` for each right-aligned column."""
    marks = ["---:" if flag == "r" else "---" for flag in right.ljust(len(head))]
    lines = [head, marks, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
