"""The transformers engine on gpt-oss-tiny."""

from __future__ import annotations

import pytest
import torch

from patcher import bench
from patcher.bench import Workload
from patcher.bench.engines import Engine, open_engine, peak_memory_bytes

TINY = Workload(
    model="gpt-oss-tiny",
    device="cpu",
    dtype="float32",
    batch=3,
    input_len=8,
    output_len=6,
    threads=1,
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(TINY)


def test_generation_is_greedy_counted_and_repeatable(engine: Engine) -> None:
    prompts = engine.prompts(1)
    first, again = engine.generate(prompts, 6), engine.generate(prompts, 6)
    assert first.tokens.shape == (3, 7)
    assert torch.equal(first.tokens, again.tokens)
    assert first.prefill_s > 0
    assert first.decode_s > 0
    assert not torch.equal(prompts, engine.prompts(2))
    # the cache decodes what the whole sequence would
    whole = torch.cat([prompts, first.tokens], dim=1)
    logits = engine.logits(whole)
    assert torch.equal(logits[:, 7:-1].argmax(-1), first.tokens)


def test_weights_are_seeded_and_routing_is_spread_out(engine: Engine) -> None:
    other = open_engine(TINY.model_copy(update={"seed": 1}))
    same = open_engine(TINY)
    ours, theirs = (e.model.state_dict() for e in (engine, same))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert not torch.equal(ours["lm_head.weight"], other.model.state_dict()["lm_head.weight"])
    assert set(ours["model.norm.weight"].tolist()) == {1.0}
    entropy = engine.routing_entropy_pct(engine.prompts(1), 6)
    assert entropy is not None
    assert 40 < entropy <= 100


def test_reference_is_close_and_leaves_the_model_as_it_was(engine: Engine) -> None:
    tokens = engine.prompts(3)
    before = engine.logits(tokens)
    reference, how = engine.reference_logits(tokens)
    assert "float64" in how
    assert torch.equal(engine.logits(tokens), before)
    assert (before - reference).abs().max() < 1e-4
    assert not torch.equal(before, reference)
    assert all(p.dtype is torch.float32 for p in engine.model.parameters())


def test_a_saved_model_is_loaded_from_its_folder(engine: Engine, tmp_path: object) -> None:
    folder = f"{tmp_path}/tiny"
    engine.model.save_pretrained(folder)  # type: ignore[operator]
    loaded = open_engine(TINY.model_copy(update={"model": folder, "weights": "local"}))
    prompts = engine.prompts(1)
    assert torch.equal(loaded.generate(prompts, 3).tokens, engine.generate(prompts, 3).tokens)


def test_a_model_that_does_not_fit_names_the_ways_on() -> None:
    big = Workload(
        model="gpt-oss-20b", device="cpu", dtype="bfloat16", batch=1, input_len=1, output_len=1
    )
    with pytest.raises(bench.MissingError) as caught:
        open_engine(big)
    assert "--from" in caught.value.hint
    assert "patcher demo" in caught.value.hint


def test_missing_weights_are_a_clear_error(tmp_path: object) -> None:
    nowhere = TINY.model_copy(update={"model": f"{tmp_path}/nowhere", "weights": "local"})
    with pytest.raises(bench.UsageError, match="there is no folder or file"):
        open_engine(nowhere)
    with pytest.raises(bench.UsageError, match="no published weights"):
        open_engine(TINY.model_copy(update={"weights": "hub"}))


def test_peak_memory_is_what_was_needed_not_what_the_allocator_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = [
        {"segment_pool_id": pool, "total_size": total, "allocated_size": used}
        for pool, total, used in (((0, 0), 900, 300), ((0, 1), 50, 20), ((3, 0), 8, 8))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 500)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 958)
    assert peak_memory_bytes("cuda") == 500 + 30
    assert peak_memory_bytes("cpu") > 1 << 20
