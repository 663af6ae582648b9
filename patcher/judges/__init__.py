"""Where candidates are judged: in processes of this machine, or on another one through a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from patcher.bench import Candidate, Evaluation, UsageError
from patcher.bench.judge import JudgeSettings, Progress, open_judge
from patcher.judges.counters import CandidateJudge, with_counters
from patcher.judges.exchange import ExchangeJudge

if TYPE_CHECKING:  # it brings torch
    from patcher.bench.judge.judge import Judge

LOCAL = "local"
JUDGES = "local or exchange:DIR"


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
    """The judge that `--judge` names: `local`, or `exchange:DIR`, whose verdicts are those that a
    `patcher worker DIR` wrote.

    Args:
        request_id: who asks, as a run's id; a job with the same id is judged once.
        counters: whether right verdicts carry hardware counters, where they can be read.
        say: told why they cannot.

    Raises:
        UsageError: no such judge.
    """
    folder = exchange_folder(spec)
    if folder is not None:
        yield ExchangeJudge(folder, settings, request_id, counters)
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


def exchange_folder(spec: str) -> Path | None:
    """DIR of `exchange:DIR`; None for `local`.

    Raises:
        UsageError: neither.
    """
    if spec == LOCAL:
        return None
    name, _, folder = spec.partition(":")
    if name != "exchange" or not folder:
        raise UsageError(f"unknown judge {spec!r}", f"say {JUDGES}")
    return Path(folder)


__all__ = [
    "JUDGES",
    "LOCAL",
    "CandidateJudge",
    "ExchangeJudge",
    "Judges",
    "exchange_folder",
    "open_judges",
]
