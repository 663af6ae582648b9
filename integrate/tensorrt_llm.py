"""TensorRT-LLM's PyTorch backend: its patch point, and how its workers load patches.

Written against these files of NVIDIA/TensorRT-LLM: _torch/custom_ops/flashinfer_custom_ops.py
(53b897c), _torch/modules/rms_norm.py (0419019, and a version of 2026 with NVFP4 and cuda.tile),
_torch/models/modeling_gpt_oss.py (050b6cb), llmapi/mpi_session.py (00a1352);
tests/doubles/trtllm/README.md lists all. It is tested with a double of them, but not yet with a
running TensorRT-LLM.

Kernels launched in C++ have no such patch point; see `patcher.integrate.tensorrt_llm_source`.
"""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._library.custom_ops import CustomOpDef

from patcher.bench import MissingError, UsageError, VerificationError
from patcher.integrate.activation import Activation, activate
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import PatchPoint, source_digest
from patcher.integrate.receipts import Receipt, read_receipts
from patcher.integrate.switches import Switches

log = logging.getLogger("patcher")

ENGINE = "tensorrt_llm"
MODULE = "patcher_tensorrt_llm"
"""Name of the generated package."""
_OPS = "tensorrt_llm._torch.custom_ops"
_SCHEMA = "(Tensor(a0!) input, Tensor(a1!) residual, Tensor weight, float eps) -> ()"


class FusedAddRmsNorm:
    """The operator `trtllm::flashinfer_fused_add_rmsnorm`, which RMSNorm.forward calls.

    The operator keeps its schema, its fake implementation and its callers. It gets a kernel for one
    kind of device (`CustomOpDef.register_kernel`); while that is disabled, its own body runs.

    With tensor parallelism (and without attention data parallelism), gpt-oss adds and normalises in
    its all-reduce and never calls the operator. Neither do norms that feed an NVFP4 layer, use
    cuda.tile or have Gemma's weights. Receipts show that.
    """

    engine: ClassVar[str] = ENGINE
    name: ClassVar[str] = "flashinfer_fused_add_rmsnorm"
    op: ClassVar[str] = "fused_add_rms_norm"

    def __init__(self, target: Any = None) -> None:
        self._kernel: Dispatcher | None = None
        self._device = ""
        self._registered: Any = None

    @classmethod
    def fingerprint(cls) -> str:
        return source_digest(_operator()._init_fn, _norm().forward)

    def find(self) -> str:
        op, norm = _operator(), _norm()
        schema = str(op._opoverload._schema).partition("flashinfer_fused_add_rmsnorm")[2]
        if schema != _SCHEMA:
            raise VerificationError(
                f"trtllm::{self.name} has the schema {schema}, this adapter supports {_SCHEMA}",
                "use a TensorRT-LLM in the patch's range, or adapt integrate/tensorrt_llm.py",
            )
        home = Path(_imported("tensorrt_llm").__file__).parent
        for what, function in ((f"trtllm::{self.name}", op._init_fn), ("RMSNorm", norm.forward)):
            if not Path(function.__code__.co_filename).is_relative_to(home):
                raise VerificationError(f"{what} was replaced", "remove the other patch first")
        # the fingerprint covers files, so it does not show kernels registered by others
        others = [device for device in op._backend_fns if device not in (None, *_disabled(op))]
        if others:
            raise VerificationError(
                f"trtllm::{self.name} already has a kernel for {others[0]}",
                "remove the other patch first",
            )
        code = op._init_fn.__code__
        where = Path(code.co_filename).relative_to(home)
        return f"trtllm::{self.name} ({where}:{code.co_firstlineno})"

    def install(self, kernel: Dispatcher) -> None:
        if self._kernel is not None:
            raise UsageError("the patch is already installed", "remove it first")
        self.find()
        op = _operator()
        self._kernel, self._device = kernel, kernel.guards.device
        op.register_kernel(self._device)(self._replacement(op._init_fn))
        self._registered = op._backend_fns[self._device]
        _disabled(op).discard(self._device)

    def remove(self) -> None:
        if self._kernel is None:
            return
        self._kernel = None
        op = _operator()
        if op._backend_fns[self._device] is not self._registered:
            raise VerificationError(
                f"another kernel of trtllm::{self.name} was registered over this patch",
                "remove patches in reverse order; restart the engine",
            )
        _disabled(op).add(self._device)

    def _replacement(self, original: Callable[..., None]) -> Callable[..., None]:
        def fused_add_rmsnorm(
            input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
        ) -> None:
            kernel = self._kernel
            if kernel is None or not kernel(input, residual, weight, eps):
                original(input, residual, weight, eps)

        return fused_add_rmsnorm


