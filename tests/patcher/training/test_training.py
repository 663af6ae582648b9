"""The loop as an environment, rewards as data, and TRL's trainer with the judge as its reward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from agent_sample import OP, code, verdict
from command_line import error_of, patcher

from patcher.bench import (
    Candidate,
    Language,
    Outcome,
    UsageError,
    WaitingError,
    load_op,
)
from patcher.judges.reward import AGAINST, RewardResult, reward
from patcher.runs.run import Run
from patcher.training import (
    LOG_SPEEDUP,
    MILESTONES,
    KernelEnvironment,
    RewardFunction,
    RewardScheme,
    environment,
    questions,
    reward_scheme,
    trainers,
    verl,
)

Verdict = float | Outcome


class Judging:
    """Verdicts by the marker in a source: against each baseline of the scheme, or the strongest."""

    def __init__(self, verdicts: dict[str, tuple[Verdict, ...]]) -> None:
        self.verdicts, self.seen = verdicts, list[str]()
        self.waits = False

    def __call__(self, candidate: Candidate, scheme: RewardScheme, *_: Any) -> RewardResult:
        if self.waits:
            raise WaitingError("the judge is elsewhere", "start a worker")
        marker = candidate.source.rsplit("// ", 1)[-1].strip()
        self.seen.append(marker)
        names = scheme.against or ("eager",)
        found = {
            name: verdict(candidate, said).model_copy(update={"baseline": name})
            for name, said in zip(names, self.verdicts[marker], strict=False)
        }
        return RewardResult(
            reward=reward(list(found.values()), against=scheme.against), evaluations=found
        )


VERDICTS: dict[str, tuple[Verdict, ...]] = {
    "typo": (Outcome.COMPILATION_FAILURE,),
    "trick": (Outcome.GUARD_VIOLATION,),
    "slow": (0.5, 0.5),
    "fast": (3.0, 0.9),
    "faster": (4.0, 2.0),
}


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> Judging:
    made = Judging(VERDICTS)
    for module in (environment, trainers):
        monkeypatch.setattr(module, "judged", made)
    return made


def test_an_episode_is_the_loop_with_the_policy_as_its_model(
    judging: Judging, tmp_path: Path
) -> None:
    env = KernelEnvironment(OP, folder=tmp_path, turns=4)
    system, asked = env.reset()
    assert (system.role, asked.role) == ("system", "user")
    assert OP in asked.content
    turn = env.step(code("typo"))
    assert (turn.reward, turn.outcome, turn.done) == (-1.0, "compilation_failure", False)
    assert "expected ';' before '}' token" in turn.question[1].content
    turn = env.step("I would rather not.")
    assert (turn.reward, turn.outcome) == (MILESTONES.unreadable, "generation_failure")
    assert turn.digest is None
    turn = env.step(code("fast"))
    # faster than eager, not than torch.compile, which the feedback is of
    assert (turn.reward, turn.outcome) == (2.0, "too_slow")
    assert "// fast" in turn.question[1].content
    turn = env.step(code("faster"))
    assert (turn.reward, turn.done, turn.question) == (3.0, True, ())
    assert judging.seen == ["typo", "fast", "faster"]
    with pytest.raises(UsageError, match="no episode is open"):
        env.step(code("fast"))
    # an episode is a run, which can be read as any other
    env.close()
    [folder] = tmp_path.iterdir()
    run = Run.open(folder, read_only=True)
    assert run.config.command == "training"
    assert (folder / f"ops/{OP}/3/candidate.cpp").read_text().rstrip().endswith("// faster")
    assert not list(folder.rglob("analyse*"))
    runs = {"PATCHER_RUNS_DIR": str(tmp_path)}
    assert "finished" in patcher("runs", env=runs, cwd=tmp_path).stdout
    refused = error_of(patcher("resume", folder.name, "--json", env=runs, cwd=tmp_path))
    assert "is an episode of a trainer" in refused["message"]
    assert patcher("report", folder.name, env=runs, cwd=tmp_path).returncode == 0
    assert "// faster" in (folder / "report.md").read_text()
    # and the next one begins anew
    assert env.reset()[1] == asked
    assert env.step(code("fast")).reward == 2.0


def test_a_source_that_came_before_is_not_judged_again(judging: Judging, tmp_path: Path) -> None:
    env = KernelEnvironment(OP, folder=tmp_path, turns=2)
    env.reset()
    first = env.step(code("slow"))
    again = env.step(code("slow"))
    assert first.reward == again.reward == 1.0
    assert first.digest == again.digest
    assert judging.seen == ["slow"]
    env.close()


def test_a_judge_elsewhere_is_waited_for(judging: Judging, tmp_path: Path) -> None:
    env = KernelEnvironment(OP, folder=tmp_path, turns=2)
    env.reset()
    judging.waits = True
    for _ in range(2):
        with pytest.raises(WaitingError, match="elsewhere"):
            env.step(code("fast"))
    judging.waits = False
    assert env.step(code("fast")).reward == 2.0
    assert judging.seen == ["fast"]
    env.close()


@pytest.mark.parametrize(
    ("marker", "milestones", "logarithm"),
    [
        ("typo", -1.0, -1.0),
        ("trick", -1.0, -1.0),
        ("slow", 1.0, 0.5 + math.log(0.5 * 0.98)),
        ("fast", 2.0, 0.5 + math.log(3.0 * 0.98)),
        ("faster", 3.0, 0.5 + math.log(4.0 * 0.98)),
    ],
)
def test_a_scheme_is_data(
    judging: Judging, marker: str, milestones: float, logarithm: float
) -> None:
    source = f"void {OP}() {{}} // {marker}\n"
    candidate = Candidate(op=OP, language=Language.CPP, source=source)
    assert MILESTONES.value(judging(candidate, MILESTONES)) == milestones
    assert LOG_SPEEDUP.value(judging(candidate, LOG_SPEEDUP)) == pytest.approx(logarithm)
    # of an op that takes a tenth of the model's time the whole gains less
    part = LOG_SPEEDUP.model_copy(update={"share": 0.1})
    whole = part.value(judging(candidate, part))
    assert whole == -1.0 if milestones < 0 else abs(whole - 0.5) < abs(logarithm - 0.5)
    caught = MILESTONES.model_copy(update={"caught": -3.0})
    assert caught.value(judging(candidate, caught)) == (-3.0 if marker == "trick" else milestones)


def test_a_scheme_is_read_from_a_file(tmp_path: Path) -> None:
    assert reward_scheme("milestones") is MILESTONES
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"right": 0.1, "faster": [1.0]}))
    mine = reward_scheme(file)
    assert (mine.right, mine.against) == (0.1, AGAINST[:1])
    file.write_text(json.dumps({"right": "much"}))
    with pytest.raises(UsageError, match=r"mine\.json is no reward scheme: right: "):
        reward_scheme(file)
    file.write_text("[]")
    with pytest.raises(UsageError, match=r"the file: "):
        reward_scheme(file)
    with pytest.raises(UsageError, match="no reward scheme best"):
        reward_scheme("best")


def test_a_reward_function_takes_what_trainers_give(judging: Judging) -> None:
    function = RewardFunction(at_once=2)
    replies: list[Any] = [
        code("fast"),
        [{"role": "assistant", "content": code("trick")}],
        "nothing",
        code("fast"),
        code("faster"),
    ]
    found = function(completions=replies, op=[OP] * 5, prompts=["?"] * 5, trainer_state=None)
    assert found == [2.0, -1.0, -1.0, 2.0, 3.0]
    assert sorted(judging.seen) == ["fast", "faster", "trick"]
    assert function(completions=[code("fast")], op=[OP]) == [2.0]
    assert len(judging.seen) == 3
    told = {"too_slow": 3, "correct": 1, "guard_violation": 1, "generation_failure": 1}
    assert function.outcomes == told
    with pytest.raises(UsageError):
        RewardFunction(at_once=0)
    with pytest.raises(UsageError):
        KernelEnvironment(OP, folder=Path(), turns=0)


def test_verl_calls_the_judge_as_its_reward_manager_does(judging: Judging) -> None:
    """verl itself is too large to be installed here: these are the calls of its `naive` manager."""
    verl._function.cache_clear()
    [row] = verl.rows([OP])
    known = {
        "data_source": row["data_source"],
        "ground_truth": row["reward_model"]["ground_truth"],
        "extra_info": {**row["extra_info"], "num_turns": None},
    }
    given = {"scheme": "milestones", "where": "local"}
    found = [
        verl.compute_score(solution_str=reply, **known, **given)
        for reply in (code("fast"), code("trick"), code("typo"), "nothing", code("fast"))
    ]
    assert [one["score"] for one in found] == [2.0, -1.0, -1.0, -1.0, 2.0]
    assert [one["right"] for one in found] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [one["caught"] for one in found] == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert judging.seen == ["fast", "trick", "typo"]
    assert row["prompt"][1]["content"].count(OP)
    with pytest.raises(UsageError, match="no reward scheme best"):
        verl.compute_score(solution_str="", **known, scheme="best")


@pytest.mark.slow
def test_a_real_kernel_is_judged_for_a_trainer() -> None:
    [source] = [
        found.source
        for info, found in load_op("silu_and_mul").solutions()
        if info.language == "cpp"
    ]
    wrong = source.replace("1.0f", "2.0f")
    assert wrong != source
    function = RewardFunction(scheme=LOG_SPEEDUP)
    replies = [f"```cpp\n{one}\n```" for one in (source, wrong)]
    right, failed = function(completions=replies, op=["silu_and_mul"] * 2)
    assert failed == LOG_SPEEDUP.wrong
    assert right >= LOG_SPEEDUP.right + LOG_SPEEDUP.least_log
    assert function.outcomes.total() == 2


def test_trl_trains_a_tiny_model_with_the_judge_as_its_reward(
    judging: Judging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates. The model is random and small, so that its replies hold no kernel; what is
    rewarded in their place is whether a reply begins like one of its own, which it can learn."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    symbols = [chr(number) for number in range(32, 127)]
    known = {symbol: number for number, symbol in enumerate(["<pad>", "<end>", "<unk>", *symbols])}
    tokens = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for one in messages %}{{ one.content[:64] }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(known), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    before = model.lm_head.weight.detach().clone()
    function = RewardFunction()

    def length(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(one[-1]["content"])) for one in completions]

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[function, length],
        train_dataset=Dataset.from_list(questions([OP, "silu_and_mul"])),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=8,
            learning_rate=0.1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
        ),
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "rewards/patcher/mean" in line]
    assert [line["rewards/patcher/mean"] for line in logs] == [MILESTONES.unreadable] * 3
    assert function.outcomes == {"generation_failure": 6}
    assert not before.equal(model.lm_head.weight.detach())
