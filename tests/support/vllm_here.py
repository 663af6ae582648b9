"""Whether a vLLM that the patch points were written for is here, and what its tests share."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version

from patcher import bench
from patcher.bench.runner.loading import load
from patcher.integrate import CallCounters
from patcher.integrate.activation import contract_guards
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import CallGuards
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS


def installed() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def is_read() -> bool:
    """Whether `sources.json` has the digests of the installed version."""
    version = installed()
    return version is not None and Version(version).public in sources.versions_read()


needs_vllm = pytest.mark.skipif(
    not is_read(),
    reason=f"needs vLLM {', '.join(sources.versions_read())}; here is {installed() or 'none'}",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's configuration as current, and a world of one process."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    import_latent_attention()
    made = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(made):
        meeting = tmp_path_factory.mktemp("world") / "file"
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        with torch.no_grad():
            yield made
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def import_latent_attention() -> None:
    """A backend imports FlashAttention's kernels, which are not there without a GPU."""
    from vllm.v1.attention.backends import fa_utils

    backend = "vllm.v1.attention.backends.mla.flashattn_mla"
    try:
        importlib.import_module(backend)
    except ImportError:
        kernels = "flash_attn_varlen_func", "get_scheduler_metadata"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "vllm.vllm_flash_attn", ModuleType("flash_attn"))
            for module in (fa_utils, sys.modules["vllm.vllm_flash_attn"]):
                for name in kernels:
                    patch.setattr(module, name, None, raising=False)
            importlib.import_module(backend)


PATCHES = itertools.count()


def dispatcher(name: str, kernel: Any, guards: CallGuards) -> Dispatcher:
    """Of another patch each time: an operator's name holds the digest."""
    return Dispatcher(name, kernel, guards, CallCounters(f"{name}-test", f"{next(PATCHES):012x}"))


def guards_of(op: str, **dtypes: torch.dtype) -> CallGuards:
    """What a bundle of the op has, on the CPU; wherever the tensors begin."""
    guards = contract_guards(bench.load_op(op).contract, "cpu", [])
    tensors = tuple(replace(tensor, alignment=1) for tensor in guards.tensors)
    return replace(guards, tensors=tensors, scalars=(), dtypes=(dtypes,))


def shipped(op: str, *scalars: tuple[str, type], **dtypes: torch.dtype) -> Dispatcher:
    """Of the op's plain kernel in PyTorch, which the library ships."""
    source = bench.load_op(op).folder / "solutions" / "cpu_torch" / f"{op}.py"
    guards = replace(guards_of(op, **dtypes), scalars=scalars)
    return dispatcher(op, load(str(source), "python", op), guards)


@contextmanager
def patched(point: str, kernel: Dispatcher) -> Iterator[Any]:
    """The point with the kernel; nothing of it is left after."""
    made = POINTS[point]()
    made.install(kernel)
    try:
        yield made
    finally:
        made.remove()
        kernel.close()
        torch._dynamo.reset()


def nothing(*args: Any) -> None:
    """A kernel for those who only put it in and out."""


def attribute(where: str) -> Any:
    return sources.part(where)
