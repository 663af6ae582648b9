"""One candidate held against several named baselines, for its reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from patcher.attempts.reward import AGAINST, Reward, reward
from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Evaluation,
    MissingError,
    Record,
    UsageError,
    load_op,
)
from patcher.bench.judge import JudgeSettings, Progress
from patcher.judges import ExchangeJudge, exchange_folder, open_judges


class Rewarded(Record):
    """A candidate's reward and the evaluations behind it, by baseline."""

    schema_version: int = SCHEMA_VERSION
    reward: Reward
    evaluations: dict[str, Evaluation]


def rewarded(
    where: str,
    candidate: Candidate,
    settings: JudgeSettings,
    ticket: str,
    report: Progress,
    against: Sequence[str] = AGAINST,
) -> Rewarded:
    """Judge the candidate against each of the baselines that its op has: a whole judgement each,
    and so as many times the cost. A wrong one is judged once.

    Raises:
        UsageError: the op has none of the baselines, or the language is only compiled here.
        WaitingError: the judge is elsewhere; all jobs are written.
        PatcherError: as `judge.evaluate`; that torch.compile does not run here is no error.
    """
    op = load_op(candidate.op)
    missing = {
        name: f"{op.name} has no such baseline" for name in against if name not in op.baselines
    }
    names = [name for name in against if name in op.baselines]
    if candidate.language.compile_only:
        raise UsageError(
            f"a {candidate.language} kernel is only compiled here: it has no reward",
            "evaluate it without --reward",
        )
    if not names:
        raise UsageError(
            f"{op.name} has no baseline of {', '.join(against)}", "add one to its baselines.py"
        )
    each = [dataclasses.replace(settings, baseline=name) for name in names]
    found: dict[str, Evaluation] = {}
    folder = exchange_folder(where)
    if folder is not None:
        judge = ExchangeJudge(folder, settings, ticket)
        jobs = [judge.submit(candidate, one) for one in each]
        found = dict(zip(names, judge.gather(jobs), strict=True))
    else:
        for name, one in zip(names, each, strict=True):
            try:
                with open_judges(where, one, ticket, report) as judges:
                    [found[name]] = judges.evaluate([candidate])
            except MissingError as error:
                if not found:
                    raise
                missing[name] = error.message
            else:
                if not found[name].right:
                    break
    return Rewarded(reward=reward(list(found.values()), missing, against), evaluations=found)
