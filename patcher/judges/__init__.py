"""Where candidates are judged: in processes of this machine, or on others (`remote.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from patcher.bench import Candidate, Evaluation, UsageError
from patcher.bench.judge import JudgeSettings, Progress, open_judge
from patcher.judges.counters import CandidateJudge, with_counters
from patcher.judges.remote import REMOTE_JUDGES, RemoteJudge

if TYPE_CHECKING:  # it brings torch
    from patcher.bench.judge.judge import Judge

LOCAL = "local"
JUDGES = "local, exchange:DIR or ray[:ADDRESS][@GPU]"


class Judges(Protocol):
    """What says what candidates are worth."""

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Told of candidates that will be judged: to build them side by side, or to hand all of
        them over before the first is waited for.
        """
        ...

    def evaluate(self, candidates: Sequence[Candidate]) -> list[Evaluation]:
        """The verdicts, in the order of the candidates.

        Raises:
            WaitingError: the judge is remote and some have not come; all were handed over.
            PatcherError: as `patcher.bench.judge.evaluate`.
        """
        ...


@contextmanager
def open_judges(
    spec: str,
    settings: JudgeSettings,
    request_id: str,
    report: Progress,
    *,
    counters: bool = False,
    say: Callable[[str], None] | None = None,
) -> Iterator[Judges]:
    """The judge that `--judge` names: `local`, or one of `REMOTE_JUDGES`.

    Args:
        request_id: who asks, as a run's id; a job with the same id is judged once.
        counters: whether right verdicts carry hardware counters, where they can be read.
        say: told why they cannot.

    Raises:
        UsageError: no such judge.
    """
    remote = remote_judge(spec)
    if remote is not None:
        kind, place = remote
        with kind(place, settings, request_id, counters, report) as judges:
            yield judges
        return
    with open_judge(settings) as judge:
        one: CandidateJudge = partial(judge.evaluate, report=report)
        if counters:
            one = with_counters(one, settings.sweep, say or (lambda _: None))
        yield _LocalJudges(judge, one)


@dataclass(frozen=True)
class _LocalJudges:
    """One judge of this machine: what it trusts is started once."""

    judge: Judge
    one: CandidateJudge

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        self.judge.build_ahead(candidates)

    def evaluate(self, candidates: Sequence[Candidate]) -> list[Evaluation]:
        return [self.one(candidate) for candidate in candidates]


def remote_judge(spec: str) -> tuple[type[RemoteJudge], str] | None:
    """The judge that `NAME:PLACE` names, and the place; None for `local`.

    Raises:
        UsageError: there is none of that name.
    """
    if spec == LOCAL:
        return None
    name, _, place = spec.partition(":")
    if name not in REMOTE_JUDGES:
        name, at, place = spec.partition("@")  # a place may be left out
        place = at + place
    if name not in REMOTE_JUDGES:
        raise UsageError(f"unknown judge {spec!r}", f"say {JUDGES}")
    return REMOTE_JUDGES.load(name), place


def resolved_judge(spec: str) -> str:
    """The same judge as it is called from another folder."""
    remote = remote_judge(spec)
    if remote is None:
        return spec
    kind, place = remote
    name = spec.partition(":")[0].partition("@")[0]
    return f"{name}:{kind.resolved(place)}" if place else spec


__all__ = [
    "JUDGES",
    "LOCAL",
    "REMOTE_JUDGES",
    "CandidateJudge",
    "Judges",
    "RemoteJudge",
    "open_judges",
    "remote_judge",
    "resolved_judge",
]
