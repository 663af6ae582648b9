"""What a figure was made on (device, versions, compiler; never a host, a user or a path), and what
a process that makes one gets of this process's environment.
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

from patcher.bench.records import Record

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "apache-tvm-ffi",
    "nvidia-cutlass-dsl",
    "flashinfer-python",
    "vllm",
)

_KEPT = re.compile(
    r"(HOME|LANG|LC_ALL|LD_LIBRARY_PATH|PATCHER_CACHE|PATH|TMPDIR|XDG_CACHE_HOME|MKL_NUM_THREADS"
    r"|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|(https?|no|HTTPS?|NO)_(proxy|PROXY))$"
    r"|(CUDA|HF|NCCL|NVIDIA|OMP|TORCH|TORCHINDUCTOR|TRANSFORMERS|TRITON|VLLM)_"
)
ROOT = Path(__file__).absolute().parents[3]
"""The folder from which `patcher` is imported: a checkout, or a site-packages."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")


class Environment(Record):
    """Where a figure was made. No host name, path, user or environment variable."""

    device: str
    """GPU or CPU name."""
    device_kind: str
    """`cpu` or `cuda`."""
    capability: str | None = None
    """Compute capability of the GPU, `9.0`."""
    python: str
    packages: dict[str, str]
    """Versions of torch, triton, transformers, ... where installed."""
    driver: str | None = None
    compiler: str | None = None
    clocks: str = "not recorded"
    """`locked at N MHz`, `monitored: ...`, or `not recorded`."""
    threads: int | None = None


def names_secret(variable: str) -> bool:
    """Whether an environment variable holds a secret, by its name."""
    return _SECRET.search(variable) is not None


def engine_environment() -> dict[str, str]:
    """What a process that runs an engine gets of this one's environment: what engines read, no
    key, no proxy with a password; profilers write the environment of what they profile into their
    reports.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if _KEPT.match(name) and not names_secret(name) and "@" not in value
    }
    return {**kept, "PYTHONPATH": python_path(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def python_path(first: Path) -> str:
    """This process's `PYTHONPATH` with a folder before it."""
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def describe(
    device_kind: str,
    threads: int | None = None,
    clocks: str = "not recorded",
    compiler: str | None = None,
) -> Environment:
    """The environment of a measurement on `cpu` or `cuda`; `compiler`: another than is usual for
    the device.
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
    """What figures made on `cpu` or `cuda` depend on and another machine, or an update of this one,
    may have otherwise.
    """
    found = {
        "processor": cpu_name(),
        "instructions": cpu_instructions(),
        "python": platform.python_version(),
        "g++": compiler_version("g++") or "not there",
        **package_versions(),
    }
    if device_kind == "cuda":
        import torch

        found |= {
            "driver": driver_version() or "not there",
            "nvcc": compiler_version("nvcc") or "not there",
            "CUDA of torch": torch.version.cuda or "none",
            "GPU": "not there",
        }
        if torch.cuda.is_available():
            found |= {"GPU": device_name("cuda"), "compute capability": device_capability()}
    return found


def device_name(device_kind: str) -> str:
    """Of the GPU or of the processor."""
    if device_kind == "cpu":
        return cpu_name()
    import torch

    return str(torch.cuda.get_device_name())


def device_capability() -> str:
    """Of the GPU: `9.0`."""
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability())


def fingerprint(device_kind: str, threads: int | None, *more: str) -> str:
    """Of what a figure that is kept depends on: device, driver, libraries, threads, and `more`."""
    driver = driver_version() if device_kind == "cuda" else None
    known = [device_name(device_kind), driver, package_versions(), threads, *more]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24]


@cache
def cpu_name() -> str:
    """The model name that the kernel reports, else the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


@cache
def cpu_instructions() -> str:
    """What this processor can do, as a digest: a virtual machine may hide some of what its model
    has, and a binary built for them would kill the process.
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
    """Versions of the packages that matter to a figure, where installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def driver_version() -> str | None:
    """The NVIDIA driver's version, where NVML answers."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


@cache
def compiler_version(name: str) -> str | None:
    """`g++ 12.2.0`, `nvcc 13.0`, or None where it is not on PATH."""
    found = shutil.which(name)
    if found is None:
        return None
    option = "--acpp-version" if name == "acpp" else "--version"  # acpp passes that one on
    output = subprocess.run([found, option], capture_output=True, text=True, check=False)
    # hipcc beside a CUDA toolkit also tells nvcc's release
    forms = (r"HIP version: (\d+\.\d+\.\d+)", r"release (\d+\.\d+)", r"(\d+\.\d+\.\d+)")
    version = next(filter(None, (re.search(form, output.stdout) for form in forms)), None)
    return f"{name} {version[1]}" if version else name
