"""What this machine has for patcher, and the fix for what it lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from patcher.bench import Language, MissingError, PatcherError, Plugin, UsageError, op_problems
from patcher.bench.machine.clock_finding import clocks_finding
from patcher.bench.machine.installed import compute_sanitizer_finding
from patcher.bench.sandbox.policy import sandbox_description
from patcher.bench.toolchains import cache_root, toolchain
from patcher.extras import missing_of, missing_package
from patcher.finding import Finding, Status
from patcher.hotspot import ncu_finding, nsys_finding
from patcher.models.registry import list_models
from patcher.patch_findings import PATCH_CHECKS
from patcher.plugins import found_plugins
from patcher.settings import resolve

SERVING = ("sglang", "tensorrt_llm", "vllm")
"""Engines that serve models."""


@dataclass(frozen=True)
class Machine:
    """What decides which lacks matter here."""

    nvidia: bool
    """An NVIDIA GPU or its driver."""
    amd: bool
    """An AMD GPU (its kernel driver, or a ROCm build of torch)."""
    mac: bool
    serving: bool
    """Whether an engine that serves models is installed."""

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        return cls(
            nvidia=_cuda_works() or Path("/dev/nvidiactl").exists(),
            amd=Path("/dev/kfd").exists(),
            mac=sys.platform == "darwin",
            serving=any(_version(name) for name in SERVING),
        )

    def wants(self, name: str) -> bool:
        """Whether somebody here is likely to want what a finding of this name is about."""
        variable = f"PATCHER_{name.upper().replace('-', '_')}"
        match name:
            case "toolchain hip":
                return self.amd
            case "toolchain metal":
                return self.mac
            case "toolchain sycl" | "engine sglang" | "engine tensorrt-llm":
                return False
            case "toolchain cutedsl" | "baseline flashinfer":
                return self.nvidia and self.serving
            case "engine vllm":
                return self.nvidia and not self.serving
            case "clocks" | "toolchain cuda" | "toolchain ptx" | "toolchain triton":
                return self.nvidia
            case "nsys" | "ncu" | "compute-sanitizer":
                return self.nvidia or variable in os.environ
        return True


def examine() -> list[Finding]:
    """Look at everything; nothing is changed, and no key is shown.

    Returns:
        One finding for each check, in a fixed order. `Finding.shown` says which of them concern
        this machine.
    """
    checks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        _gpu,
        _clocks,
        *(_compiler(language) for language in Language),
        _nsys,
        _ncu,
        _sanitizer,
        *(_extra(name) for name in EXTRAS),
        *(_package(*engine) for engine in ENGINES),
        _key,
        _sandbox,
        _cache,
        _bytecode,
        *PATCH_CHECKS,
    ]
    machine = Machine.here()
    found = [*(check() for check in checks), *map(_plugin, found_plugins()), *_broken_ops()]
    return [one.model_copy(update={"likely": machine.wants(one.name)}) for one in found]


EXTRAS = ("profile", "report", "agent")
"""Extras of patcher that commands need."""
ENGINES = (
    ("engine transformers", "transformers", "pip install 'transformers>=5.17'", True),
    ("engine vllm", "vllm", "pip install vllm", False),
    ("engine sglang", "sglang", "pip install sglang", False),
    ("engine tensorrt-llm", "tensorrt_llm", "see TensorRT-LLM's guide, then patcher trtllm", False),
    ("baseline flashinfer", "flashinfer-python", "pip install flashinfer-python", False),
)


def _python() -> Finding:
    version = sys.version.split()[0]
    return Finding(name="python", status="ok", detail=version)


def _bytecode() -> Finding:
    """Whether Python finds serving engines compiled, or compiles them in each process."""
    specs = (importlib.util.find_spec(name) for name in SERVING if _version(name))
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    slow = [
        Path(file).parent
        for file in files
        if sys.dont_write_bytecode and not Path(importlib.util.cache_from_source(file)).exists()
    ]
    if not slow:
        return Finding(name="bytecode", status="ok", detail="engines that serve are compiled once")
    names = " and ".join(each.name for each in slow)
    return Finding(
        name="bytecode",
        status="warn",
        detail=f"Python keeps no bytecode, so every process compiles {names} anew when it starts",
        fix=f"unset PYTHONDONTWRITEBYTECODE, or: python -m compileall -q {slow[0].parent}",
    )


def _torch() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding(name="torch", status="fail", detail="not installed", fix="pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding(name="torch", status="ok", detail=f"{torch.__version__} ({build})")


def _gpu() -> Finding:
    if _cuda_works():
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        major, minor = torch.cuda.get_device_capability()
        detail = f"{torch.cuda.get_device_name()}, {memory:.0f} GiB, compute {major}.{minor}"
        return Finding(name="GPU", status="ok", detail=detail)
    if Path("/dev/nvidiactl").exists():
        return Finding(
            name="GPU",
            status="warn",
            detail="an NVIDIA driver is loaded, but torch sees no GPU",
            fix="install a CUDA build of torch that fits the driver, and see nvidia-smi",
        )
    return Finding(
        name="GPU",
        status="ok",
        detail="none: this machine ranks profiles (profile --from FILE), judges cpp kernels, and "
        "runs the demo",
    )


def _cuda_works() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _clocks() -> Finding:
    try:
        status, message, fix = clocks_finding()
    except ImportError as error:
        lacks = missing_package(error)
        return Finding(name="clocks", status="warn", detail=lacks.message, fix=lacks.hint)
    return Finding(name="clocks", status=status, detail=message, fix=fix)


def _compiler(language: Language) -> Callable[[], Finding]:
    needed = language in (Language.CPP, Language.TORCH)

    def check() -> Finding:
        name = f"toolchain {language}"
        try:
            missing = toolchain(language).missing()
        except MissingError as error:  # of a package that cannot be imported
            return Finding(name=name, status="warn", detail=error.message, fix=error.hint)
        if missing is None:
            only = ": compiles only, nothing here runs it" if language.compile_only else ""
            return Finding(name=name, status="ok", detail=f"ready{only}")
        status: Status = "fail" if needed else "warn"
        return Finding(name=name, status=status, detail=missing.reason, fix=missing.fix)

    return check


def _plugin(plugin: Plugin) -> Finding:
    """Something that another package adds, and whether it can be used."""
    name = f"plugin {plugin.group.removeprefix('patcher.')} {plugin.name}"
    if plugin.problem:
        fix = f"repair or uninstall {plugin.origin}"
        return Finding(name=name, status="warn", detail=plugin.problem, fix=fix)
    return Finding(name=name, status="ok", detail=f"{plugin.target}, from {plugin.origin}")


def _broken_ops() -> list[Finding]:
    """Ops of `$PATCHER_OPS` that are left out."""
    try:
        found = op_problems()
    except UsageError as error:
        return [Finding(name="ops", status="warn", detail=error.message, fix=error.hint)]
    return [
        Finding(name=f"op {folder.name}", status="warn", detail=error.message, fix=error.hint)
        for folder, error in found.items()
    ]


def _nsys() -> Finding:
    status, message, fix = nsys_finding()
    return Finding(name="nsys", status=status, detail=message, fix=fix)


def _ncu() -> Finding:
    status, message, fix = ncu_finding()
    return Finding(name="ncu", status=status, detail=message, fix=fix)


def _sanitizer() -> Finding:
    status, message, fix = compute_sanitizer_finding()
    return Finding(name="compute-sanitizer", status=status, detail=message, fix=fix)


def _extra(extra: str) -> Callable[[], Finding]:
    def check() -> Finding:
        name = f"extra {extra}"
        if missing := missing_of(extra):
            detail = f"not installed: {', '.join(missing)}"
            fix = f"pip install 'patcher[{extra}]'"
            return Finding(name=name, status="warn", detail=detail, fix=fix)
        return Finding(name=name, status="ok", detail="installed")

    return check


def _package(name: str, package: str, fix: str, needed: bool) -> Callable[[], Finding]:
    def check() -> Finding:
        if (version := _version(package)) is not None:
            return Finding(name=name, status="ok", detail=version)
        status: Status = "fail" if needed else "warn"
        return Finding(name=name, status=status, detail="not installed", fix=fix)

    return check


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _key() -> Finding:
    """Yes or no for each key that could be used, never the key."""
    try:
        settings = resolve()
        rows = [row for row in list_models(settings.models) if row.key_variable]
    except PatcherError as error:
        return Finding(name="model key", status="fail", detail=error.message, fix=error.hint)
    said = {row.key_variable: "set" if row.has_key else "not set" for row in rows}
    said.setdefault("OPENAI_API_KEY", "set" if os.environ.get("OPENAI_API_KEY") else "not set")
    detail = ", ".join(f"{name} is {state}" for name, state in said.items())
    if "set" in said.values() or settings.model.startswith(("exchange:", "replay:")):
        return Finding(name="model key", status="ok", detail=detail)
    return Finding(
        name="model key",
        status="warn",
        detail=detail,
        fix="for `patcher optimize`: set one, name your own server in [models.NAME] of "
        "patcher.toml, or use --model exchange:DIR",
    )


def _sandbox() -> Finding:
    isolated, detail = sandbox_description()
    if isolated:
        return Finding(name="sandbox", status="ok", detail=detail)
    return Finding(
        name="sandbox",
        status="warn",
        detail=detail,
        fix="permit user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container --security-opt "
        "seccomp=unconfined, or --cap-add SYS_ADMIN); until then judge only kernels that you trust",
    )


def _cache() -> Finding:
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Finding(
            name="cache",
            status="fail",
            detail=f"cannot write it: {error.strerror}",
            fix="set PATCHER_CACHE to a writable folder",
        )
    writable = os.access(root, os.W_OK)
    return Finding(
        name="cache",
        status="ok" if writable else "fail",
        detail="writable" if writable else "not writable",
        fix="" if writable else "set PATCHER_CACHE to a writable folder",
    )
