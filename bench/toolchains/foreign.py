"""HIP, SYCL and Metal: compiled if their compiler is installed, but neither run nor timed.

This project cannot run them on a device, so the judge can only say that a source compiles. The
result is an object file that is never loaded.
"""

from __future__ import annotations

import functools
import os
import tempfile
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import Contract
from patcher.bench.ops.dtypes import DTYPES
from patcher.bench.toolchains import Built, Missing, Toolchain
from patcher.bench.toolchains.compilers import CompileJob, compiled, find, run_compiler, version
from patcher.bench.toolchains.native import FFI_UNIT, ffi_abi, ffi_paths

HIP_ARCH = "gfx90a"
"""GPU architecture for HIP, unless `$PATCHER_HIP_ARCH` is set."""


class _CompileOnly(Toolchain):
    suffix: str
    product: str = "candidate.o"
    lack: Missing
    environment: ClassVar[dict[str, str]] = {}

    @abstractmethod
    def compiler(self) -> list[str]:
        """The installed compiler with the options for its language, or nothing."""
        ...

    def missing(self) -> Missing | None:
        return None if self.compiler() else self.lack

    def unit(self, candidate: Candidate, contract: Contract) -> str:
        return FFI_UNIT.format(source=candidate.file_name, entry=contract.name)

    def flags(self) -> list[str]:
        return ["-O3", "-std=c++17", "-fPIC"]

    def includes(self) -> list[str]:
        return [part for path in ffi_paths()[0] for part in ("-isystem", path)]

    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        self.demand()
        unit, command = f"unit{self.suffix}", [*self.compiler(), *self.flags(), "-c"]
        job = CompileJob(
            files={unit: self.unit(candidate, contract)},
            command=(*command, *self.includes(), unit, "-o", self.product),
            product=self.product,
            binding="none",
            shown=" ".join([*command, unit]),
            version=version(command[0]),
            built_for=ffi_abi(),
            environment=self.environment,
        )
        return compiled(candidate, job, folder)


class HipToolchain(_CompileOnly):
    language = Language.HIP
    suffix = ".hip"
    lack = Missing(
        reason="hipcc is not on PATH or in ROCM_PATH",
        fix="install ROCm's hipcc (on Debian and Ubuntu: apt install hipcc), or set ROCM_PATH",
    )
    environment: ClassVar[dict[str, str]] = {
        "HIP_PLATFORM": "amd"
    }  # if a CUDA toolkit is installed, hipcc would use nvcc

    def compiler(self) -> list[str]:
        return ["hipcc"] if find("hipcc") else []

    def flags(self) -> list[str]:
        arch = os.environ.get("PATCHER_HIP_ARCH", HIP_ARCH)
        return [*super().flags(), f"--offload-arch={arch}"]


class SyclToolchain(_CompileOnly):
    language = Language.SYCL
    suffix = ".cpp"
    lack = Missing(
        reason="none of icpx, acpp and a clang++ with SYCL is on PATH",
        fix="install Intel's oneAPI DPC++ compiler (icpx) or AdaptiveCpp (acpp)",
    )

    def compiler(self) -> list[str]:
        if find("icpx"):
            return ["icpx", "-fsycl"]
        if find("acpp"):
            return ["acpp"]
        clang = find("clang++")
        return ["clang++", "-fsycl"] if clang and _has_sycl(clang) else []


class MetalToolchain(_CompileOnly):
    language = Language.METAL
    suffix = ".metal"
    product = "candidate.air"
    lack = Missing(
        reason="xcrun is not on PATH: Metal's compiler is for macOS only",
        fix="on a Mac: install Xcode, then `xcodebuild -downloadComponent MetalToolchain`",
    )

    def compiler(self) -> list[str]:
        return ["xcrun", "-sdk", "macosx", "metal"] if find("xcrun") else []

    def flags(self) -> list[str]:
        return ["-O3", "-std=metal3.1"]

    def includes(self) -> list[str]:
        return []

    def unit(self, candidate: Candidate, contract: Contract) -> str:
        """The source once for each combination of dtypes, with each symbol of the contract as a
        macro.
        """
        parts = ["#include <metal_stdlib>"]
        for index, dtypes in enumerate(contract.dtype_choices()):
            known = {symbol: DTYPES[dtype].metal for symbol, dtype in dtypes.items()}
            if None in known.values():
                continue
            parts.append(f"namespace dtypes_{index} {{")
            parts += [f"#define {symbol} {name}" for symbol, name in known.items()]
            parts.append(f'#include "{candidate.file_name}"')
            parts += [f"#undef {symbol}" for symbol in known]
            parts.append("}")
        return "\n".join(parts) + "\n"


@functools.cache
def _has_sycl(clang: str) -> bool:
    """Whether this clang++ finds SYCL's headers, since every build accepts the option."""
    with tempfile.TemporaryDirectory(prefix="patcher-sycl-") as folder:
        (Path(folder) / "probe.cpp").write_text("#include <sycl/sycl.hpp>\n", encoding="utf-8")
        code, _ = run_compiler([clang, "-fsycl", "-fsyntax-only", "probe.cpp"], Path(folder))
    return code == 0
