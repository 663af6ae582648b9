"""Three updates of a tiny model by TRL, whose rewards the judge gives on a CPU.

The model's vocabulary holds whole replies: a right kernel, a wrong one, and prose. So what an
update is to learn can be seen after three of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_writer import chance_of, tiny_model, tokenizer

from patcher.bench import Language
from patcher.training import EnvironmentOptions, KernelEnvironment
from patcher.training.trl import reward_function, rows

OP = "silu_and_mul"
RIGHT = """```python
import torch


def silu_and_mul(gate, up, output):
    output.copy_(torch.nn.functional.silu(gate.float()).mul_(up.float()))
```"""
REPLIES = ["I cannot.", RIGHT, RIGHT.replace("mul_", "add_")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_three_updates(kind: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'patcher[trl]'")
    from datasets import Dataset

    options = EnvironmentOptions(
        language=Language.TORCH, turns=1, against=("eager",), threads=1, pairs=2, points=1
    )
    environment = KernelEnvironment(options)
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
