"""PTX: assembled by ptxas, and put into a shared library whose host function launches it.

The host function is generated from the directives of the source, so a PTX kernel is loaded, judged,
bundled and applied as a CUDA one is. It finds CUDA's driver in the process that loads it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import Contract
from patcher.bench.toolchains import Built, Missing, Toolchain
from patcher.bench.toolchains.compilers import CompileJob, compiled, find, version
from patcher.bench.toolchains.native import cuda_arch, ffi_abi, ffi_paths
from patcher.bench.toolchains.ptx_source import PtxKernel, PtxSourceError, kernels_of

_WHEELS = (
    ("triton", "backends/nvidia/bin"),
    ("nvidia.cuda_nvcc", "bin"),
    ("nvidia.cu13", "bin"),
)
"""Packages that bring ptxas, and where in them it is."""
_FLAGS = ("-O3", "-v", "--warn-on-spills")
_CUBIN, _UNIT = "kernels.cubin", "unit.cpp"

_HOST = """\
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>

namespace {{
alignas(64) const unsigned char image[] = {{{image}}};

// CUDA's driver, whose functions have had these types since CUDA 12.0
struct Driver {{
  int (*get_current)(void**);
  int (*set_current)(void*);
  int (*retain)(void**, int);
  int (*load)(void**, const void*, void*, void**, unsigned, void*, void**, unsigned);
  int (*get)(void**, void*, const char*);
  int (*set)(int, int, void*, int);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**);
  int (*describe)(int, const char**);
  void* library = nullptr;

  Driver() {{
    void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) TVM_FFI_THROW(RuntimeError) << "CUDA's driver is not here";
    find(handle, "cuCtxGetCurrent", get_current);
    find(handle, "cuCtxSetCurrent", set_current);
    find(handle, "cuDevicePrimaryCtxRetain", retain);
    find(handle, "cuLibraryLoadData", load);
    find(handle, "cuLibraryGetKernel", get);
    find(handle, "cuKernelSetAttribute", set);
    find(handle, "cuLaunchKernel", launch);
    find(handle, "cuGetErrorString", describe);
    check(load(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0));
  }}

  template <typename F>
  static void find(void* handle, const char* name, F& function) {{
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (function == nullptr) TVM_FFI_THROW(RuntimeError) << "CUDA's driver has no " << name;
  }}

  void check(int status) const {{
    if (status == 0) return;
    const char* text = "unknown error";
    describe(status, &text);
    TVM_FFI_THROW(RuntimeError) << text;
  }}
}};

bool has_dtype(const tvm::ffi::TensorView& tensor, int code, int bits, int lanes) {{
  const DLDataType type = tensor.dtype();
  return type.code == code && type.bits == bits && type.lanes == lanes;
}}

void run(const char* name, const int64_t (&grid)[3], const int64_t (&block)[3], int64_t shared,
         DLDevice device, void** arguments) {{
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
  static const Driver driver;
  void* context = nullptr;
  driver.check(driver.get_current(&context));
  if (context == nullptr) {{  // a thread in which nothing of CUDA has run yet
    driver.check(driver.retain(&context, device.device_id));
    driver.check(driver.set_current(context));
  }}
  void* kernel = nullptr;
  driver.check(driver.get(&kernel, driver.library, name));
  if (shared > 48 * 1024) {{  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.check(driver.set(8, static_cast<int>(shared), kernel, device.device_id));
  }}
  void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  driver.check(driver.launch(
      kernel, static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]),
      static_cast<unsigned>(grid[2]), static_cast<unsigned>(block[0]),
      static_cast<unsigned>(block[1]), static_cast<unsigned>(block[2]),
      static_cast<unsigned>(shared), stream, arguments, nullptr));
}}
}}  // namespace

