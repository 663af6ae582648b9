"""Convert a kernel to a Solution of flashinfer-bench: its source, and a wrapper that calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patcher.bench import Candidate, Contract, Language, UsageError
from patcher.bench.toolchains.native import binds_with_torch
from patcher.integrate.formats.flashinfer_definition import output_name

LANGUAGES = {
    Language.CPP: "cpp",
    Language.CUDA: "cuda",
    Language.TRITON: "triton",
    Language.TORCH: "python",
    Language.CUTEDSL: "python",  # the schema has no other Python language
}

PYTHON = '''"""{signature} in destination-passing style. Made by `patcher export`."""

from .{module} import {entry}


def run({parameters}):
{copies}    {entry}({call})
'''

FFI = """\
// {signature} in destination-passing style. Made by `patcher export`.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
{includes}
#include "{header}"

static void patcher_copy(tvm::ffi::TensorView to, tvm::ffi::TensorView from) {{
  if (!to.IsContiguous() || !from.IsContiguous()) throw std::runtime_error("not contiguous");
  const size_t bytes = size_t(from.numel()) * (from.dtype().bits * from.dtype().lanes / 8);
{copy}
}}

static void patcher_run({parameters}) {{
{copies}  {entry}({call});
}}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, patcher_run);
"""

TORCH = """\
// {signature} in destination-passing style. Made by `patcher export`.
#include <torch/extension.h>

#include "{header}"

static void patcher_run({parameters}) {{
{copies}  {entry}({call});
}}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {{ module.def("run", &patcher_run); }}
"""

COPY_CPU = "  std::memcpy(to.data_ptr(), from.data_ptr(), bytes);"
COPY_CUDA = """\
  const auto device = to.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const auto way = cudaMemcpyDeviceToDevice;
  if (cudaMemcpyAsync(to.data_ptr(), from.data_ptr(), bytes, way, stream) != cudaSuccess)
    throw std::runtime_error("the copy failed");"""
INCLUDES_CPU = "\n#include <cstring>\n#include <stdexcept>\n"
INCLUDES_CUDA = """\
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_runtime.h>

#include <stdexcept>
"""


def solution_of(
    candidate: Candidate, contract: Contract, definition: Mapping[str, Any]
) -> dict[str, Any]:
    """The Solution: the judged source, and a wrapper in destination-passing style.

    Raises:
        UsageError: the source binds itself to Python, or the op has the wrapper's name.
    """
    if candidate.op in ("main", "run"):
        message = f"an op called {candidate.op} has the same name as its wrapper"
        raise UsageError(message, "rename the op")
    native = candidate.language in (Language.CPP, Language.CUDA)
    through_torch = native and binds_with_torch(candidate.source)
    main, text = wrapper(candidate, contract, through_torch)
    spec: dict[str, Any] = {
        "language": LANGUAGES[candidate.language],
        "target_hardware": ["cpu" if candidate.language is Language.CPP else "cuda"],
        "entry_point": f"{main}::run",
        "dependencies": ["nvidia-cutlass-dsl"] if candidate.language is Language.CUTEDSL else [],
        "destination_passing_style": True,
    }
    if candidate.language is Language.TORCH:
        spec["target_hardware"] = ["cpu", "cuda"]
    if native:
        spec["binding"] = "torch" if through_torch else "tvm-ffi"
    return {
        "name": f"patcher_{candidate.language}_{candidate.digest[:12]}",
        "definition": definition["name"],
        "author": "patcher",
        "spec": spec,
        "sources": [
            {"path": main, "content": text},
            {"path": header_name(candidate), "content": candidate.source},
        ],
        "description": f"The kernel works in place: {main} copies the tensors that it updates "
        "before calling it. In serving, nothing is copied.",
    }


def header_name(candidate: Candidate) -> str:
    """The source's file name, a header's for C++, since the compiled wrapper includes it."""
    suffix = {Language.CPP: ".hpp", Language.CUDA: ".cuh"}.get(candidate.language, ".py")
    return f"{candidate.op}{suffix}"


def wrapper(candidate: Candidate, contract: Contract, through_torch: bool) -> tuple[str, str]:
    """Name and text of the file with `run`.

    Raises:
        UsageError: the source has its own Python binding.
    """
    given = [each.name for each in contract.tensors if each.access != "write"]
    scalars = [(each.name, each.type) for each in contract.scalars]
    results = {each.name: output_name(each) for each in contract.written}
    updated = [each.name for each in contract.tensors if each.access == "update"]
    call = ", ".join(
        [results.get(each.name, each.name) for each in contract.tensors]
        + [name for name, _ in scalars]
    )
    if candidate.language.in_python:
        names = [*given, *(name for name, _ in scalars), *results.values()]
        return "main.py", PYTHON.format(
            signature=contract.signature(),
            module=candidate.op,
            entry=contract.name,
            parameters=", ".join(names),
            copies="".join(f"    {results[name]}.copy_({name})\n" for name in updated),
            call=call,
        )
    cuda = candidate.language is Language.CUDA
    main = "main.cu" if cuda else "main.cpp"
    tensor = "torch::Tensor" if through_torch else "tvm::ffi::TensorView"
    types = {"float": "double", "int": "int64_t"}
    parameters = [f"{tensor} {name}" for name in given]
    parameters += [f"{types[kind]} {name}" for name, kind in scalars]
    parameters += [f"{tensor} {name}" for name in results.values()]
    common = {
        "signature": contract.signature(),
        "header": header_name(candidate),
        "entry": contract.name,
        "parameters": ", ".join(parameters),
        "call": call,
    }
    if through_torch:
        if "PYBIND11_MODULE" in candidate.source or "TORCH_LIBRARY" in candidate.source:
            raise UsageError(
                "the source binds itself to Python, so it cannot be wrapped",
                "remove its binding, since patcher adds one",
            )
        copies = "".join(f"  {results[name]}.copy_({name});\n" for name in updated)
        return main, TORCH.format(copies=copies, **common)
    return main, FFI.format(
        includes=INCLUDES_CUDA if cuda else INCLUDES_CPU,
        copy=COPY_CUDA if cuda else COPY_CPU,
        copies="".join(f"  patcher_copy({results[name]}, {name});\n" for name in updated),
        **common,
    )
