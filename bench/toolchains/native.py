"""C++ and CUDA: one generated translation unit around the candidate's source.

apache-tvm-ffi is the binding (flashinfer builds with it too): its headers compile in about two
seconds on two cores, where PyTorch's take over twenty. A source that includes PyTorch's headers,
which models like to write, is bound with pybind11; for C++ those headers are then precompiled once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

from bench.candidate import Candidate, Language
from bench.contract import Contract
from bench.environment import cpu_instructions
from bench.errors import MissingError
from bench.toolchains import Built, cache_root

BUILD_TIMEOUT_S = 120.0
"""Of one candidate; `$PATCHER_BUILD_TIMEOUT_S` says otherwise."""
HEADER_TIMEOUT_S = 600.0
"""Of PyTorch's headers, which are ours to compile."""
LOG_LIMIT = 20_000

FFI_UNIT = """\
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include "{source}"
TVM_FFI_DLL_EXPORT_TYPED_FUNC({entry}, {entry})
"""

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


class _Native(ABC):
    """What C++ and CUDA share: unit, cache, run."""

    language: Language
    compiler: str
    suffix: str

    def missing(self) -> str | None:
        return None if shutil.which(self.compiler) else f"{self.compiler} is not on PATH"

    @abstractmethod
    def flags(self) -> list[str]: ...

    def torch_flags(self) -> list[str]:
        return []

    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        if reason := self.missing():
            raise MissingError(
                f"cannot build {self.language}: {reason}", f"install {self.compiler}"
            )
        through_torch = binds_with_torch(candidate.source)
        unit = (TORCH_UNIT if through_torch else FFI_UNIT).format(
            source=candidate.file_name, entry=contract.name
        )
        includes, libraries = _torch_paths() if through_torch else _ffi_paths()
        flags = self.flags()
        if through_torch:
            flags += ["-DTORCH_EXTENSION_NAME=candidate", *self.torch_flags()]
            if "PYBIND11_MODULE" in candidate.source or "TORCH_LIBRARY" in candidate.source:
                flags.append("-DPATCHER_OWN_BINDING")
        command = [
            self.compiler,
            *flags,
            *(part for path in includes for part in ("-isystem", path)),
            f"unit{self.suffix}",
            "-o",
            "candidate.so",
            *libraries,
        ]
        key = hashlib.sha256(
            "\0".join(
                [candidate.digest, unit, _version(self.compiler), cpu_instructions(), *command]
            ).encode()
        ).hexdigest()[:32]
        done = folder / key
        told = [Path(flag).name if flag.startswith("/") else flag for flag in flags]
        shown = " ".join([self.compiler, *told, f"unit{self.suffix}"])
        binding = "torch" if through_torch else "tvm-ffi"
        if (done / "candidate.so").is_file():
            return Built(
                language=self.language,
                path=done / "candidate.so",
                binding=binding,
                command=shown,
                log=(done / "build.log").read_text(encoding="utf-8"),
                seconds=0.0,
                cached=True,
            )
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"{key}.", dir=folder) as scratch:
            work = Path(scratch)
            (work / candidate.file_name).write_text(candidate.source, encoding="utf-8")
            (work / f"unit{self.suffix}").write_text(unit, encoding="utf-8")
            code, log = run_compiler(command, work)
            log = _without_paths(log, work)[:LOG_LIMIT]
            path = None
            if code == 0 and (work / "candidate.so").is_file():
                (work / "build.log").write_text(log, encoding="utf-8")
                path = done / "candidate.so"
                if not done.exists():
                    staged = Path(tempfile.mkdtemp(prefix="done.", dir=folder))
                    for name in ("candidate.so", "build.log", candidate.file_name):
                        shutil.copy2(work / name, staged / name)
                    try:
                        staged.rename(done)
                    except OSError:  # another process finished the same build first
                        shutil.rmtree(staged)
        return Built(
            language=self.language,
            path=path,
            binding=binding,
            command=shown,
            log=log if path else log or f"{self.compiler} exited with {code} and no message",
            seconds=time.monotonic() - begin,
            cached=False,
        )


class CppToolchain(_Native):
    language = Language.CPP
    compiler = "g++"
    suffix = ".cpp"

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

    def missing(self) -> str | None:
        if shutil.which("nvcc", path=_search_path()) is None:
            return "nvcc is not on PATH or in CUDA_HOME"
        return None

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


def cuda_arch() -> str:
    """The compute capability at hand as nvcc spells it; Hopper (`sm_90a`) where no GPU is."""
    import torch

    if not torch.cuda.is_available():
        return "sm_90a"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def run_compiler(
    command: list[str], folder: Path, timeout_s: float | None = None
) -> tuple[int, str]:
    """Run a compiler confined to a folder of its own: no network, no GPU, nothing of the user's
    files, no inherited environment; killed with all that it started.
    """
    # imported late: the sandbox hides the project, and so knows its packages
    from bench.judge import sandbox

    if timeout_s is None:
        timeout_s = float(os.environ.get("PATCHER_BUILD_TIMEOUT_S", BUILD_TIMEOUT_S))
    also = [cache_root() / "pch", *(_prefix(name) for name in (command[0], "g++"))]
    policy = sandbox.build_policy(folder, also=[path for path in also if path.is_dir()])
    environment = {
        "PATH": _search_path(),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LC_ALL": "C.UTF-8",
    }
    process = subprocess.Popen(
        sandbox.command(policy, *command),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return 124, f"the compiler was stopped after {timeout_s:g} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, output.decode("utf-8", "replace")


def _prefix(compiler: str) -> Path:
    """Where a compiler is installed, with what it needs beside it."""
    found = shutil.which(compiler, path=_search_path())
    return Path(os.path.realpath(found)).parent.parent if found else Path()


def _search_path() -> str:
    path = os.environ.get("PATH", os.defpath)
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return os.pathsep.join([path, *(f"{home}/bin" for home in homes if home)])


def _version(compiler: str) -> str:
    result = subprocess.run(
        [compiler, "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": _search_path()},
    )
    return result.stdout


def _ffi_paths() -> tuple[list[str], list[str]]:
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    includes = dict.fromkeys([str(find_include_path()), str(find_dlpack_include_path())])
    return list(includes), [str(find_libtvm_ffi())]


def _torch_paths() -> tuple[list[str], list[str]]:
    """Include folders and libraries; no rpath: the process that loads the result has PyTorch's
    libraries already.
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
    """`torch/extension.h` precompiled for these flags; made once, in about half a minute."""
    import torch

    includes, _ = _torch_paths()
    key = hashlib.sha256(
        "\0".join([_version(compiler), torch.__version__, *flags]).encode()
    ).hexdigest()[:16]
    folder = cache_root() / "pch" / key
    header, compiled = folder / "torch_extension.h", folder / "torch_extension.h.gch"
    if not compiled.is_file():
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
            os.replace(Path(scratch) / "out.gch", compiled)
    return header


def _without_paths(log: str, work: Path) -> str:
    """Compiler messages as feedback: file names stay, folders of this machine go."""
    return re.sub(r"(?:/[^\s:'\"]+)+/", "", log.replace(f"{work}/", ""))
