"""How a training ends: killed, diverged, damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_writer import write_model

from patcher.bench import BudgetError, Language, UsageError
from patcher.training.examples import Example
from patcher.training.folder import Deadline, TrainingFolder, open_training, read_metrics

pytest.importorskip("trl", reason="TRL is not installed: pip install 'patcher[trl]'")


def train(
    model: Path, folder: Path, minutes: float | None = None, updates: int = 3, rate: float = 0.1
) -> None:
    from patcher.training.warm_up import WarmUpOptions, warm_up
    from patcher.training.weights import LoraOptions, load_model, seeded

    options = WarmUpOptions(
        model="m",
        language="torch",
        sources=("s",),
        updates=updates,
        examples_per_update=1,
        batch=1,
        learning_rate=rate,
        save_every=1,
    )
    example = Example(
        prompt="p", reply="a", op="linear", language=Language.TORCH, digest="d", source="s"
    )
    with seeded(0):
        loaded = load_model(str(model), lora=LoraOptions(rank=2))
    with open_training(folder, "warm-up", options) as opened:
        warm_up(opened, options, loaded, [example], Deadline(minutes), lambda *_: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), ["a", "b"])


def test_a_kill_before_the_adapter_leaves_no_older_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "killed"
    with pytest.raises(BudgetError):
        train(model, folder, minutes=0)  # the adapter is of the first update

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingFolder, "save_adapter", killed)
    with pytest.raises(KeyboardInterrupt):
        train(model, folder)
    monkeypatch.undo()
    train(model, folder)
    file = "adapter_model.safetensors"
    newest = folder / "checkpoints" / "checkpoint-3" / file
    assert (folder / "adapter" / file).read_bytes() == newest.read_bytes()
    for half in (newest, newest.parents[1] / "checkpoint-2" / "optimizer.pt"):
        assert TrainingFolder(folder).newest()
        half.write_bytes(half.read_bytes()[:300])
    assert not TrainingFolder(folder).newest()


def test_a_training_that_diverges_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has diverged: loss or adapter of update") as refused:
        train(model, tmp_path / "rl", updates=8, rate=1e30)
    assert "smaller --learning-rate" in refused.value.hint
    assert all(each.loss for each in read_metrics(tmp_path / "rl"))  # none of 0
    assert not (tmp_path / "rl" / "adapter").exists()


def test_a_damaged_model_or_adapter_is_said(model: Path, tmp_path: Path) -> None:
    from patcher.training.weights import load_model

    train(model, tmp_path / "fine", updates=1)
    whole, bad = tmp_path / "fine" / "adapter", tmp_path / "model"
    shutil.copytree(model, bad)
    for file, name in ((bad / "config.json", "hidden_size"), (whole / "adapter_config.json", "r")):
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: 6}))
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot load the model"):
            load_model(str(bad))
        with pytest.raises(UsageError, match="cannot load the adapter"):
            load_model(str(model), whole)
        for file in (bad / "model.safetensors", whole / "adapter_model.safetensors"):
            file.write_bytes(file.read_bytes()[:300])
