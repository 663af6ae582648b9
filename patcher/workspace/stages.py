"""The three commands of a workspace: each asks the judge and writes down what it said."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath

from patcher.bench import SCHEMA_VERSION, Candidate, Evaluation, Outcome, Record, load_op
from patcher.bench.judge import JudgeSettings, Progress
from patcher.bench.toolchains import build
from patcher.judges import open_judges
from patcher.judges.reward import Reward, judge_for_reward, reward
from patcher.workspace.layout import OpenWorkspace
from patcher.workspace.ledger import LedgerSummary, Line, Stage, now

TRIED = "tried"
_NOT_BUILT = (Outcome.GENERATION_FAILURE, Outcome.COMPILATION_FAILURE)


class WorkspaceTry(Record):
    """What one command found."""

    schema_version: int = SCHEMA_VERSION
    line: Line
    log: str = ""
    """Of the compiler."""
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def good(self) -> bool:
        """By its stage: it built; it is right; it is over 5 % faster than eager."""
        worth = self.line.reward
        least = {"compile": 0, "verify": 1, "profile": 2}[self.line.stage]
        return self.line.built if worth is None else worth.value >= least


def attempt(opened: OpenWorkspace, stage: Stage, report: Progress) -> WorkspaceTry:
    """Judge the candidate as it is now and add a line to the results.

    Raises:
        PatcherError: as the judge's; nothing is added then.
    """
    opened.ledger.lines()  # what was edited is found before the work, not after
    candidate = opened.candidate()
    evaluations, log, worth = _found(opened, candidate, stage, report)
    file = PurePath(TRIED, f"{candidate.digest[:16]}{PurePath(candidate.file_name).suffix}")
    kept = opened.folder / file
    kept.parent.mkdir(exist_ok=True)
    kept.unlink(missing_ok=True)
    kept.write_bytes(candidate.source.encode())  # as text, line ends could change, and the digest
    kept.chmod(0o444)
    line = opened.ledger.append(
        lambda seq, prev: Line(
            seq=seq,
            time=now(),
            stage=stage,
            op=candidate.op,
            language=candidate.language,
            digest=candidate.digest,
            file=str(file),
            built=not any(each.outcome in _NOT_BUILT for each in evaluations),
            evaluations=tuple(LedgerSummary.of(each, stage == "profile") for each in evaluations),
            reward=worth,
            prev=prev,
        )
    )
    return WorkspaceTry(line=line, log=log, evaluations=evaluations)


def _found(
    opened: OpenWorkspace, candidate: Candidate, stage: Stage, report: Progress
) -> tuple[tuple[Evaluation, ...], str, Reward | None]:
    workspace = opened.workspace
    settings = JudgeSettings(
        device=workspace.device,
        sweep=workspace.sweep,
        threads=workspace.threads,
        policy=workspace.policy,
    )
    if stage == "profile":
        judged = judge_for_reward(workspace.judge, candidate, settings, workspace.id, report)
        return tuple(judged.evaluations.values()), "", judged.reward
    if stage == "verify":
        # every case of correctness, hardly any timing
        quick = dataclasses.replace(settings, baseline="honest", pairs=3, precision_pct=100.0)
        with open_judges(workspace.judge, quick, workspace.id, report) as judges:
            [evaluation] = judges.evaluate([candidate])
        return (evaluation,), "", reward([evaluation], against=())
    report("build", 0, 1)
    built = build(candidate, load_op(candidate.op).contract)
    if built.ok:
        return (), built.log, None
    failed = Evaluation(
        op=candidate.op,
        language=candidate.language,
        digest=candidate.digest,
        outcome=Outcome.COMPILATION_FAILURE,
        log=built.log,
    )
    return (failed,), built.log, reward([failed])
