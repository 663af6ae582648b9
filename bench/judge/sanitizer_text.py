"""Parse the text output of compute-sanitizer into findings.

The text format is documented (Compute Sanitizer User Manual); the XML format is not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from patcher.bench.judge import tools
from patcher.bench.records import Record

_MOST_REPORTS = 1000
"""The tools print at most 100 reports; more must be forged."""
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)(?: displayed)?\b")
_RACE = re.compile(
    r"(?:(?P<level>error|warning|info): )?"
    r"(?P<kind>race reported between \w+ access at (?P<place>.+)"
    r"|potential \w+ hazard detected)",
    re.IGNORECASE,
)
_TOOL = re.compile(
    r"(?:internal|error|warning|compute-sanitizer|target application|tracking kernels"
    r"|default timeout|program hit|leak summary|racecheck summary|error summary)\b",
    re.IGNORECASE,
)
"""Headlines about the tool, the session or the API rather than about a memory access."""
_DETAIL = re.compile(r"at |by thread|Address |Access |and |Saved |Host Frame|Device Frame|in /")
_PLACES = (
    # NAME+0x10 in FILE:1; 0x10 in FILE:1:NAME (until 2022); 0x10 in NAME
    re.compile(r"(?P<name>.+?)\+0x[0-9a-f]+(?: in (?P<file>[^\s:]+):(?P<line>\d+))?"),
    re.compile(r"0x[0-9a-f]+ in (?P<file>[^\s:]+):(?P<line>\d+):(?P<name>.+)"),
    re.compile(r"(?P<name>.+?):0x[0-9a-f]+(?: in (?P<file>[^\s:]+):(?P<line>\d+))?"),
    re.compile(r"0x[0-9a-f]+ in (?P<name>.+)"),
)


class SanitizerFinding(Record):
    """One report of one tool."""

    tool: str
    """`memcheck`, `racecheck` or `initcheck`."""
    kind: str
    """Headline of the report, such as `Invalid __global__ write of size 4 bytes`."""
    kernel: str = ""
    """Name of the kernel."""
    where: str = ""
    """File and line, if the build has line information."""
    level: str = "error"
    """`error`, `warning` or `info`."""
    text: str = ""
    """The report without folders of this machine."""

    @property
    def counts(self) -> bool:
        """Whether the report counts against the candidate.

        A library's kernel has no line information. A candidate's kernel with a library's name does.
        """
        library = tools.library_of(self.kernel) is not None and not self.where
        return self.level == "error" and (self.tool == "memcheck" or not library)

    def summary(self) -> str:
        """The finding in one line."""
        kernel = f" in {self.kernel[:120]}" if self.kernel else ""
        place = f" ({self.where})" if self.where else ""
        return f"{self.tool}: {self.kind}{kernel}{place}"


class SanitizerReport(Record):
    """All reports of one tool."""

    findings: tuple[SanitizerFinding, ...]
    """The reports in order."""
    errors: int | None
    """Number of errors in the tool's summary; None if there is no summary."""


def parse(text: str, tool: str) -> SanitizerReport:
    """Parse a tool's text output, ignoring lines that the program printed."""
    blocks = itertools.islice(_blocks(text), _MOST_REPORTS)
    findings = [finding for block in blocks if (finding := _finding(block, tool))]
    summary = _SUMMARY.search(text)
    return SanitizerReport(findings=tuple(findings), errors=int(summary[1]) if summary else None)


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield each report as its headline and its detail lines."""
    block: list[str] = []
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        content = line.lstrip("=")
        if content.strip() and (content.startswith("  ") or _DETAIL.match(content.strip())):
            block.append(content.strip())
            continue
        if block:
            yield block
        block = [content.strip()] if content.strip() else []
    if block:
        yield block


def _finding(block: list[str], tool: str) -> SanitizerFinding | None:
    title, *details = block
    text = tools.without_paths("\n".join(block[:12]))
    if race := _RACE.match(title):
        level = (race["level"] or "error").lower()
        if race["place"]:
            accesses = re.findall(r"(read|write) access", " ".join(block), re.IGNORECASE)
            kind = f"Race between {' and '.join(accesses[:2]).lower()}"
        else:
            kind = race["kind"]
        kernel, where = _place(race["place"] or next(map(_after_at, details), ""))
        return SanitizerFinding(
            tool=tool, kind=kind, kernel=kernel, where=where, level=level, text=text
        )
    places = [_after_at(line) for line in details if line.startswith("at ")]
    if _TOOL.match(title) or not details:
        return None
    kernel, where = _place(places[0]) if places else ("", "")
    return SanitizerFinding(tool=tool, kind=title[:200], kernel=kernel, where=where, text=text)


def _after_at(line: str) -> str:
    return f" {line}".partition(" at ")[2]


def _place(text: str) -> tuple[str, str]:
    """Name of the kernel, and file:line if the text has them."""
    for pattern in _PLACES:
        if match := pattern.match(text):
            parts = match.groupdict()
            where = f"{Path(parts['file']).name}:{parts['line']}" if parts.get("file") else ""
            return parts["name"].strip(), where
    return text[:200], ""
