"""The cases of the self-test corpus: candidates, each with the outcomes that its header expects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from patcher.bench.errors import UsageError
from patcher.bench.judge.evaluation import Outcome
from patcher.bench.ops.candidate import Language, guess_language
from patcher.bench.records import Record

Kind = Literal["cheat", "twin", "honest", "fault"]
_SWITCH = re.compile(r"^(#define CHEAT 1|CHEAT = True)$", re.MULTILINE)
_SHARED = re.compile(r"^// shared: (\w+\.\w+)\n", re.MULTILINE)
_HEADER = re.compile(r"^(?:#|//) (\w+): (.+)$")


class CorpusCase(Record):
    """One candidate of the corpus with its expected outcome."""

    name: str
    """File name without suffix."""
    kind: Kind
    """`cheat`, `twin`, `honest` or `fault`."""
    title: str
    """What the candidate does."""
    number: int | None = None
    """Number in the catalogue of cheats."""
    op: str
    """Name of the op."""
    device: str
    """`cpu` or `cuda`."""
    outcomes: tuple[Outcome, ...]
    """Expected outcomes, one of which must occur."""
    caught: tuple[str, ...] = ()
    """Checks, one of which must fail first if any check fails."""
    label: str = ""
    """Word that a tripwire hit must contain."""
    lives_s: float = 0.0
    """Seconds of calls after which the cheat becomes visible."""
    gains_nothing: bool = False
    """Whether the candidate is correct, and caught by being no faster than its honest twin."""
    language: Language
    """Language of the source."""
    source: str
    """Source text."""


def read_corpus(folder: Path, device: str) -> list[CorpusCase]:
    """Read all candidates for a device; each cheat is followed by its twin.

    Raises:
        UsageError: the folder holds no corpus, or a header is invalid.
    """
    if not (folder / "cheats").is_dir():
        raise UsageError(f"{folder} holds no corpus", "it has cheats/, honest/, faults/ and ops/")
    cases = []
    for kind in ("cheat", "honest", "fault"):
        name = "honest" if kind == "honest" else f"{kind}s"
        for path in sorted((folder / name).iterdir()):
            if path.suffix in (".py", ".cpp", ".cu"):
                cases += _read(path, kind)
    return [entry for entry in cases if entry.device == device]


def matching(folder: Path, device: str, only: str) -> list[CorpusCase]:
    """Read the candidates for a device whose KIND/NAME matches a regular expression.

    Raises:
        UsageError: none does, the expression is invalid, or the corpus cannot be read.
    """
    hint = "give a regular expression on KIND/NAME, such as cheat/29"
    try:
        pattern = re.compile(only)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--only {only!r:.100} is no regular expression: {error}", hint) from error
    cases = read_corpus(folder, device)
    found = [each for each in cases if pattern.search(f"{each.kind}/{each.name}")]
    if not found:
        raise UsageError(f"no case matches {only!r:.100} among the {len(cases)} on {device}", hint)
    return found


def read_source(path: Path) -> str:
    """A candidate's source, with the lines that it shares with others in place."""

    def shared(match: re.Match[str]) -> str:
        return (path.parent.parent / "shared" / match[1]).read_text(encoding="utf-8")

    return _SHARED.sub(shared, path.read_text(encoding="utf-8"))


def _read(path: Path, kind: Kind) -> list[CorpusCase]:
    source = read_source(path)
    header: dict[str, str] = {}
    for line in source.splitlines():
        if not (match := _HEADER.match(line)):
            break
        header[match[1]] = match[2].strip()
    try:
        title = header[kind]
        outcomes = tuple(Outcome(each.strip()) for each in header["outcome"].split(","))
        entry = CorpusCase(
            name=path.stem,
            kind=kind,
            title=title,
            number=int(title.split()[0]) if kind == "cheat" else None,
            op=header["op"],
            device=header["device"],
            outcomes=outcomes,
            caught=tuple(filter(None, map(str.strip, header.get("caught", "").split(",")))),
            label=header.get("label", ""),
            lives_s=float(header.get("lives", 0)),
            gains_nothing="gains" in header,
            language=guess_language(path, source),
            source=source,
        )
    except (KeyError, ValueError) as error:
        raise UsageError(f"{path.name}: invalid header: {error}") from error
    if kind != "cheat":
        return [entry]
    if len(_SWITCH.findall(source)) != 1:
        raise UsageError(f"{path.name}: exactly one line must set CHEAT")
    return [entry, twin_of(entry)]


def twin_of(entry: CorpusCase) -> CorpusCase:
    """The same file with the cheat switched off."""
    changes: dict[str, Any] = {
        "kind": "twin",
        "source": _SWITCH.sub(_off, entry.source),
        "outcomes": (Outcome.CORRECT, Outcome.TOO_SLOW),
        "label": "",
        "caught": (),
        "gains_nothing": False,
    }
    return entry.model_copy(update=changes)


def _off(line: re.Match[str]) -> str:
    return line[0].replace("1", "0").replace("True", "False")
