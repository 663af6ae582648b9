"""Whole small models of the real vLLM run a decode step with each patch that has layers in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_whole
from vllm_here import installed, needs_vllm
from vllm_matrix import VERSION, known

from patcher.bench.runner.loading import load

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.skipif(installed() != VERSION, reason=f"the table is of vLLM {VERSION}"),
]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with vllm_whole.world():
        yield


def test_every_architecture_is_in_the_table() -> None:
    assert (known()["vllm"], sorted(known()["calls"])) == (VERSION, sorted(vllm_whole.TRIED))


@pytest.mark.parametrize("name", vllm_whole.TRIED)
def test_each_patch_takes_the_calls_that_the_table_says(name: str, tmp_path: Path) -> None:
    assert vllm_whole.proven(name, tmp_path) == known()["calls"][name]


def test_a_kernel_that_computes_something_else_is_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(path: str, language: str, name: str) -> Any:
        right = load(path, language, name)

        def kernel(*given: Any) -> None:
            right(*given)
            given[-1].mul_(1.5)

        return kernel

    monkeypatch.setattr(vllm_whole, "POINTS", {"linear": vllm_whole.POINTS["linear"]})
    assert vllm_whole.proven("llama", tmp_path) == {"linear": "8"}
    monkeypatch.setattr(vllm_whole, "load", wrong)
    with pytest.raises(AssertionError, match="linear"):
        vllm_whole.proven("llama", tmp_path)


def test_random_weights_in_awq_give_logits_as_plain_ones_do(tmp_path: Path) -> None:
    """From a checkpoint's config.json to the logits, by vLLM's own choice of a method."""
    folder = vllm_whole.folder_of(tmp_path, "llama")
    _, plain, _ = vllm_whole.built(folder, "bfloat16").step()
    file = Path(folder) / "config.json"
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    known = {**json.loads(file.read_text()), "quantization_config": awq}
    file.write_text(json.dumps(known), encoding="utf-8")
    made = vllm_whole.built(folder, "bfloat16")
    methods = {type(each.quant_method).__name__ for each in linear_layers(made.model)}
    assert methods == {"AutoAWQLinearMethod"}
    _, logits, _ = made.step()
    assert logits.isfinite().all()
    assert float(logits.float().std()) == pytest.approx(float(plain.float().std()), rel=0.35)
    assert not torch.equal(logits, plain)


def linear_layers(model: torch.nn.Module) -> list[Any]:
    from vllm.model_executor.layers.linear import LinearBase

    return [each for each in model.modules() if isinstance(each, LinearBase)]
