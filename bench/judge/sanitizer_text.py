"""What compute-sanitizer writes, as findings.

The text output, because its forms are documented (Compute Sanitizer User Manual) and those of the
XML are not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from patcher.bench.judge import tools
from patcher.bench.records import Record

_MOST_REPORTS = 1000
"""The tools print 100; more is not of them."""
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
"""What begins so is about the tool, the session or the API, not about an access."""
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
    kind: str
    """`Invalid __global__ write of size 4 bytes`, say."""
    kernel: str = ""
    where: str = ""
    """File and line, where the build kept lines."""
    level: str = "error"
    text: str = ""
    """The whole report, without folders of the machine."""

    @property
    def counts(self) -> bool:
        """Whether the candidate is to blame. A library's kernel has no lines; one that only bears
        such a name has."""
        library = tools.library_of(self.kernel) is not None and not self.where
        return self.level == "error" and (self.tool == "memcheck" or not library)

    def told(self) -> str:
        kernel = f" in {self.kernel[:120]}" if self.kernel else ""
        place = f" ({self.where})" if self.where else ""
        return f"{self.tool}: {self.kind}{kernel}{place}"


class SanitizerReport(Record):
    """What one tool wrote."""

    findings: tuple[SanitizerFinding, ...]
    errors: int | None
    """Of its summary, or None: it did not come to one."""


def parse(text: str, tool: str) -> SanitizerReport:
    """What one tool wrote as text; lines of the program itself are passed over."""
    blocks = itertools.islice(_blocks(text), _MOST_REPORTS)
    findings = [found for block in blocks if (found := _finding(block, tool))]
    summary = _SUMMARY.search(text)
    return SanitizerReport(findings=tuple(findings), errors=int(summary[1]) if summary else None)


def _blocks(text: str) -> Iterator[list[str]]:
    """A headline and what is said below it."""
    block: list[str] = []
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        said = line.lstrip("=")
        if said.strip() and (said.startswith("  ") or _DETAIL.match(said.strip())):
            block.append(said.strip())
            continue
        if block:
            yield block
        block = [said.strip()] if said.strip() else []
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
    """Kernel, and file:line where they are told."""
    for pattern in _PLACES:
        if found := pattern.match(text):
            parts = found.groupdict()
            where = f"{Path(parts['file']).name}:{parts['line']}" if parts.get("file") else ""
            return parts["name"].strip(), where
    return text[:200], ""
