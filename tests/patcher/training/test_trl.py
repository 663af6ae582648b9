"""Three updates of a tiny model by TRL, whose rewards the judge gives on a CPU.

The model's vocabulary holds whole replies: a right kernel, a wrong one, and prose. So what an
update is to learn can be seen after three of them.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tiny_writer import chance_of, tiny_model, tokenizer

from patcher.bench import Candidate, Language
from patcher.bench.judge import JudgeSettings
from patcher.judges.reward import RewardResult, judge_for_reward
from patcher.training import EnvironmentOptions, KernelEnvironment
from patcher.training.trl import ToolEnvironment, reward_function, rows

OP = "silu_and_mul"
RIGHT = """```python
import torch


def silu_and_mul(gate, up, output):
    output.copy_(torch.nn.functional.silu(gate.float()).mul_(up.float()))
```"""
OPTIONS = EnvironmentOptions(
    language=Language.TORCH, turns=1, against=("eager",), threads=1, pairs=2, points=1
)
REPLIES = ["I cannot.", RIGHT, RIGHT.replace("mul_", "add_")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_three_updates(kind: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'patcher[trl]'")
    from datasets import Dataset

    environment = KernelEnvironment(OPTIONS)
    model = tiny_model(len(REPLIES))
    before = chance_of(model, 1)
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=16,
        num_generations=16,
        max_completion_length=1,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        beta=0.0,  # else a reference model is loaded by its name
        use_cpu=True,
        bf16=False,
        seed=3,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows(environment, [OP]) * 8),
        processing_class=tokenizer(REPLIES),
        reward_funcs=reward_function(environment),
    )
    trainer.train()
    logged = [each["reward"] for each in trainer.state.log_history if "reward" in each]
    assert len(logged) == 3
    assert -1.0 < logged[0] <= 3.0, "no reply was right, so that nothing could be learned"
    assert chance_of(trainer.model.cpu(), 1) > before


@pytest.mark.slow
def test_three_updates_with_a_tool(tmp_path: Path) -> None:
    """Qwen's chat template; one word of the vocabulary is a whole call of the tool."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'patcher[trl]'")
    from datasets import Dataset
    from trl.chat_template_utils import qwen3_chat_template

    call = json.dumps({"name": "submit_kernel", "arguments": {"source": RIGHT}})
    words = ["<|im_start|>", "<|im_end|>", f"<tool_call>\n{call}\n</tool_call>"]
    reader = tokenizer(words)
    reader.add_special_tokens({"eos_token": words[1], "additional_special_tokens": [words[0]]})
    reader.add_tokens([words[2]])
    reader.chat_template = qwen3_chat_template
    verdicts: dict[str, RewardResult] = {}

    def judge(candidate: Candidate, settings: JudgeSettings) -> RewardResult:
        if candidate.digest not in verdicts:
            where = ("local", candidate, settings, "test", lambda *_: None, ("eager",))
            verdicts[candidate.digest] = judge_for_reward(*where)
        return verdicts[candidate.digest]

    model = tiny_model(len(words))
    model.generation_config.eos_token_id = reader.eos_token_id
    before = chance_of(model, 2)
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=16,
            num_generations=16,
            max_completion_length=12,
            max_tool_calling_iterations=1,
            learning_rate=0.02,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            seed=3,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": "A kernel, please."}], "op": OP}] * 8
        ),
        processing_class=reader,
        environment_factory=partial(ToolEnvironment, OPTIONS, judge),
    )
    trainer.train()
    logged = [each for each in trainer.state.log_history if "reward" in each]
    assert len(logged) == 3
    assert len(verdicts) == 1
    assert logged[0]["tools/call_frequency"] > 0
    assert logged[0]["tools/failure_frequency"] == 0
    assert -1.0 < logged[0]["reward"] <= 2.0
    assert chance_of(trainer.model.cpu(), 2) > before
