"""C++ and CUDA: one generated translation unit around the candidate's source.

apache-tvm-ffi is the binding (flashinfer builds with it too): its headers compile in about two
seconds on two cores, PyTorch's in over twenty. A source that includes PyTorch's headers, as models
often write, is bound with pybind11; for C++ those headers are then precompiled once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sysconfig
import tempfile
from abc import abstractmethod
from pathlib import Path

from patcher.bench.errors import MissingError
from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import Contract
from patcher.bench.toolchains import Built, Missing, Toolchain, cache_root
from patcher.bench.toolchains.compilers import CompileJob, compiled, find, run_compiler, version

HEADER_TIMEOUT_S = 600.0
"""Time limit in seconds to precompile PyTorch's headers, which are trusted code."""
CAPABILITY = "PATCHER_CUDA_CAPABILITY"
"""Environment variable with the compute capability to build for, as 9.0."""

FFI_UNIT = """\
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include "{source}"
TVM_FFI_DLL_EXPORT_TYPED_FUNC({entry}, {entry})  // one plain function: no template, no overload
"""
"""Compilers show this line where the entry cannot be bound: its comment is for who reads that."""

TORCH_UNIT = """\
#include <torch/extension.h>
#include "{source}"
#ifndef PATCHER_OWN_BINDING
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {{ module.def("{entry}", &{entry}); }}
#endif
"""

_TORCH_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10)/', re.MULTILINE)


def binds_with_torch(source: str) -> bool:
    """Whether a C++ or CUDA source is bound with pybind11, since it includes PyTorch's headers."""
    return bool(_TORCH_INCLUDE.search(source))


class _Native(Toolchain):
    """Shared by C++ and CUDA: translation unit and command."""

    compiler: str
    suffix: str
    lack: Missing

    def missing(self) -> Missing | None:
        return None if find(self.compiler) else self.lack

    @abstractmethod
    def flags(self) -> list[str]: ...

    def torch_flags(self) -> list[str]:
        return []

    def built_with(self) -> tuple[str, ...]:
        """Versions of what the compiler uses besides."""
        return ()

    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        self.demand()
        through_torch = binds_with_torch(candidate.source)
        unit = (TORCH_UNIT if through_torch else FFI_UNIT).format(
            source=candidate.file_name, entry=contract.name
        )
        includes, libraries = _torch_paths() if through_torch else ffi_paths()
        flags = self.flags()
        if through_torch:
            flags += ["-DTORCH_EXTENSION_NAME=candidate", *self.torch_flags()]
            if "PYBIND11_MODULE" in candidate.source or "TORCH_LIBRARY" in candidate.source:
                flags.append("-DPATCHER_OWN_BINDING")
        unit_file = f"unit{self.suffix}"
        told = [Path(flag).name if flag.startswith("/") else flag for flag in flags]
        job = CompileJob(
            files={unit_file: unit},
            command=(
                self.compiler,
                *flags,
                *(part for path in includes for part in ("-isystem", path)),
                unit_file,
                "-o",
                "candidate.so",
                *libraries,
            ),
            product="candidate.so",
            binding="torch" if through_torch else "tvm-ffi",
            shown=" ".join([self.compiler, *told, unit_file]),
            version=version(self.compiler),
            built_for=(*self.built_with(), *(_torch_abi() if through_torch else ffi_abi())),
        )
        return compiled(candidate, job, folder)


class CppToolchain(_Native):
    language = Language.CPP
    compiler = "g++"
    suffix = ".cpp"
    lack = Missing(reason="g++ is not on PATH", fix="install g++")

    def flags(self) -> list[str]:
        return ["-O3", "-march=native", "-fopenmp", "-std=c++17", "-fPIC", "-shared"]

    def torch_flags(self) -> list[str]:
        header = _precompiled_torch(
            self.compiler, [*self.flags(), "-DTORCH_EXTENSION_NAME=candidate"]
        )
        return ["-include", str(header)]


class CudaToolchain(_Native):
    language = Language.CUDA
    compiler = "nvcc"
    suffix = ".cu"
    lack = Missing(
        reason="nvcc is not on PATH or in CUDA_HOME",
        fix="install the CUDA toolkit, or set CUDA_HOME",
    )

    def flags(self) -> list[str]:
        return [
            "-O3",
            "-std=c++17",
            f"-arch={cuda_arch()}",
            "-Xcompiler",
            "-fPIC",
            "-shared",
            "-lineinfo",
        ]

    def built_with(self) -> tuple[str, ...]:
        return (version("g++") if find("g++") else "",)  # it compiles the code of the host


def cuda_capability() -> tuple[int, int]:
    """The architecture for CUDA sources: that of the local GPU, or Hopper if there is none.
    `CAPABILITY` overrides it, for a build on behalf of a process that has another GPU.
    """
    if chosen := os.environ.get(CAPABILITY):
        major, _, minor = chosen.partition(".")
        return int(major), int(minor)
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def cuda_arch() -> str:
    """`cuda_capability` as nvcc spells it: `sm_90a`."""
    major, minor = cuda_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def ffi_paths() -> tuple[list[str], list[str]]:
    """Include folders and libraries of apache-tvm-ffi."""
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    includes = dict.fromkeys([str(find_include_path()), str(find_dlpack_include_path())])
    return list(includes), [str(find_libtvm_ffi())]


def ffi_abi() -> tuple[str, ...]:
    """The version of apache-tvm-ffi, whose headers a build includes."""
    return (importlib.metadata.version("apache-tvm-ffi"),)


def _torch_abi() -> tuple[str, ...]:
    """What a build with PyTorch's headers depends on: its version and ABI, CUDA's, Python's."""
    import torch

    return (
        torch.__version__,
        str(torch.version.git_version),
        str(torch.compiled_with_cxx11_abi()),
        str(torch.version.cuda),
        str(sysconfig.get_config_var("SOABI")),
    )


def _torch_paths() -> tuple[list[str], list[str]]:
    """Include folders and libraries, without rpath: the process that loads the result has already
    loaded PyTorch's libraries.
    """
    import torch

    root = Path(torch.__file__).parent
    names = ("c10", "torch_cpu", "torch", "torch_python", "c10_cuda", "torch_cuda")
    libraries = [f"-l{name}" for name in names if (root / f"lib/lib{name}.so").is_file()]
    includes = [
        root / "include",
        root / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    return [str(path) for path in includes], [f"-L{root / 'lib'}", *libraries]


def _precompiled_torch(compiler: str, flags: list[str]) -> Path:
    """Precompile `torch/extension.h` for these flags, once, in about half a minute."""

    includes, _ = _torch_paths()
    key = hashlib.sha256(
        "\0".join([version(compiler), *_torch_abi(), *flags]).encode()
    ).hexdigest()[:16]
    folder = cache_root() / "pch" / key
    header, made = folder / "torch_extension.h", folder / "torch_extension.h.gch"
    if not made.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text("#include <torch/extension.h>\n", encoding="utf-8")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [
                compiler,
                *(flag for flag in flags if flag != "-shared"),
                *(part for path in includes for part in ("-isystem", path)),
                "-x",
                "c++-header",
                str(header),
                "-o",
                "out.gch",
            ]
            code, log = run_compiler(command, Path(scratch), HEADER_TIMEOUT_S)
            if code != 0:
                raise MissingError(
                    "PyTorch's C++ headers do not compile here",
                    "write the candidate against tvm/ffi/container/tensor.h, or fix the compiler: "
                    f"{log[-500:]}",
                )
            os.replace(Path(scratch) / "out.gch", made)
    return header