void {entry}({signature}) {{
{launches}
  TVM_FFI_THROW(TypeError) << "no kernel of {file} takes these tensors";
}}
TVM_FFI_DLL_EXPORT_TYPED_FUNC({entry}, {entry})
"""

_LAUNCH = """\
  if ({condition}) {{
    {values}
    void* arguments[] = {{{addresses}}};
    return run("{name}", {{{grid}}}, {{{block}}}, {shared}, {tensor}.device(), arguments);
  }}"""


class PtxToolchain(Toolchain):
    language = Language.PTX

    def missing(self) -> Missing | None:
        if find_ptxas() is None:
            return Missing(
                reason="ptxas is in neither PATH, CUDA_HOME, triton nor nvidia-cuda-nvcc",
                fix="install the CUDA toolkit, or pip install nvidia-cuda-nvcc",
            )
        if not find("g++"):
            return Missing(
                reason="g++, which builds the host function, is not here", fix="install g++"
            )
        return None

    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        self.demand()
        ptxas, arch = find_ptxas(), cuda_arch()
        assert ptxas is not None
        shown = f"ptxas {' '.join(_FLAGS)} -arch={arch} {candidate.file_name}"
        try:
            kernels = kernels_of(candidate.source, candidate.file_name, contract)
        except PtxSourceError as error:
            return Built(
                language=self.language,
                path=None,
                binding="tvm-ffi",
                command=shown,
                log=str(error),
                seconds=0.0,
                cached=False,
            )
        assembly = CompileJob(
            files={},
            command=(ptxas, *_FLAGS, f"-arch={arch}", candidate.file_name, "-o", _CUBIN),
            product=_CUBIN,
            binding="none",
            shown=shown,
            version=version(ptxas),
        )
        made = compiled(candidate, assembly, folder)
        if made.path is None:
            return made.model_copy(update={"binding": "tvm-ffi"})
        includes, libraries = ffi_paths()
        host = CompileJob(
            files={
                _UNIT: host_unit(contract, candidate.file_name, kernels, made.path.read_bytes())
            },
            command=(
                *("g++", "-O2", "-std=c++17", "-fPIC", "-shared"),
                *(part for path in includes for part in ("-isystem", path)),
                *(_UNIT, "-o", "candidate.so", *libraries, "-ldl"),
            ),
            product="candidate.so",
            binding="tvm-ffi",
            shown=shown,
            version=version("g++"),
            built_for=ffi_abi(),
        )
        whole = compiled(candidate, host, folder)
        log = "\n".join(filter(None, (made.log, whole.log)))
        return whole.model_copy(update={"log": log, "seconds": made.seconds + whole.seconds})


def host_unit(
    contract: Contract, file_name: str, kernels: list[PtxKernel], cubin: bytes = b"\0"
) -> str:
    """The C++ that launches the kernels of a cubin as a contract's op."""
    tensors = [f"tvm::ffi::TensorView {tensor.name}" for tensor in contract.tensors]
    types = {"float": "double", "int": "int64_t"}
    scalars = [f"{types[scalar.type]} {scalar.name}" for scalar in contract.scalars]
    first = contract.tensors[0].name
    return _HOST.format(
        image=",".join(map(str, cubin)),
        entry=contract.name,
        signature=", ".join([*tensors, *scalars]),
        launches="\n".join(_launch(kernel, first) for kernel in kernels),
        file=file_name,
    )


def _launch(kernel: PtxKernel, tensor: str) -> str:
    names = [f"argument_{number}" for number in range(len(kernel.arguments))]
    values = [
        f"{kind} {name} = {value};"
        for name, (kind, value) in zip(names, kernel.arguments, strict=True)
    ]
    return _LAUNCH.format(
        condition=" && ".join(f"({each})" for each in kernel.conditions) or "true",
        values="\n    ".join(values),
        addresses=", ".join(f"&{name}" for name in names) or "nullptr",
        name=kernel.name,
        grid=", ".join(kernel.grid),
        block=", ".join(kernel.block),
        shared=kernel.shared,
        tensor=tensor,
    )


def find_ptxas() -> str | None:
    """ptxas of PATH or CUDA_HOME, else of a package that brings it."""
    return find("ptxas") or next(_in_packages(), None)


def _in_packages() -> Iterator[str]:
    for package, inside in _WHEELS:
        for place in _folders(package):
            file = Path(place) / inside / "ptxas"
            if os.access(file, os.X_OK) and file.is_file():
                yield str(file)


@cache
def _folders(package: str) -> tuple[str, ...]:
    """Where a package is installed; nothing of it is imported but a namespace around it."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return ()
    return tuple(spec.submodule_search_locations or ()) if spec else ()
