"""What the SGLang engine says where it cannot run, and its arguments.

tests/integrate/sglang/test_sglang_run.py runs a model in it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang_here import dense, needs_sglang

from patcher.bench import MissingError, PatcherError, UsageError
from patcher.bench.engines import in_process, open_engine, open_measurable
from patcher.bench.engines.sglang import OPTIONS, SglangEngine, cache_tokens, selections
from patcher.bench.workload import Shape


def test_it_is_measured_with_a_process_for_each_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not in_process("sglang")
    with pytest.raises(UsageError, match="sglang is patched when a process starts"):
        open_engine(dense(tmp_path, monkeypatch))


@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here"
)
def test_without_sglang_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingError, match="sglang is not installed"):
        open_measurable(dense(tmp_path, monkeypatch))


def test_its_own_dummy_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="dummy weights are near zero"):
        SglangEngine(dense(tmp_path, monkeypatch), {"load_format": "dummy"})


def test_the_cache_has_room_for_all_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = dense(tmp_path, monkeypatch)
    assert cache_tokens(workload) == 5 * 3072 // 4, "one sequence of the longest length"
    assert cache_tokens(workload, [Shape(batch=64, context=1024)]) == 5 * 64 * (1024 + 256) // 4


class TopK(torch.nn.Module):
    """Stands for SGLang's router of that name: it is given the logits, by place or by name."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.topk_config = SimpleNamespace(top_k=top_k)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> None:
        """Select experts, which the count does on its own."""


def test_the_experts_of_decode_are_counted_and_those_of_prefill_are_not() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 3.0, 2.0, 1.0]])
    prefill = torch.zeros(6, 4)
    routers = torch.nn.ModuleList([TopK(2), TopK(2)])

    def run() -> None:
        routers[0](prefill, prefill)
        routers[0](logits, logits)
        routers[0](logits, router_logits=logits)
        routers[1](logits, router_logits=logits.flip(1))

    counts = selections(routers, batch=2, run=run)
    assert counts.tolist() == [[2.0, 4.0, 2.0, 0.0], [0.0, 1.0, 2.0, 1.0]]
    routers[0](logits, logits)
    assert counts.sum() == 12, "no hook stays"
    with pytest.raises(PatcherError, match="never called in decode"):
        selections(routers, batch=2, run=lambda: routers[0](logits, logits))


@needs_sglang
def test_every_option_is_an_argument_of_sglang() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.server_args import ServerArgs

    options = [option for group in OPTIONS for option in group]
    for option in options:
        ServerArgs(model_path="none", **option)
    attention = {each["attention_backend"] for each in options if "attention_backend" in each}
    experts = {each["moe_runner_backend"] for each in options if "moe_runner_backend" in each}
    assert attention <= set(choices.ATTENTION_BACKEND_CHOICES)
    assert experts <= set(choices.MOE_RUNNER_BACKEND_CHOICES)


@needs_sglang
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingError, match="SGLang needs a GPU"):
        open_measurable(dense(tmp_path, monkeypatch))
