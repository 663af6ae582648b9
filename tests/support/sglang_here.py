"""Whether an SGLang that the patch points were written for is here, and what its tests share."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from vllm_here import dispatcher

from patcher import bench
from patcher.integrate.activation import contract_guards
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.sglang.sources import RECORD

DENSE = "llama-miniature"
PRESET = f"""name = "{DENSE}"
summary = "Llama in miniature"
architecture = "llama"
dtype = "float32"
fits_cpu = true
parameters_b = 0.0002
batch = 2
input_len = 8
output_len = 4

[config]
num_hidden_layers = 3
vocab_size = 512
hidden_size = 64
intermediate_size = 128
head_dim = 16
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 4096
rms_norm_eps = 1e-5
tie_word_embeddings = false
"""
ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.3,
}
"""Arguments of SGLang that need no GPU."""


def installed() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def is_read() -> bool:
    version = installed()
    return version is not None and Version(version).public in RECORD.versions_read()


needs_sglang = pytest.mark.skipif(
    not is_read(),
    reason=f"needs {RECORD.known_versions()}, see `make engines`; here is {installed() or 'none'}",
)


def dense(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bench.Workload:
    """A workload of a small Llama for SGLang, whose preset lies in that folder."""
    (folder / f"{DENSE}.toml").write_text(PRESET)
    monkeypatch.setenv("PATCHER_PRESETS", str(folder))
    return bench.Workload(
        model=DENSE,
        engine="sglang",
        device="cpu",
        dtype="float32",
        batch=2,
        input_len=8,
        output_len=4,
        seed=1,
    )


def kernel_of(op: str, kernel: Callable[..., None], **dtypes: torch.dtype) -> Dispatcher:
    """A dispatcher as a bundle of the op has it, on the CPU; wherever the tensors begin."""
    contract = bench.load_op(op).contract
    guards = contract_guards(contract, "cpu", [])
    tensors = tuple(replace(tensor, alignment=1) for tensor in guards.tensors)
    axes = contract.guards.axes
    return dispatcher(op, kernel, replace(guards, tensors=tensors, dtypes=(dtypes,), axes=axes))


class KeyValuePoolDouble:
    """Stands for SGLang's pool of a model that runs on a GPU: two buffers a layer."""

    def __init__(self, slots: int, heads: int, head_dim: int) -> None:
        self.keys = torch.zeros(slots, heads, head_dim)
        self.values = torch.zeros(slots, heads, head_dim)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values


def step(mode: str, slots: torch.Tensor) -> Any:
    """As much of a `ForwardBatch` as the rotation is told, in that mode of SGLang's."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode[mode], out_cache_loc=slots)
