"""A small Llama in the real SGLang on a CPU: stock and patched, by its own plugin hooks.

SGLang runs its PyTorch code there. The norms are made to call `forward_cuda`, as on a GPU, with a
double in PyTorch for the kernel of `sgl_kernel` that runs without a residual.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from patch_sample import evaluation
from sglang_here import ON_CPU, dense, needs_sglang

from patcher import bench
from patcher.bench import Candidate, Language, VerificationError
from patcher.bench.engines import open_measurable
from patcher.integrate import Patch, Store, activated, await_engine, read_receipts

OP = bench.load_op("fused_add_rms_norm")
LAYERS = 3
SOURCE = """
import torch
def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    input.copy_(weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)))
"""


def patched(store: Store) -> None:
    """Apply a patch of the norms, in PyTorch."""
    candidate = Candidate(op=OP.name, language=Language.TORCH, source=SOURCE)
    folder = store.root.parent / "patch"
    Patch.create(folder, OP, candidate, evaluation(candidate), engine="sglang", made_by="test")
    store.apply(folder)


def as_on_a_gpu(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms call `forward_cuda`, which a layer looks up at its first call."""
    from sglang.srt.layers import layernorm

    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, epsilon)

    monkeypatch.setattr(layernorm, "rmsnorm", rmsnorm, raising=False)
    for layer in model.modules():
        if isinstance(layer, layernorm.RMSNorm):
            layer._forward_method = layer.forward_cuda


@needs_sglang
def test_a_model_decodes_stock_and_patched(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one test, since SGLang loads one model a process
    workload = dense(tmp_path, monkeypatch)
    patched(store)
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    monkeypatch.setenv("PATCHER_STRICT", "1")
    monkeypatch.setenv("PATCHER_RECEIPTS", str(tmp_path / "receipts"))
    with pytest.raises(VerificationError, match="without calling patcher's hook"):
        activated("sglang")
    await_engine("sglang")
    engine: Any = open_measurable(workload, {**ON_CPU, "max_running_requests": 4})
    active = activated("sglang")
    assert engine.vocab_size == 512
    weights = dict(engine.runner.model.named_parameters())
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(1, rel=0.05)
    assert torch.all(weights["model.norm.weight"] == 1)

    prompts = engine.prompts(1)
    stock = engine.generate(prompts, 4)
    assert stock.tokens.shape == (2, 5)
    assert len(stock.tokens.unique()) > 2, "the weights are not near zero"
    assert torch.equal(engine.generate(prompts, 4).tokens, stock.tokens)
    logits = engine.served_logits(prompts, stock.tokens)
    assert logits.shape == (2, 5, 512)
    assert torch.equal(logits.argmax(-1), stock.tokens)
    others = (stock.tokens + 1) % 512
    forced = engine.served_logits(prompts, others)
    assert torch.equal(forced[:, 0], logits[:, 0])
    assert not torch.equal(forced[:, 1], logits[:, 1])
    assert engine.routing_entropy_pct(prompts, 2) is None
    assert engine.peak_memory_bytes() > 0

    [item] = active.installed
    assert str(item.book.layers) == f"{2 * LAYERS + 1} layers"
    assert item.book.calls == {}, "a CPU does not call forward_cuda"
    as_on_a_gpu(engine.runner.model, monkeypatch)
    ours = engine.generate(prompts, 4)
    assert torch.equal(ours.tokens, stock.tokens)
    # every norm but the first has a residual; a prefill and four steps
    assert sum(item.book.calls.values()) == 5 * 2 * LAYERS
    assert sum(item.book.fallbacks.values()) == 0
    torch.testing.assert_close(engine.served_logits(prompts, stock.tokens), logits)

    # two batches at a time, each of its own tokens
    first, second = engine.prefill(prompts), engine.prefill(prompts.flip(0))
    engine.decode(first, 2)
    engine.decode(second, 4)
    engine.release(first)
    assert torch.equal(second.tokens(), stock.tokens.flip(0))
    engine.release(second)
    free = engine.runner.token_to_kv_pool_allocator.available_size()
    assert free == engine.runner.max_total_num_tokens

    active.close()
    [receipt] = read_receipts(tmp_path / "receipts")
    assert receipt.point == "sglang:add_norm"
    assert receipt.total_calls > 5 * 2 * LAYERS
    engine.close()
