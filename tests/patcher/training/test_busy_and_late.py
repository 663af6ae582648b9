"""A training on a machine that is busy at times, and what a time limit ends and keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from busy_worker import ALWAYS, SLOW
from command_line import ROOT
from training_sample import OP, OPTIONS, RIGHT, WRONG, evaluation, judged, reply
from typer.testing import CliRunner

from patcher.bench import BudgetError, BusyError, Language, UsageError, load_ops
from patcher.cli import app
from patcher.training import KernelEnvironment
from patcher.training.examples import Example, collect_examples
from patcher.training.folder import Deadline, open_training, read_metrics
from patcher.training.line_file import LineFile
from patcher.training.replies import JudgedReply, SampledReply, judged_reply
from patcher.training.reply_judges import AskedReply, ReplyJudges, Told

ASKED = [AskedReply(OP, reply(WRONG)), AskedReply(OP, reply(f"{RIGHT}# {ALWAYS}\n"))]


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    left = tmp_path / "busy"
    left.write_text("0")
    monkeypatch.setenv("BUSY", str(left))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")
    monkeypatch.setattr("patcher.training.reply_judges.BUSY_WAITS_S", (0.0, 0.0))
    return left


def nothing(*_: Any) -> None:
    """Tells nobody."""


def test_a_busy_machine_is_asked_again(busy: Path, tmp_path: Path) -> None:
    busy.write_text("2")
    store = tmp_path / "verdicts.jsonl"
    with ReplyJudges(OPTIONS, 1, store, "busy_worker") as judges:
        [found] = judges.judge(ASKED[:1])
    assert found.outcome == "mismatch"
    assert len(store.read_text().splitlines()) == 1


def test_a_machine_that_stays_busy_has_no_verdict(busy: Path, tmp_path: Path) -> None:
    """The others' are kept, and a made-up reward is none."""
    store = tmp_path / "verdicts.jsonl"
    with ReplyJudges(OPTIONS, 1, store, "busy_worker") as judges:
        wrong, none = judges.judge_most(ASKED, nothing, Deadline(None))
        with pytest.raises(BusyError, match="too busy to time it"):
            judges.judge(ASKED)
    assert isinstance(wrong, JudgedReply)
    assert isinstance(none, BusyError)
    assert len(store.read_text().splitlines()) == 1


def test_what_the_time_limit_leaves_no_time_for_is_not_waited_for(busy: Path) -> None:
    busy.write_text("9")
    deadline = Deadline(0)
    with ReplyJudges(OPTIONS, 1, module="busy_worker") as judges:
        [found] = judges.judge_most(ASKED[:1], nothing, deadline)
    assert isinstance(found, BusyError)
    assert busy.read_text() == "8"
    assert deadline.hit


