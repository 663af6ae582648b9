"""The task score where each arm is a process: real ones in transformers, on the CPU."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cloze_sample import KNOWN, trained, workload_of

from patcher.ab import arm_protocol as say
from patcher.ab.block_folder import BlockFolder, BlocksQuality
from patcher.ab.job import ABJob
from patcher.ab.launcher import ArmLauncher
from patcher.ab.quality_check import QUESTIONS, QualityCheck
from patcher.bench import VerificationError
from patcher.bench.ab import cloze
from patcher.bench.ab.logits import served_logits
from patcher.bench.engines import open_engine


def job_of(folder: Path) -> ABJob:
    return ABJob(workload=workload_of(folder), process_pairs=3, quality_steps=4)


def test_a_process_answers_as_the_same_engine_does_here(tmp_path: Path) -> None:
    trained(tmp_path)
    job = job_of(tmp_path)
    check = QualityCheck(ArmLauncher(job, {}))
    with check.launcher.launch("baseline", {}, 0.4) as process:
        tokens = check.greedy(process)
        served = check.served(process, tokens)
    assert served.answers is not None
    asked = cloze.questions(job.workload)
    assert not isinstance(asked, str)
    engine: Any = open_engine(job.workload)
    here = cloze.answers(partial(served_logits, engine), asked, job.workload.batch)
    assert torch.allclose(served.answers, here, atol=1e-4)

    kept = BlockFolder(tmp_path / "blocks")
    kept.write_served("baseline", served)
    read = kept.served("baseline")
    assert read.answers is not None
    assert torch.equal(read.answers, served.answers)
    assert torch.equal(read.logits, served.logits)
    found, _ = check.quality([], read, (read, read), tokens)
    kept.quality(lambda: BlocksQuality(routing_entropy_pct=None))
    with pytest.raises(VerificationError, match="damaged"):
        kept.served("baseline")
    assert found.passed, found.reason
    assert found.task is not None
    assert found.task.items == len(cloze.items())
    assert found.task.baseline_pct >= 100 * KNOWN / found.task.items
    assert found.task_refusal is None

    wrong = served._replace(answers=served.answers.flip(1))
    lost, _ = check.quality([], wrong, (served, served), tokens)
    assert not lost.passed
    assert lost.task is not None
    assert lost.task.worse >= 5
    assert "cloze items right" in lost.reason
    with pytest.raises(VerificationError, match="no answers to the task"):
        check.quality([], served._replace(answers=None), (served, served), tokens)


def test_likelihoods_that_are_not_finite_pass_the_pipe(tmp_path: Path) -> None:
    trained(tmp_path)
    check = QualityCheck(ArmLauncher(job_of(tmp_path), {}))
    reply = say.Answered(likelihoods=[[-1.0, None]]).model_dump_json()
    process: Any = SimpleNamespace(ask=lambda *_: say.REPLY.validate_json(reply))
    found = check.answers(process)
    assert found is not None
    assert len(found) == len(cloze.items()) // QUESTIONS, "a row of each reply"
    assert found[0, 0] == -1
    assert math.isnan(found[0, 1])


def test_without_a_tokenizer_there_is_no_task(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check = QualityCheck(ArmLauncher(job_of(tmp_path), {}))
    assert "no tokenizer" in str(check.questions)
    assert check.answers(SimpleNamespace()) is None  # type: ignore[arg-type]
