"""What the judge said in a workspace: lines that are chained, and a copy of them outside of it.

`results.jsonl` is for the agent to read. The judge's own copy lies in patcher's cache; the two must
be the same, and each line carries the sha256 of the line before it, so that an edit is found even
where only `results.jsonl` was handed on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from patcher.bench import SCHEMA_VERSION, Evaluation, Language, Record, VerificationError
from patcher.judges.reward import Reward

RESULTS = "results.jsonl"
Stage = Literal["compile", "verify", "profile"]
_SHOWN = 300


class LedgerSummary(Record):
    """What an evaluation comes to."""

    outcome: str
    """As `bench.Outcome`; `right` where it was not timed for a verdict."""
    failed: tuple[str, ...]
    """Checks that failed, and why."""
    baseline: str | None
    geomean_speedup: float | None
    """None where it was not timed for a verdict."""
    device: str | None

    @classmethod
    def of(cls, evaluation: Evaluation, timed: bool) -> LedgerSummary:
        checks = evaluation.failed_checks
        return cls(
            outcome=evaluation.outcome if timed or not evaluation.right else "right",
            failed=tuple(f"{check.name}: {check.detail}"[:_SHOWN] for check in checks),
            baseline=evaluation.baseline,
            geomean_speedup=evaluation.geomean_speedup if timed else None,
            device=evaluation.environment.device if evaluation.environment else None,
        )


class Line(Record):
    """One line of `results.jsonl`: one command that the judge carried out."""

    schema_version: int = SCHEMA_VERSION
    seq: int
    time: str
    """ISO 8601, UTC."""
    stage: Stage
    op: str
    language: Language
    digest: str
    """Of the candidate."""
    file: str
    """Where its source is kept."""
    built: bool
    evaluations: tuple[LedgerSummary, ...] = ()
    reward: Reward | None = None
    """None: it was built and no more."""
    prev: str
    """sha256 of the line before, without its newline; of `workspace.json` for the first."""


class Ledger:
    """The lines of one workspace.

    Args:
        copy: the judge's own file; its folder is made.
        results: the agent's.
        genesis: sha256 of `workspace.json`.
    """

    def __init__(self, copy: Path, results: Path, genesis: str) -> None:
        self._copy, self._results, self._genesis = copy, results, genesis

    def begin(self) -> None:
        """Make both files, empty."""
        self._copy.parent.mkdir(parents=True, exist_ok=True)
        self._copy.touch()
        self._show(b"")

    def lines(self) -> list[Line]:
        """Every line. What is missing at the end of `results.jsonl` is written again.

        Raises:
            VerificationError: a line was changed.
        """
        with self._copy.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return self._held(file.read(), file.truncate)[0]

    def append(self, make: Callable[[int, str], Line]) -> Line:
        """Add the line that `make` gives for its number and `prev`: first to the judge's copy."""
        with self._copy.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            lines, content = self._held(file.read(), file.truncate)
            kept = content.splitlines()
            prev = hashlib.sha256(kept[-1]).hexdigest() if kept else self._genesis
            line = make(len(lines), prev)
            content += line.model_dump_json().encode() + b"\n"
            file.seek(0)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            self._show(content)
        return line

    def _held(self, content: bytes, truncate: Callable[[int], object]) -> tuple[list[Line], bytes]:
        """Both files against each other; a line torn by a kill is dropped."""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            truncate(len(whole))
        shown = self._results.read_bytes() if self._results.is_file() else b""
        if not whole.startswith(shown):
            pairs = zip(shown.splitlines(), whole.splitlines(), strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            at = (min(shown.count(b"\n"), whole.count(b"\n")) if same is None else same) + 1
            raise VerificationError(
                f"{RESULTS} was changed: line {at} is not what the judge wrote",
                f"remove {RESULTS}: the next command writes it again",
            )
        if shown != whole:
            self._show(whole)
        return parse(whole, self._genesis), whole

    def _show(self, content: bytes) -> None:
        staged = self._results.with_name(f".{self._results.name}.tmp")
        staged.unlink(missing_ok=True)
        staged.write_bytes(content)
        staged.chmod(0o444)
        staged.replace(self._results)


def parse(content: bytes, genesis: str) -> list[Line]:
    """The lines of a `results.jsonl`, held against their chain alone.

    Raises:
        VerificationError: a line is damaged, or does not follow from the one before it.
    """
    found: list[Line] = []
    prev = genesis
    for number, text in enumerate(content.splitlines(), 1):
        try:
            line = Line.model_validate_json(text)
        except ValidationError as error:
            raise _broken(number, "is no result") from error
        if line.prev != prev or line.seq != number - 1:
            raise _broken(number, "does not follow from the line before it")
        prev = hashlib.sha256(text).hexdigest()
        found.append(line)
    return found


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _broken(number: int, why: str) -> VerificationError:
    return VerificationError(f"{RESULTS}: line {number} {why}", "lay out a new workspace")
