"""The parts of `patcher train` one by one: judges that die, choices, evaluations, pictures."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT
from dying_worker import POISON
from training_sample import OP, OPTIONS, RIGHT, evaluation, judged, reply
from typer.testing import CliRunner

from patcher.bench import (
    Candidate,
    Language,
    MissingError,
    Outcome,
    UsageError,
    VerificationError,
    load_op,
)
from patcher.bench.judge import JudgeSettings
from patcher.bench.stats.shares import grouped_share, paired_difference, wilson
from patcher.cli import app
from patcher.commands.train_options import JudgeGroup, ModelGroup, TaskGroup
from patcher.judges.jobs import post
from patcher.report.curves import moving_means
from patcher.tasks.records import Task
from patcher.training import KernelEnvironment
from patcher.training.choice import choose_ops, in_rounds
from patcher.training.evaluate import EvaluateOptions, compared, sample_tasks, summarise
from patcher.training.examples import Example, collect_examples
from patcher.training.folder import Deadline, TrainingFolder, UpdateMetrics, open_training
from patcher.training.line_file import LineFile
from patcher.training.replies import JudgedReply, SampledReply, judged_reply
from patcher.training.reply_judges import AskedReply, ReplyJudges


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    left = tmp_path / "dies"
    monkeypatch.setenv("DIES", str(left))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")
    return left


def test_a_training_asks_for_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TRL found two, it would split the batch, and end in a traceback."""
    updates = pytest.importorskip("patcher.training.updates", reason="transformers are missing")
    folder = TrainingFolder(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert updates.shared_arguments(folder, 3, 1e-5, 0, 1)["bf16"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UsageError) as refused:
        updates.shared_arguments(folder, 3, 1e-5, 0, 1)
    assert refused.value.hint == "show it one: CUDA_VISIBLE_DEVICES=0"
    # before anything is judged or loaded
    out = tmp_path / "out"
    early = CliRunner().invoke(
        app, ["train", "warm-up", str(out), "--model", "m", "--from", "solutions"]
    )
    assert isinstance(early.exception, UsageError)
    assert early.exception.hint == refused.value.hint
    assert not out.exists()


def test_a_judge_that_died_is_replaced(dying: Path, tmp_path: Path) -> None:
    dying.write_text("1")
    store = tmp_path / "verdicts.jsonl"
    with ReplyJudges(OPTIONS, 1, store, "dying_worker") as judges:
        poison = AskedReply(OP, reply(f"{RIGHT}# {POISON}\n"))
        found = judges.judge([AskedReply(OP, "no source"), poison])
    assert [each.lost for each in found] == [False, True]
    assert [each.outcome for each in found] == [Outcome.GENERATION_FAILURE, Outcome.RUNTIME_ERROR]
    assert [each.reward.value for each in found] == [-1.0, -1.0]
    assert not found[1].compiled
    # what is lost is no verdict, and another process may fare better
    assert len(store.read_text().splitlines()) == 1


def test_a_judge_that_always_dies_is_an_error(dying: Path) -> None:
    dying.write_text("99")
    asked = [AskedReply(OP, "one"), AskedReply(OP, reply(RIGHT))]
    with (
        ReplyJudges(OPTIONS, 1, module="dying_worker") as judges,
        pytest.raises(MissingError, match="died on each of 2 replies"),
    ):
        judges.judge(asked)


def test_an_error_of_the_judge_is_raised_as_it_is() -> None:
    with (
        ReplyJudges(replace(OPTIONS, against=("nothing",)), 1) as judges,
        pytest.raises(UsageError, match="has no baseline"),
    ):
        judges.judge([AskedReply(OP, reply(RIGHT))])


def test_a_remote_judge_takes_the_name_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def judge(where: str, candidate: Candidate, settings: JudgeSettings, name: str, *_: Any) -> Any:
        taken.append(post(load_op(OP), candidate, settings, name, False).name)
        return judged(evaluation("eager", 2.0))

    monkeypatch.setattr("patcher.training.environment.judge_for_reward", judge)
    environment = KernelEnvironment(OPTIONS)
    environment.begin(OP)
    assert environment.step(reply(RIGHT)).reward.value == 2.0
    assert len(taken) == 1


def turn(low: float | None, trick: bool = False) -> JudgedReply:
    """A judged reply: faster, slower, caught, or (None) without a source."""
    found = evaluation("eager", low or 1.0)
    if trick:
        found = found.model_copy(update={"outcome": Outcome.GUARD_VIOLATION, "timings": ()})
    environment = KernelEnvironment(OPTIONS, lambda *_: judged(found))
    environment.begin(OP)
    return judged_reply(environment.step("none" if low is None else reply(RIGHT)))


@pytest.mark.parametrize(
    ("judged_", "expected"),
    [
        (turn(2.0), (True, True, True, False)),
        (turn(0.5), (True, True, False, False)),
        (turn(2.0, trick=True), (True, False, False, True)),
        (turn(None), (False, False, False, False)),
    ],
)
def test_what_a_judged_reply_counts_as(judged_: JudgedReply, expected: tuple[bool, ...]) -> None:
    assert tuple(judged_.flags().values()) == expected


def test_lines_survive_a_kill_and_refuse_what_is_none(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "metrics.jsonl", UpdateMetrics)
    one, two = (UpdateMetrics(update=n, tokens=n, training_s=0) for n in (1, 2))
    lines.append([one])
    with lines.path.open("a") as file:
        file.write('{"update": 2')
    assert lines.read() == [one]
    lines.append([two])
    assert lines.read() == [one, two]
    assert lines.keep(lambda each: each.update < 2) == [one]
    assert lines.read() == [one]
    lines.path.write_text("{}\n")
    with pytest.raises(VerificationError, match="UpdateMetrics"):
        lines.read()


def test_every_op_comes_as_often_and_a_longer_list_begins_alike() -> None:
    ops = ["a", "b", "c"]
    drawn = in_rounds(ops, 12, seed=1)
    assert all(sorted(drawn[at : at + 3]) == ops for at in range(0, 12, 3))
    assert drawn[:7] == in_rounds(ops, 7, seed=1)
    assert drawn != in_rounds(ops, 12, seed=2)


def made_task(name: str, operators: int) -> Task:
    return Task(
        op=name,
        problem=f"{name}.py",
        split="train",
        size_class="decode",
        layout="rows",
        precision="fp32",
        operators=("relu",) * operators,
        shapes=((4, 8),),
        structure="0" * 64,
    )


def test_ops_come_from_tasks_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_OPS", "")  # set by what is called
    assert choose_ops(None, [OP], "train") == (OP,)
    for tasks, names in ((None, []), (tmp_path, [OP])):
        with pytest.raises(UsageError, match="not said"):
            choose_ops(tasks, names, "train")
    with pytest.raises(UsageError, match="no operators to count"):
        TaskGroup(op=[OP], most_operators=2).chosen("train")
    tasks = [made_task(f"task_{count}", count) for count in (1, 2, 4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(each.model_dump_json() for each in tasks))
    assert choose_ops(tmp_path, [], "train") == ("task_1", "task_2", "task_4")
    assert TaskGroup(tasks=tmp_path, most_operators=2).chosen("train") == ("task_1", "task_2")
    (tmp_path / "tasks.jsonl").write_text(tasks[2].model_dump_json())
    with pytest.raises(UsageError, match="no train task of at most 3 operators"):
        TaskGroup(tasks=tmp_path, most_operators=3).chosen("train")
    (tmp_path / "tasks.jsonl").write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        choose_ops(tmp_path, [], "train")


def test_a_baseline_counts_once() -> None:
    named = JudgeGroup(baseline=["torch.compile", "eager", "eager"])
    assert named.against() == ("eager", "torch.compile")
    with pytest.raises(UsageError, match="unknown baseline 'egaer'"):
        JudgeGroup(baseline=["egaer"]).against()


def test_a_folder_is_one_training(tmp_path: Path) -> None:
    options = EvaluateOptions(model="m", language="torch", ops=(OP,))
    with (
        open_training(tmp_path / "a", "evaluate", options),
        pytest.raises(UsageError, match="another process"),
        open_training(tmp_path / "a", "evaluate", options),
    ):
        pass
    other = options.model_copy(update={"judging": "-1"})
    with (
        pytest.raises(UsageError, match="is '-1'"),
        open_training(tmp_path / "a", "evaluate", other),
    ):
        pass
    with (
        pytest.raises(UsageError, match="another kind"),
        open_training(tmp_path / "a", "warm-up", options),
    ):
        pass
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with (
        pytest.raises(UsageError, match="not empty"),
        open_training(tmp_path / "b", "evaluate", options),
    ):
        pass


def test_an_adapter_is_the_same_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training goes on where it and the adapter that it began with were carried to."""
    adapter = tmp_path / "one" / "warm" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")

    def begin(place: str) -> None:
        monkeypatch.chdir(tmp_path / place)
        digest = ModelGroup(model="m", adapter=Path("warm")).adapter_digest()
        options = EvaluateOptions(model="m", adapter=digest, language="torch", ops=(OP,))
        with open_training(Path("ev"), "evaluate", options):
            pass

    begin("one")
    assert str(tmp_path) not in Path("ev/training.json").read_text()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    begin("two")
    (tmp_path / "two" / "warm" / "adapter" / "adapter_model.safetensors").write_bytes(b"others")
    with pytest.raises(UsageError, match="other options: --adapter is another one: its content"):
        begin("two")
    shutil.rmtree(tmp_path / "two" / "warm")
    with pytest.raises(UsageError, match="holds no adapter"):
        begin("two")


class JudgesDouble:
    """Says that every reply of a letter is right; stops where it is told to."""

    def __init__(self, most: int = 99) -> None:
        self._most = most

    def judge(self, asked: Sequence[AskedReply], *_: Any) -> list[JudgedReply]:
        if self._most == 0:
            raise KeyboardInterrupt
        self._most -= 1
        right, wrong = turn(2.0), turn(None)
        return [
            (right if each.reply in "ab" else wrong).model_copy(update={"op": each.op})
            for each in asked
        ]


def test_a_killed_evaluation_draws_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tiny_writer import write_model

    from patcher.training.weights import load_model

    loaded = load_model(str(write_model(tmp_path / "model", list("abcd"))))
    prompts = {name: f"write {name}" for name in ("one", "two", "three", "four", "five")}
    options = EvaluateOptions(
        model="m", language="torch", ops=tuple(prompts), samples=3, batch=6, reply_tokens=2
    )

    def sampled(folder: Path, judges: Any, deadline: Deadline) -> list[SampledReply]:
        with open_training(folder, "evaluate", options) as opened:
            return sample_tasks(opened, options, loaded, judges, prompts, deadline, lambda *_: None)

    whole = sampled(tmp_path / "whole", JudgesDouble(), Deadline(None))
    with pytest.raises(KeyboardInterrupt):
        sampled(tmp_path / "killed", JudgesDouble(most=1), Deadline(None))
    file = TrainingFolder(tmp_path / "killed").samples
    kept = file.read()
    assert len(kept) == 6
    file.keep(lambda each: (each.judged.op, each.number) != ("two", 2))  # a kill may leave that
    again = sampled(tmp_path / "killed", JudgesDouble(), Deadline(None))
    assert sorted(map(repr, again)) == sorted(map(repr, whole))
    assert len({each.reply for each in whole}) > 1
    found = summarise(options, again)
    assert found.shares == summarise(options, whole).shares
    itself = compared(found, found, "itself").differences["right"]
    assert itself.value == 0
    assert itself.low < 0 < itself.high
    # more samples find a right one more often
    for name, value in (("tasks", ("one",)), ("samples", 4), ("against", ("torch.compile",))):
        with pytest.raises(UsageError, match="has other"):
            compared(found, found.model_copy(update={name: value}), "other")


def test_shares_have_intervals_that_groups_widen() -> None:
    low, high = wilson(0.0, 30)
    assert low == 0
    assert high == pytest.approx(0.1135, abs=1e-3)  # 3.84 / (30 + 3.84)
    alike = grouped_share([[True] * 4, [False] * 4] * 15)
    mixed = grouped_share([[True, False, True, False]] * 29 + [[True, True, False, True]])
    assert alike.high - alike.low > 1.8 * (mixed.high - mixed.low)
    none = grouped_share([[False] * 4] * 30)
    assert (none.low, none.high) == (0.0, pytest.approx(high))


def test_a_difference_is_of_pairs() -> None:
    early = [[False], [False], [True], [False], [True], [False]]
    late = [[True], [True], [True], [False], [True], [True]]
    found = paired_difference(early, late)
    assert found.value == 0.5
    assert found.low < 0.5 < found.high
    assert found.low == pytest.approx(0.5 - 2.571 * 0.5477 / 6**0.5, abs=1e-3)
    same = paired_difference([[False]] * 10, [[False]] * 10)
    assert same.low == pytest.approx(-same.high)
    assert same.high == pytest.approx(wilson(0, 10)[1])


def test_moving_means_have_an_interval_where_nothing_varies() -> None:
    flat = moving_means([0.0] * 12, shares=True)
    assert flat[-1].high == pytest.approx(wilson(0.0, 10)[1])
    assert flat[0].high > flat[-1].high
    means = moving_means([1.0, 2.0, 3.0])
    assert [each.mean for each in means] == [1.0, 1.5, 2.0]
    assert means[0].low == means[0].high == 1.0
    assert means[2].low < 2.0 < means[2].high


def test_a_recording_gives_right_kernels_and_nothing_else(tmp_path: Path) -> None:
    archive = ROOT / "bench" / "results" / "loop" / "recordings.tar.xz"
    options = replace(OPTIONS, language=Language.CPP)
    file = tmp_path / "examples.jsonl"
    with ReplyJudges(options, 1) as judges:
        found = collect_examples(
            [str(archive)], options, judges, file, lambda *_: None, Deadline(None)
        )
    examples = LineFile(file, Example).read()
    assert 0 < found.examples == len(examples) < found.replies
    assert len({each.digest for each in examples}) == len(examples)
    for each, name in product(examples, ("prompt", "reply")):
        assert getattr(each, name)
    assert all(each.source.endswith("/replies.jsonl") for each in examples)
    with pytest.raises(UsageError, match="no source of examples"):
        collect_examples([str(tmp_path)], options, judges, file, lambda *_: None, Deadline(None))
