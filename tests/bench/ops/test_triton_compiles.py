"""Triton solutions of the library: each op has one, and it compiles on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patcher import bench
from patcher.bench import Language
from patcher.bench.runner.loading import load

OPS = bench.load_ops()
TRITON = [
    (name, info.name)
    for name, op in OPS.items()
    for info, candidate in op.solutions()
    if candidate.language is Language.TRITON
]
SHARED_BYTES = 227 * 1024
"""What a block may have on Hopper."""


def test_every_op_has_a_solution_in_triton() -> None:
    assert {name for name, _ in TRITON} == set(OPS)


class Hopper:
    """What Triton asks its driver when it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.parametrize(("name", "solution"), TRITON)
def test_it_compiles_for_hopper(
    name: str, solution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call on the CPU, of which each launch is a compilation for its arguments."""
    triton = pytest.importorskip("triton")
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").is_file():
        pytest.skip("Triton brings no ptxas here")
    compiled = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            compiled.append(kernel.run(*arguments, grid=grid, warmup=True, **named))

        return launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", launcher)
    op = OPS[name]
    contract = op.contract
    point = next(sweep for sweep in contract.sweeps if sweep.device == "cuda").points()[0]
    tensors = [
        torch.empty(contract.shape(tensor, point), dtype=getattr(torch, point.dtypes[tensor.dtype]))
        for tensor in contract.tensors
    ]
    kernel = load(str(op.folder / "solutions" / solution / f"{name}.py"), "python", name)
    kernel(*tensors, *(scalar.value for scalar in contract.scalars))
    assert compiled
    for one in compiled:
        assert one.asm["cubin"]
        assert one.metadata.shared <= SHARED_BYTES
