"""Where candidates are judged: in processes of this machine, or on another one through a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench import Candidate, Evaluation, UsageError
from bench.judge import JudgeSettings, Progress, open_judge
from patcher.hardware import device_facts
from patcher.judges.exchange import ExchangeJudge

if TYPE_CHECKING:  # it brings torch
    from bench.judge.judge import Judge

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
            WaitingError: the judge is elsewhere and some have not come; all were handed over.
            PatcherError: as `bench.judge.evaluate`.
        """
        ...


@contextmanager
def open_judges(
    spec: str, settings: JudgeSettings, ticket: str, report: Progress
) -> Iterator[Judges]:
    """The judge that `--judge` names: `local`, or `exchange:DIR`, whose verdicts are those that a
    `patcher worker DIR` wrote.

    Args:
        ticket: who asks, as a run's id; a job with the same ticket is judged once.

    Raises:
        UsageError: no such judge.
    """
    folder = exchange_folder(spec)
    if folder is not None:
        yield ExchangeJudge(folder, settings, ticket)
        return
    with open_judge(settings) as judge:
        yield _LocalJudges(judge, report)


@dataclass(frozen=True)
class _LocalJudges:
    """One judge of this machine: what it trusts is started once."""

    judge: Judge
    report: Progress

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        self.judge.build_ahead(candidates)

    def evaluate(self, candidates: Sequence[Candidate]) -> list[Evaluation]:
        return [self.judge.evaluate(candidate, self.report) for candidate in candidates]


def facts(spec: str, kind: str) -> str:
    """What the agents should know of the hardware on which `--judge` judges; `kind` is `cpu` or
    `cuda`.
    """
    folder = exchange_folder(spec)
    if folder is None:
        return device_facts(kind)
    return ExchangeJudge.facts(folder, kind)


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


__all__ = ["JUDGES", "LOCAL", "ExchangeJudge", "Judges", "exchange_folder", "facts", "open_judges"]
