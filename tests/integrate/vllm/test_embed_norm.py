"""The look-up of embeddings with the first norm, in layers of the real vLLM, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_attention import Compiled
from vllm_here import config, needs_vllm, patched, shipped

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.survey import survey
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

POINT, NORM, VOCAB, HIDDEN = "embed_norm", "vllm_ir::rms_norm", 50, 32
FLOAT = torch.float32
PLAIN = {"T": FLOAT, "W": FLOAT}


def dispatching(ids: torch.dtype = torch.int32, rows: torch.dtype = FLOAT) -> Dispatcher:
    made = shipped(POINT, ("epsilon", float), I=ids, T=rows, W=rows)
    made.guards = replace(made.guards, axes={"tokens": AxisBounds(maximum=64)})
    return made


def first_layers(model: Any, ids: torch.Tensor, change: Any) -> Any:
    """As models of vLLM begin: the embeddings are the residual of the second norm."""
    residual = change(model.embed(ids))
    x, residual = model.second(model.first(residual).relu(), residual)
    return x + residual


class Model(torch.nn.Module):
    """Embeddings and two norms, and what `forward` makes of them."""

    def __init__(
        self,
        change: Any = lambda rows: rows,
        kind: str = "RMSNorm",
        dtype: torch.dtype = FLOAT,
    ) -> None:
        super().__init__()
        from vllm.model_executor.layers import layernorm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN)
        self.first = getattr(layernorm, kind)(HIDDEN, eps=1e-5)
        self.second = layernorm.RMSNorm(HIDDEN, eps=1e-5)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data.normal_(0, 1, generator=generator)
        self.to(dtype)
        self.change = change

    def forward(self, input_ids: torch.Tensor) -> Any:
        return first_layers(self, input_ids, self.change)


@pytest.fixture
def kernel() -> Iterator[Dispatcher]:
    made = dispatching()
    with patched(POINT, made):
        yield made


def ids(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return (7 * torch.arange(count) % VOCAB).to(dtype)


@feature("compiled in pieces, and from the compile cache", "right", POINT)
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (torch.int32, FLOAT),
        (torch.int64, FLOAT),
        (torch.int32, torch.bfloat16),
        (torch.int64, torch.float16),
    ],
)
def test_one_call_looks_up_and_norms(config: Any, dtype: torch.dtype, rows: torch.dtype) -> None:
    model, given = Model(dtype=rows), ids(3, dtype)
    expected, stock = model(given), Compiled(model)
    assert torch.equal(stock(input_ids=given), expected)
    for _ in range(2):  # in, out and in again
        torch._dynamo.reset()
        kernel = dispatching(dtype, rows)
        with patched(POINT, kernel):
            run, finest = Compiled(model), torch.finfo(rows).eps
            # vLLM rounds before the weight multiplies, too
            found, most = run(input_ids=given), 2 * finest * expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=2 * finest, atol=most)
            assert sum(kernel.book.calls.values()) == 1
            assert not kernel.book.fallbacks
            assert f"patcher::{POINT}_{kernel.book.digest}" in run.graph
            assert not {"embedding", "long", NORM, f"{NORM}.default"} & {*run.graph}
        again = Compiled(model)
        assert torch.equal(again(input_ids=given), expected)
        assert again.graph == stock.graph


@feature("whole graphs, `use_inductor_graph_partition`", "right", POINT)
def test_by_inductor_it_is_right_too(config: Any, kernel: Dispatcher) -> None:
    from torch._inductor import compile_fx

    def inductor(module: torch.fx.GraphModule, given: Any) -> Any:
        return compile_fx.compile_fx(module, given, config_patches={"fx_graph_cache": False})

    model = Model()
    run = Compiled(model, (), inductor)
    for _ in range(2):
        torch.testing.assert_close(run(input_ids=ids(3)), model(ids(3)))
    assert sum(kernel.book.calls.values()) == 2
    assert not kernel.book.fallbacks


def test_what_the_kernel_does_not_take_is_vllms_own(config: Any, kernel: Dispatcher) -> None:
    model = Model()
    torch.testing.assert_close(Compiled(model)(input_ids=ids(65)), model(ids(65)))
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {"tokens above 64": 1}


def put_in(rows: torch.Tensor) -> torch.Tensor:
    """As a model puts embeddings of pictures among those of words."""
    rows[:1] = 1.0
    return rows


def added(rows: torch.Tensor) -> torch.Tensor:
    rows.add_(1.0)
    return rows


LEFT: dict[str, Any] = {
    "mul reads the embeddings, and no plain norm": lambda rows: 2 * rows,
    "setitem reads the embeddings before the norm": put_in,
    "add_ reads the embeddings before the norm": added,
    "add_ reads the embeddings, and no plain norm": lambda rows: rows.add_(1.0),
    "a weight that is computed": lambda rows: rows,
    "norm.plain has the norm": lambda rows: rows,
}


@pytest.mark.parametrize("reason", LEFT)
def test_another_beginning_stays_vllms_own_and_is_told(
    reason: str, config: Any, kernel: Dispatcher
) -> None:
    kind = "GemmaRMSNorm" if reason == "a weight that is computed" else "RMSNorm"
    model = Model(LEFT[reason], kind)
    expected = model(ids(3))
    if reason == "norm.plain has the norm":
        with patched("norm.plain", shipped("rms_norm", ("epsilon", float), **PLAIN)):
            found = Compiled(model)(input_ids=ids(3))
    else:
        found = Compiled(model)(input_ids=ids(3))
    torch.testing.assert_close(found, expected)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {reason: 1}
    assert kernel.book.compiled_out == kernel.book.reasons, (
        "a process that loads the graph counts none"
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_change_before_the_norm_stay_vllms_own(config: Any, dtype: torch.dtype) -> None:
    class Moved(Model):
        def forward(self, input_ids: torch.Tensor) -> Any:
            given = input_ids.clone()
            rows = self.embed(given)
            given[1:].fill_(0)
            return self.first(rows), given

    model, kernel = Moved(), dispatching(dtype)
    expected = model(ids(3, dtype))
    with patched(POINT, kernel):
        found = Compiled(model)(input_ids=ids(3, dtype))
    assert torch.equal(found[0], expected[0])
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {"getitem is given the ids before the norm": 1}


def test_ids_of_two_axes_stay_vllms_own(config: Any, kernel: Dispatcher) -> None:
    class Pair(Model):
        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.first(self.embed(input_ids))

    model, given = Pair(), ids(6).view(2, 3)
    torch.testing.assert_close(Compiled(model)(input_ids=given), model(given))
    assert dict(kernel.book.fallbacks) == {"ids in another shape": 1}


def test_a_graph_that_is_given_embeddings_says_so(config: Any, kernel: Dispatcher) -> None:
    class Later(Model):
        def forward(self, inputs_embeds: torch.Tensor) -> Any:
            return self.first(inputs_embeds)

    model, rows = Later(), torch.randn(3, HIDDEN)
    torch.testing.assert_close(Compiled(model)(inputs_embeds=rows), model(rows))
    assert dict(kernel.book.fallbacks) == {"a graph without a look-up of embeddings": 1}


@feature("tensor parallelism", "falls back", POINT)
def test_a_table_that_ranks_share_stays_vllms_own(config: Any, kernel: Dispatcher) -> None:
    model = Model()
    model.embed.tp_size = 2  # the ids are masked, and what ranks found is summed
    expected = model(ids(3))
    torch.testing.assert_close(Compiled(model)(input_ids=ids(3)), expected)
    assert not kernel.book.calls
    [reason] = kernel.book.fallbacks
    assert "the embeddings" in reason
    point = POINTS[POINT]()
    assert dict(survey(point, kernel.guards, [model.embed]).refused) == {
        "a table that ranks share": 1
    }


@feature("LoRA on embeddings", "falls back", POINT)
def test_layers_say_why_they_are_left(
    config: Any, kernel: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from patcher.integrate.vllm import engine

    model, point = Model(), POINTS[POINT]()
    seen = survey(point, kernel.guards, [*model.modules(), ParallelLMHead(VOCAB, HIDDEN)])
    assert (seen.taken, seen.total) == (1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(model.embed, "quant_method", SimpleNamespace())
        assert point.applies(model.embed) == "weights by SimpleNamespace"
        patch.setattr(model.embed, "__class__", type("Own", (type(model.embed),), {}))
        assert point.applies(model.embed) == "embeddings of class Own"
    with monkeypatch.context() as patch:
        patch.setattr(config, "lora_config", SimpleNamespace())
        assert point.applies(model.embed) == "LoRA may add to the embeddings"
    monkeypatch.setattr(engine, "compiles_graphs", lambda: False)
    assert str(point.applies(model.embed)).startswith("vLLM compiles no graph")


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_a_batch_invariant_engine_refuses_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT requires"):
        POINTS[POINT]().find()
