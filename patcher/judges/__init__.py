"""Where candidates are judged: in processes of this machine, or on another one through a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import Candidate, Evaluation, UsageError
from bench.judge import JudgeSettings, Progress, open_judge
from patcher.hardware import device_facts
from patcher.judges.exchange import ExchangeJudge

LOCAL = "local"
JUDGES = "local or exchange:DIR"

Judges = Callable[[Sequence[Candidate]], list[Evaluation]]
"""Says what each candidate is worth, in their order."""


@contextmanager
def open_judges(
    spec: str, settings: JudgeSettings, ticket: str, report: Progress
) -> Iterator[Judges]:
    """The judge that `--judge` names: `local`, or `exchange:DIR`, whose verdicts are those that a
    `patcher worker DIR` wrote; it raises `WaitingError` after all jobs are written.

    Args:
        ticket: who asks, as a run's id; a job with the same ticket is judged once.

    Raises:
        UsageError: no such judge.
    """
    folder = exchange_folder(spec)
    if folder is not None:
        yield ExchangeJudge(folder, settings, ticket).evaluate
        return
    with open_judge(settings) as judge:

        def judged(candidates: Sequence[Candidate]) -> list[Evaluation]:
            return [judge.evaluate(candidate, report) for candidate in candidates]

        yield judged


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
