"""The task score: on a model that has learned most of the items, and on made-up answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cloze_sample import KNOWN, trained, workload_of

from patcher.bench import Quality, UsageError
from patcher.bench.ab import cloze
from patcher.bench.ab.logits import served_logits
from patcher.bench.ab.quality import assess
from patcher.bench.engines import Engine, open_engine, random_prompts


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    trained(folder)
    return open_engine(workload_of(folder))


def quality(engine: Engine, scale: float | None = None) -> Quality:
    @contextmanager
    def damaged() -> Iterator[None]:
        norm: Any = engine.model.get_submodule("model.norm")
        kept = norm.weight.data.clone()
        norm.weight.data *= torch.linspace(-1.0, 1.0, len(kept)) * (scale or 1.0)
        try:
            yield
        finally:
            norm.weight.data = kept

    patched: Any = nullcontext if scale is None else damaged
    return assess(engine, {"baseline": nullcontext, "patched": patched}, 1, 4)


def test_items_are_many_and_well_formed() -> None:
    found = cloze.items()
    assert len(found) >= 50
    assert len({item.statement for item in found}) == len(found)
    assert all(len(set(item.choices)) == 4 for item in found)


def test_the_same_model_scores_the_same_and_says_what_would_be_found(engine: Engine) -> None:
    found = quality(engine)
    assert found.passed
    task = found.task
    assert task is not None
    assert found.task_refusal is None
    assert task.items == len(cloze.items())
    assert task.baseline_pct >= 100 * KNOWN / task.items  # far from chance: it has learned
    assert (task.worse, task.better, task.floor_changed) == (0, 0, 0)
    assert task.baseline_pct == task.patched_pct
    assert task.margin_shift == 0
    assert task.detectable_pct is not None
    assert 3 < task.detectable_pct < 10
    assert "points would be found" in found.reason
    assert Quality.model_validate_json(found.model_dump_json()) == found


def test_trained_weights_are_compared_after_text(engine: Engine, tmp_path: Path) -> None:
    workload = engine.workload.model_copy(update={"batch": 3, "input_len": 700})
    first, other = (cloze.quality_prompts(workload, engine.vocab_size, seed) for seed in (1, 2))
    assert first.shape == (3, 700)
    assert torch.equal(first, cloze.quality_prompts(workload, engine.vocab_size, 1))
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    words = cloze.tokenizer_of(workload).decode(first[0])
    assert sum(item.statement in words for item in cloze.items()) > 20
    assert quality(engine).prompts == "text"
    random = workload.model_copy(update={"weights": "random"})
    assert torch.equal(
        cloze.quality_prompts(random, 50, 1), random_prompts(random, vocab_size=50, seed=1)
    )


def test_a_tokenizer_that_makes_no_tokens_is_told(engine: Engine) -> None:
    with pytest.raises(UsageError, match="makes no tokens of text"):
        cloze.text_prompts(engine.workload, lambda _: {"input_ids": []}, 1)


def test_a_damaged_model_loses_answers(engine: Engine) -> None:
    found = quality(engine, 1.0)
    assert not found.passed
    assert found.task is not None
    assert not found.task.passed
    assert found.task.worse >= 5
    assert found.task.difference_high_pct < 0
    assert found.task.margin_shift < 0
    assert "cloze items right" in found.reason


def test_an_answer_is_the_likeliest_continuation(engine: Engine) -> None:
    """Against the whole sequence at once: choices of one token and of several, in two rounds."""
    choices = [
        [5, 6, 7, 8, 9, 10, 11],
        [5, 6, 7, 8, 9, 12],
        [5, 6, 7, 8, 9, 10, 13, 14],
        [5, 6, 7, 9],
    ]
    [found] = cloze.answers(partial(served_logits, engine), [choices], 3)
    for likely, choice in zip(found, choices, strict=True):
        tokens = torch.tensor([choice])
        whole = engine.logits(tokens).double().log_softmax(-1)[0, :-1]
        each = whole.gather(1, tokens[0, 1:, None]).squeeze(1)
        assert likely == pytest.approx(float(each.sum()), abs=1e-3)


def test_random_weights_and_a_missing_tokenizer_are_no_task(engine: Engine, tmp_path: Path) -> None:
    random = engine.workload.model_copy(update={"weights": "random"})
    assert "random" in str(cloze.questions(random))
    (tmp_path / "config.json").write_text("{}")
    bare = engine.workload.model_copy(update={"model": str(tmp_path)})
    with pytest.raises(UsageError, match="no tokenizer"):
        cloze.tokenizer_of(bare)
    refusal = cloze.questions(bare)
    assert isinstance(refusal, str)
    assert "no tokenizer beside the weights" in refusal


def answers(right: int, count: int) -> torch.Tensor:
    """The first `right` items answered right."""
    likelihoods = torch.zeros(count, 4, dtype=torch.float64)
    likelihoods[:, 0] = torch.where(torch.arange(count) < right, 1.0, -1.0)
    return likelihoods


@pytest.mark.parametrize(("lost", "passed"), [(0, True), (4, True), (5, False), (20, False)])
def test_the_test_finds_five_losses_and_not_four(lost: int, passed: bool) -> None:
    same = answers(80, 100)
    found = cloze.judge(same, same, answers(80 - lost, 100))
    assert (found.worse, found.better) == (lost, 0)
    assert found.passed is passed


def test_what_the_baseline_flips_by_itself_widens_what_can_be_found() -> None:
    same = answers(80, 100)
    still = cloze.judge(same, same, same)
    restless = cloze.judge(same, answers(70, 100), same)
    assert restless.floor_changed == 10
    assert still.detectable_pct is not None
    assert restless.detectable_pct is not None
    assert still.detectable_pct < restless.detectable_pct


def test_a_baseline_at_chance_and_broken_likelihoods_are_said() -> None:
    chance = answers(25, 100)
    assert "at chance" in cloze.judge(chance, chance, chance).reason
    broken = cloze.judge(chance, chance, chance * torch.nan)
    assert not broken.passed
    assert "not finite" in broken.reason


def test_the_promised_drop_is_found_four_times_in_five() -> None:
    drop = cloze.detectable_drop(120, 0.0)
    assert drop is not None
    generator = torch.Generator().manual_seed(0)
    lost = (torch.rand(2000, 120, generator=generator) < drop).sum(1)
    found = sum(cloze.mcnemar(int(each), 0) <= cloze.ALPHA for each in lost)
    assert 0.77 < found / 2000 < 0.83
    assert cloze.detectable_drop(3, 0.0) is None