class BusyJudges:
    """Has time for the replies of which `keep(update, number)` says so."""

    def __init__(self, keep: Callable[[int, int], bool]) -> None:
        self._keep, self._update = keep, 0
        environment = KernelEnvironment(OPTIONS, lambda *_: judged(evaluation("eager", 2.0)))
        environment.begin(OP)
        self._right = judged_reply(environment.step(reply(RIGHT)))
        environment.begin(OP)
        self._wrong = judged_reply(environment.step("none"))

    def judge_most(
        self, asked: Sequence[AskedReply], told: Told, deadline: Deadline
    ) -> list[JudgedReply | BusyError]:
        self._update += 1
        return [
            (self._right if each.reply in "ab" else self._wrong).model_copy(update={"op": each.op})
            if self._keep(self._update, number)
            else BusyError("this machine is too busy")
            for number, each in enumerate(asked)
        ]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_busy_machine_does_not_end_a_training(
    method: Literal["grpo", "rloo"], tmp_path: Path
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'patcher[trl]'")
    import torch
    from safetensors.torch import load_file
    from tiny_writer import write_model

    from patcher.training.curve import draw_training
    from patcher.training.reinforce import ReinforceOptions, reinforce
    from patcher.training.weights import LoraOptions, load_model, seeded

    options = ReinforceOptions(
        model="m",
        language="torch",
        ops=("one", "two"),
        method=method,
        updates=3,
        replies_per_task=4,
        batch=4,
        reply_tokens=1,
        learning_rate=0.05,
        save_every=1,
    )
    model = write_model(tmp_path / "model", list("abcd"))
    prompts = {name: f"write {name}" for name in options.ops}

    def weights(update: int) -> dict[str, torch.Tensor]:
        at = tmp_path / "rl" / "checkpoints" / f"checkpoint-{update}"
        return load_file(at / "adapter_model.safetensors")

    # none of the first update; of the second, one task; of the third, all but one reply
    judges: Any = BusyJudges(lambda update, number: number >= 4 * (3 - update) and number != 0)
    with open_training(tmp_path / "rl", "reinforce", options) as folder:
        for updates in (1, 3):
            with seeded(0):
                loaded = load_model(str(model), lora=LoraOptions())
            some = options.model_copy(update={"updates": updates})
            reinforce(folder, some, loaded, judges, prompts, Deadline(None), nothing)
            learned = weights(updates)
            # what nobody judged taught nothing
            taught = any(each.any() for name, each in learned.items() if "lora_B" in name)
            assert taught == (updates == 3)
        samples = folder.samples.read()
    lines = read_metrics(tmp_path / "rl")
    assert [each.replies for each in lines] == [8, 8, 8]
    assert [each.unjudged for each in lines] == [8, 4, 1]
    assert [each.skipped_tasks for each in lines] == [2, 1, 0]
    assert lines[0].reward is None
    assert lines[0].shares == {}
    assert [each.number for each in samples] == [2] * 4 + [3] * 7
    for update in (2, 3):
        values = [each.judged.reward.value for each in samples if each.number == update]
        assert lines[update - 1].reward == pytest.approx(sum(values) / len(values))
    assert draw_training(tmp_path / "rl", [])


def test_a_time_limit_ends_judging_between_replies_and_keeps_verdicts(
    busy: Path, tmp_path: Path
) -> None:
    store = tmp_path / "verdicts.jsonl"
    slow = AskedReply(OP, reply(f"{RIGHT}# {SLOW}\n"))
    with ReplyJudges(OPTIONS, 1, store, "busy_worker") as judges:
        judges.judge([AskedReply("linear", "the process starts")])
        deadline = Deadline(5 / 60)
        with pytest.raises(BudgetError, match="after 1 of 2 replies were judged"):
            judges.judge([AskedReply(OP, "no source"), slow], nothing, deadline)
    assert deadline.hit
    with ReplyJudges(OPTIONS, 1, store, "no_worker") as judges:  # so that nothing can be judged
        judges.judge([AskedReply(OP, "no source"), AskedReply("linear", "the process starts")])
        with pytest.raises(RuntimeError, match="does not start"):
            judges.judge([slow])


def test_an_evaluation_stops_between_replies(busy: Path, tmp_path: Path) -> None:
    """Within its only group of replies; it goes on with the verdicts that it has."""
    pytest.importorskip("transformers")
    from tiny_writer import write_model

    from patcher.training.evaluate import EvaluateOptions, sample_tasks
    from patcher.training.weights import load_model

    late = reply(f"{WRONG}# {SLOW}\n")
    loaded = load_model(str(write_model(tmp_path / "model", ["I cannot.", late])))
    options = EvaluateOptions(model="m", language="torch", ops=(OP,), samples=8, reply_tokens=1)
    store = tmp_path / "ev" / "verdicts.jsonl"

    def evaluated(judges: Any, deadline: Deadline) -> list[SampledReply]:
        with open_training(tmp_path / "ev", "evaluate", options) as folder:
            return sample_tasks(folder, options, loaded, judges, {OP: "?"}, deadline, nothing)

    with open_training(tmp_path / "ev", "evaluate", options):
        pass
    with ReplyJudges(OPTIONS, 2, store, "busy_worker") as judges:
        judges.judge([AskedReply(op, "the processes start") for op in ("linear", "rms_norm")])
        before = store.read_text()
        with pytest.raises(BudgetError, match="are saved"):
            evaluated(judges, Deadline(5 / 60))
    assert len(store.read_text().splitlines()) == len(before.splitlines()) + 1
    before = store.read_text()
    with ReplyJudges(OPTIONS, 1, store) as judges:
        found = evaluated(judges, Deadline(None))
    assert {each.reply for each in found} >= {"I cannot.", late}
    assert len(found) == 8
    assert store.read_text().startswith(before)


def test_a_time_limit_covers_the_examples_of_a_warm_up(tmp_path: Path) -> None:
    """What was judged before it is taken up by the next call."""
    words = ["train", "warm-up", str(tmp_path / "warm"), "--model", "m", "--from", "solutions"]
    words += ["--language", "cpp", "--op", OP, "--pairs", "2", "--judges", "1", "--collect-only"]
    late = CliRunner().invoke(app, [*words, "--minutes", "0"])
    assert isinstance(late.exception, BudgetError)
    assert late.exception.hint == "give the same command again"
    assert not (tmp_path / "warm" / "examples.jsonl").exists()
    whole = CliRunner().invoke(app, words)
    assert whole.exception is None
    examples = LineFile(tmp_path / "warm" / "examples.jsonl", Example).read()
    assert {each.op for each in examples} == {OP}
    verdicts = (tmp_path / "warm" / "verdicts.jsonl").read_text()
    (tmp_path / "warm" / "examples.jsonl").unlink()
    again = CliRunner().invoke(app, [*words, "--minutes", "0"])
    assert again.exception is None, "all of it is judged already"
    assert (tmp_path / "warm" / "verdicts.jsonl").read_text() == verdicts


class TakesAll:
    """Judges nothing: every reply is right. Says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[AskedReply] = []

    def judge(self, asked: Sequence[AskedReply], *_: Any) -> list[JudgedReply]:
        self.asked = list(asked)
        environment = KernelEnvironment(OPTIONS, lambda *_: judged(evaluation("eager", 2.0)))
        environment.begin(OP)
        right = judged_reply(environment.step(reply(RIGHT)))
        digests = [f"{number:064}" for number in range(len(asked))]
        return [
            right.model_copy(update={"op": each.op, "digest": digest})
            for each, digest in zip(asked, digests, strict=True)
        ]


def test_solutions_are_of_the_ops_and_of_the_device_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(language: Language, ops: Sequence[str] | None) -> set[str]:
        judges: Any = TakesAll()
        options = replace(OPTIONS, language=language)
        file = tmp_path / "examples.jsonl"
        collect_examples(["solutions"], options, judges, file, nothing, Deadline(None), ops)
        assert {each.op for each in LineFile(file, Example).read()} == {
            each.op for each in judges.asked
        }
        return {each.op for each in judges.asked}

    whole = taken(Language.CPP, None)
    assert len(whole) > 2
    assert taken(Language.CPP, [OP, "rms_norm"]) == {OP, "rms_norm"}
    with pytest.raises(UsageError, match="no right cpp kernel among 0 replies"):
        taken(Language.CPP, ["nothing"])
    shipped = [info for op in load_ops().values() for info, _ in op.solutions()]
    assert {each.device for each in shipped if each.language is Language.TORCH} == {"cpu"}
    monkeypatch.setattr("patcher.training.examples.judge_device_kind", lambda *_: "cuda")
    with pytest.raises(UsageError, match="no right torch kernel among 0 replies"):
        taken(Language.TORCH, None)