POINTS: dict[str, type[PatchPoint]] = {FusedAddRmsNorm.name: FusedAddRmsNorm}
"""Patch points of this engine, by name."""


def _operator() -> Any:
    """The operator's definition.

    Raises:
        MissingError: TensorRT-LLM is not installed, or cannot be imported.
        VerificationError: this TensorRT-LLM does not define the operator.
    """
    operator = getattr(_imported(_OPS), FusedAddRmsNorm.name, None)
    if operator is None:
        raise VerificationError(
            f"there is no trtllm::{FusedAddRmsNorm.name}: TensorRT-LLM defines it only if "
            "flashinfer can be imported",
            "install the flashinfer that this TensorRT-LLM requires",
        )
    if not isinstance(operator, CustomOpDef):
        raise VerificationError(
            f"{_OPS}.{FusedAddRmsNorm.name} is not a torch custom operator but {operator!r}",
            "remove the other patch first",
        )
    return operator


def _norm() -> Any:
    return _imported("tensorrt_llm._torch.modules.rms_norm").RMSNorm


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingError(
            f"TensorRT-LLM cannot be imported: {error}",
            "run this where it is installed (NVIDIA's release container has it)",
        ) from error


def _disabled(op: Any) -> set[str]:
    """Devices whose kernel is disabled.

    This is the set behind `CustomOpDef.set_kernel_enabled`, a context manager that cannot disable a
    kernel permanently.
    """
    devices: set[str] = op._disabled_kernel
    return devices


def write_module(
    folder: Path,
    *,
    tensor_parallel: int = 1,
    model: str = "gpt_oss",
    architecture: str = "GptOss",
) -> Path:
    """Write a package for `--custom_module_dirs` of trtllm-bench and trtllm-serve.

    TensorRT-LLM imports it in the main process. Its workers import it because it registers a model
    class: older versions send them the class, whose unpickling imports its module, and newer ones
    send the module's name (`export_external_model_modules`). Both happen before the model is built,
    warmed up or recorded.

    Args:
        folder: where the package is written; workers get this folder in `sys.path`.
        tensor_parallel: the number of workers that will share a layer (`--tp`).
        model: suffix of the module `tensorrt_llm._torch.models.modeling_<model>`.
        architecture: prefix of its class `<architecture>ForCausalLM`.

    Returns:
        The package's folder.

    Raises:
        UsageError: the package cannot be written.
    """
    package = folder / MODULE
    text = _TEMPLATE.format(
        model=model, architecture=f"{architecture}ForCausalLM", tensor_parallel=tensor_parallel
    )
    try:
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {package}: {error.strerror}", "choose another folder"
        ) from error
    return package


_TEMPLATE = '''"""Made by patcher for --custom_module_dirs; all processes of TensorRT-LLM import it.

It does nothing unless TLLM_PATCHER_PATCHES enables patches. To disable it, omit the option.
"""

from patcher.integrate.tensorrt_llm import join
from tensorrt_llm._torch.models import modeling_{model}
from tensorrt_llm._torch.models.modeling_utils import register_auto_model

ACTIVATION = join(tensor_parallel={tensor_parallel})


@register_auto_model("{architecture}")
class {architecture}(modeling_{model}.{architecture}):
    """The engine's own model, registered here so that the workers import this module."""
'''


