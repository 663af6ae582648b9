"""A training on a machine that is busy at times, and what a time limit ends and keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from busy_worker import ALWAYS
from command_line import ROOT
from training_sample import OP, OPTIONS, RIGHT, WRONG, evaluation, judged, reply

from patcher.bench import BusyError
from patcher.training import KernelEnvironment
from patcher.training.folder import Deadline, open_training, read_metrics
from patcher.training.replies import JudgedReply, judged_reply
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
