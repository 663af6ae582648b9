"""The ways in which the installed vLLM can serve a model: what a search of the best one tries.

`python -P -m patcher.bench.engines.vllm_options` asks vLLM, in a process that ends with the answer,
since importing vLLM takes seconds and much memory. Names come from vLLM's own types, as in 0.25.1
to 0.33.0; attention backends also say themselves what they support. Left out is what this GPU, this
model or one GPU alone cannot run; what else does not fit fails in its trial, with vLLM's reason.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from patcher.bench.engines.architecture import published_config, quantization
from patcher.bench.engines.child_errors import child_failed
from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.machine.environment import engine_environment
from patcher.bench.workload import Workload

Options = tuple[tuple[dict[str, Any], ...], ...]

SECONDS = 300
OTHER_VENDORS = ("aiter", "flydsl", "rdna", "rocm", "xpu", "cpu")
"""What names of backends of other GPUs contain."""
MANY_GPUS = ("mega_moe", "moe_ep", "mega_deep_gemm", "batched")
"""What names of backends contain that exchange tokens between GPUs."""
OTHER_CACHES = ("diffkv", "quant")
"""What names of attention backends contain whose cache has values of another width or format."""
GENERATIONS = {"b12x": 12, "trtllm": 10, "cutedsl": 10}
"""What names contain that need a major compute capability: exactly 12, or at least 10."""
EXPERTS_ALONE = ("mxfp4",)
"""Quantisations that leave linear layers as they are, as `Mxfp4Config.get_quant_method` does."""
EXPERT_FORMATS = {"awq": "int_wna16", "gptq": "int_wna16"}
"""vLLM's name of the format of experts, where it is not the quantisation's."""
_CHOOSER = re.compile(r"map_\w+_backend")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What config.json calls the number of experts of a layer."""


def options(workload: Workload) -> Options:
    """The options to try, each with its values; see `patcher.bench.ab.tuning`.

    Raises:
        PatcherError: the installed vLLM does not answer.
    """
    command = [sys.executable, "-P", "-m", __spec__.name, workload.model_dump_json()]
    try:
        done = subprocess.run(
            command, env=engine_environment(), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise PatcherError(f"vLLM did not list its backends within {SECONDS} s") from error
    if done.returncode != 0:
        raise child_failed("the list of vLLM's backends", done.returncode, done.stderr.encode())
    found: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return tuple(tuple(ways) for ways in found)


def ask(workload: Workload) -> Options:
    """As `options`, asked in this process."""
    kernel: Any = importlib.import_module("vllm.config.kernel")
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    capability = platform.get_device_capability()
    try:
        model = published_config(workload.model)
    except UsageError:
        model = None  # on the hub: it may have experts, and quantised layers
    ways = [
        _values("attention_backend", attention_backends(workload, model, capability)),
        tuple({"compilation_config": {"cudagraph_mode": name}} for name in graph_modes()),
        _values(
            "linear_backend", linear_backends(get_args(kernel.LinearBackend), model, capability)
        ),
    ]
    if model is None or any(model.get(name) for name in EXPERTS):
        names = runnable(get_args(kernel.MoEBackend), capability)
        ways.insert(0, _values("moe_backend", of_format(names, model)))
    return tuple(each for each in ways if each)


def runnable(names: Iterable[str], capability: Any) -> list[str]:
    """Those of the kernels' names that may run on one GPU of this kind.

    Args:
        names: of backends, such as `flashinfer_trtllm`.
        capability: its compute capability; None: unknown.
    """
    flashinfer = importlib.import_module("vllm.utils.flashinfer").has_flashinfer()
    major = None if capability is None else int(capability.major)

    def fits(name: str) -> bool:
        lower = name.lower()
        if lower in ("auto", "emulation") or any(one in lower for one in OTHER_VENDORS + MANY_GPUS):
            return False
        if "flashinfer" in lower and not flashinfer:
            return False
        needed = next((GENERATIONS[one] for one in GENERATIONS if one in lower), None)
        if needed is None or major is None:
            return True
        return major == needed if needed == GENERATIONS["b12x"] else major >= needed

    return [name for name in names if fits(name)]


def of_format(names: Iterable[str], model: Mapping[str, Any] | None) -> list[str]:
    """Those of the experts' backends that vLLM has for the format of the model's experts; all where
    the model's config.json is not at hand, or this version has no list for its format.
    """
    if model is None:
        return list(names)
    method = quantization(model).get("quant_method", "unquantized")
    name = EXPERT_FORMATS.get(method, method)
    try:
        module: Any = importlib.import_module(f"vllm.model_executor.layers.fused_moe.oracle.{name}")
    except ImportError:
        return list(names)
    chooser = next((one for each, one in vars(module).items() if _CHOOSER.fullmatch(each)), None)
    if chooser is None:
        return list(names)

    def has(backend: str) -> bool:
        try:
            chooser(backend)
        except ValueError:  # as vLLM says it to whoever asks for that backend
            return False
        return True

    return [backend for backend in names if has(backend)]


def attention_backends(
    workload: Workload, model: Mapping[str, Any] | None, capability: Any
) -> list[str]:
    """The attention backends that say that they take the model's heads and dtype on this GPU."""
    import torch

    registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    selector: Any = importlib.import_module("vllm.v1.attention.selector")
    model = model or {}
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    size = model.get("head_dim") or (hidden // heads if heads and hidden else 128)
    asked = selector.AttentionSelectorConfig(
        head_size=size,
        dtype=getattr(torch, workload.dtype),
        kv_cache_dtype="auto",
        block_size=None,
        use_mla=bool(model.get("kv_lora_rank")),
    )
    found = []
    for name, backend in registry.AttentionBackendEnum.__members__.items():
        other = any(one in name.lower() for one in OTHER_CACHES)
        # some are of one model, which chooses them itself
        if not backend.value or other or backend.value.startswith("vllm.models."):
            continue
        if name not in runnable([name], capability):
            continue
        try:
            kind = backend.get_class()
        except Exception:  # what its modules raise where their kernels are not installed
            continue
        if kind.is_mla() != asked.use_mla:
            continue
        try:
            wrong = kind.validate_configuration(device_capability=capability, **asked._asdict())
        except Exception:  # of code that asks the device; its trial says what is wrong
            wrong = []
        if not wrong:
            found.append(name)
    return found


def graph_modes() -> list[str]:
    """The modes of CUDA graphs in which decode is recorded."""
    mode: Any = importlib.import_module("vllm.config.compilation").CUDAGraphMode
    return [name for name in mode.__members__ if name != "NONE"]


def linear_backends(
    names: Iterable[str], model: Mapping[str, Any] | None, capability: Any
) -> list[str]:
    """The backends that change a linear layer of the model; vLLM only warns of others."""
    quantised = {} if model is None else quantization(model)
    if model is None or quantised.get("quant_method", EXPERTS_ALONE[0]) not in EXPERTS_ALONE:
        return runnable(names, capability)
    layers: Any = importlib.import_module("vllm.model_executor.layers.utils")
    plain = getattr(layers, "_FLASHINFER_BF16_BACKENDS", {})  # from 0.33.0 on
    return [name for name in runnable(names, capability) if name in plain]


def _values(option: str, names: Iterable[str]) -> tuple[dict[str, Any], ...]:
    return tuple({option: name} for name in names)


def main() -> int:
    """Print the options of the workload on the command line as the last line."""
    found = ask(Workload.model_validate_json(sys.argv[1]))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