def join(tensor_parallel: int = 1) -> Activation:
    """Install the enabled patches in this process; the generated package calls it.

    Args:
        tensor_parallel: the number of workers that share a layer.

    Raises:
        PatcherError: with `TLLM_PATCHER_STRICT`, the reason why a patch was not installed.
    """
    unseen = unseen_by_workers()
    for name in [name for name in os.environ if name.startswith("TLLM_PATCHER_")]:
        os.environ.setdefault(name.removeprefix("TLLM_"), os.environ[name])
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        # read now, since receipts are still written after MPI has ended
        os.environ["PATCHER_RANK"] = str(mpi.COMM_WORLD.Get_rank())
    if unseen is not None:
        if Switches.read().strict:
            raise unseen
        log.error("%s", unseen)
    return activate(ENGINE, tensor_parallel=tensor_parallel)


def unseen_by_workers() -> UsageError | None:
    """An error if patches are enabled by a variable that workers do not receive, else None."""
    for name in ("PATCHER_PATCHES", "PATCHER_HOME", "PATCHER_RECEIPTS"):
        if os.environ.get(name) and not os.environ.get(f"TLLM_{name}"):
            return UsageError(
                f"{name} is set and TLLM_{name} is not: TensorRT-LLM passes only variables that "
                "begin with TLLM or TRTLLM to its workers, so they would run unpatched",
                f"export TLLM_{name}={shlex.quote(os.environ[name])}",
            )
    return None


def check_workers(folder: Path, digests: Iterable[str], world_size: int) -> dict[int, int]:
    """Check that every patch ran on every rank.

    The process that starts the workers also writes a receipt, without calls; under mpiexec it even
    has a rank. So a rank has run a patch if one of its processes has.

    Args:
        folder: `TLLM_PATCHER_RECEIPTS` of one finished run.
        digests: digests of the patches that should have run.
        world_size: the number of ranks.

    Returns:
        The calls of patched kernels by rank.

    Raises:
        VerificationError: a rank has no receipt of a patch, did not install it, or never called it;
            or the folder also holds receipts of other runs.
    """
    calls: dict[int, int] = defaultdict(int)
    receipts = read_receipts(folder)
    for digest in digests:
        ranks: dict[int, list[Receipt]] = defaultdict(list)
        for receipt in receipts:
            if receipt.digest == digest:
                ranks[receipt.rank or 0].append(receipt)
        written = sum(map(len, ranks.values()))
        if written > world_size + 1:
            raise VerificationError(
                f"{folder} holds {written} receipts of a patch, one run writes {world_size + 1}",
                "use a separate folder for each run, since a receipt of another run proves nothing",
            )
        for rank in range(world_size):
            calls[rank] += _check_rank(ranks[rank], f"rank {rank} of {world_size}")
    return dict(calls)


def _check_rank(receipts: list[Receipt], who: str) -> int:
    if not receipts:
        raise VerificationError(
            f"{who} wrote no receipt: it ran unpatched",
            f"pass --custom_module_dirs with the folder {MODULE}, and set TLLM_PATCHER_PATCHES, "
            "TLLM_PATCHER_HOME and TLLM_PATCHER_RECEIPTS",
        )
    for receipt in receipts:
        if receipt.failure is not None:
            raise VerificationError(
                f"{who} ran unpatched: {receipt.failure}", "fix that, and run it again"
            )
    total = sum(receipt.total_calls for receipt in receipts)
    if total == 0:
        reasons = {reason for receipt in receipts for reason in receipt.fallbacks}
        why = f": {', '.join(sorted(reasons))}" if reasons else ""
        raise VerificationError(
            f"{who} never called {receipts[0].patch_id}{why}",
            "see the patch's guards; with tensor parallelism gpt-oss normalises in its all-reduce",
        )
    return total
