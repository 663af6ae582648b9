"""A patch as a kernel repository that Hugging Face's `kernels` loads.

Layout, metadata and variants follow its loader (kernels 0.17.2: `variants.py`, `importer.py`,
`layer/layer.py`) and docs/source/kernel-requirements.md (huggingface/kernels, 8ac69fc):
`build/<variant>/` is one Python package with `metadata.json`, and layers are stateless.

- PyTorch and Triton: `build/torch-universal`, which any PyTorch loads.
- C++ and CUDA: one variant built for this platform and `tvm-ffi<version>`. A source that includes
  PyTorch's headers is built for this PyTorch and Python. For tvm-ffi there is also the source
  layout of kernel-builder (`build.toml`), which builds other variants; it needs no compiler here.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import platform
import re
import sys

from patcher.bench import Candidate, Contract, Language, MissingError, UsageError
from patcher.bench.machine.environment import compiler_version
from patcher.bench.toolchains import Built, build, toolchain
from patcher.bench.toolchains.native import binds_with_torch, cuda_arch
from patcher.integrate.formats import ExportedFiles, Files, device_of
from patcher.integrate.formats.hf_sources import package, readme
from patcher.integrate.patch import Patch


def write(patch: Patch, license: str) -> ExportedFiles:
    """The files of the repository.

    Raises:
        UsageError: the Hub does not accept the op's name or license, or the source does not build.
        MissingError: the source must be built here, but there is no compiler.
        VerificationError: the patch is damaged.
    """
    candidate, contract, evidence = patch.candidate(), patch.contract, patch.evaluation
    name = contract.name.replace("_", "-")
    if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", name):
        raise UsageError(f"the Hub does not accept the kernel name {name}", "rename the op")
    device = device_of(candidate, evidence)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", license):
        raise UsageError(f"{license!r} is not a license identifier", "use for example apache-2.0")
    left_out = [
        "the baseline, the checks and the intervals behind the figures are in patcher.json only",
        "the engine, the patch point and the receipts: a layer mapping replaces whole layers",
    ]
    if license == "unknown":
        left_out.append("patcher does not know the license of the source; set it with --license")
    metadata: dict[str, object] = {
        "name": name,
        "id": f"_{contract.name}_{device}_{candidate.digest[:8]}",
        "version": 1,
        "license": license,
        "python-depends": ["nvidia-cutlass-dsl"] if candidate.language is Language.CUTEDSL else [],
        "backend": {"type": device},
    }
    sources = package(contract, device, candidate.language)
    if sources.layer is None:
        left_out.append("no layer: an output's shape or dtype does not follow from the inputs")
    text = candidate.source.encode()
    variant: str | None
    if candidate.language.in_python:
        files = _variant("torch-universal", sources.files | {"kernel.py": text}, metadata)
        variant, where = "torch-universal", "build/torch-universal/kernel.py"
    else:
        files, where, variant = _native(candidate, contract, sources.files, metadata, left_out)
    page = readme(contract, evidence, candidate.language, sources.layer, variant, left_out)
    files["README.md"] = page.encode()
    return ExportedFiles(files=files, source=where, variant=variant, left_out=tuple(left_out))


def _variant(variant: str, files: Files, metadata: dict[str, object]) -> Files:
    """One build variant with its metadata and the digest for `kernels verify-signature`."""
    digests = {
        name: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for name, content in sorted(files.items())
    }
    document = metadata | {"digest": {"algorithm": "sha256", "files": digests}}
    files = files | {"metadata.json": (json.dumps(document, indent=2) + "\n").encode()}
    return {f"build/{variant}/{name}": content for name, content in files.items()}


def _native(
    candidate: Candidate,
    contract: Contract,
    package_files: Files,
    metadata: dict[str, object],
    left_out: list[str],
) -> tuple[Files, str, str | None]:
    """Files, the path of the source, and the variant built on this machine (None if none)."""
    through_torch = binds_with_torch(candidate.source)
    reason = toolchain(candidate.language).missing()
    if reason and through_torch:
        raise MissingError(
            f"a source that includes PyTorch's headers must be built before export: {reason}",
            "export it on another machine, or write it against tvm/ffi/container/tensor.h",
        )
    files = {} if through_torch else _source_layout(candidate, contract, package_files, metadata)
    where = f"csrc/{_header(candidate)}"
    if reason:
        left_out.append(
            f"no build: {reason}. The export holds the source layout, which kernel-builder must "
            "build before the loader can load it"
        )
        return files, where, None
    built = build(candidate, contract)
    if built.path is None:
        raise UsageError(f"{candidate.file_name} does not build", built.log[-500:])
    left_out.append(
        f"other platforms: the build by `{built.command}` is only for this kind of processor, this "
        f"C library and {'this Python and PyTorch' if through_torch else 'this tvm-ffi'}"
    )
    device = "cuda" if candidate.language is Language.CUDA else "cpu"
    if device == "cuda":
        arch = cuda_arch().removeprefix("sm_")
        digits, suffix = arch.rstrip("af"), arch[len(arch.rstrip("af")) :]
        archs = [f"{digits[:-1]}.{digits[-1]}{suffix}"]
        metadata = metadata | {"backend": {"type": "cuda", "archs": archs}}
    if not through_torch:
        metadata = metadata | {"python-depends": ["tvm-ffi"]}
    tag = sys.implementation.cache_tag
    contents = package_files | {
        "_ops.py": (TORCH_OPS % (tag, tag) if through_torch else FFI_OPS).encode(),
        "kernel.so": built.path.read_bytes(),
        _header(candidate): candidate.source.encode(),
    }
    variant = variant_name(built, device)
    files |= _variant(variant, contents, metadata)
    return files, f"build/{variant}/{_header(candidate)}", variant


def variant_name(built: Built, device: str) -> str:
    """The loader's name for this machine's platform, framework and compiler."""
    backend = "cpu"
    if device == "cuda":
        version = re.search(r"(\d+)\.(\d+)", compiler_version("nvcc") or "")
        if version is None:
            raise UsageError("nvcc's version is unknown", "put nvcc on PATH")
        backend = f"cu{version[1]}{version[2]}"
    if built.binding == "tvm-ffi":
        release = importlib.metadata.version("apache-tvm-ffi")
        framework = "tvm-ffi" + "".join(release.split(".")[:2])
    else:
        import torch

        abi = "cxx11" if torch.compiled_with_cxx11_abi() else "cxx98"
        framework = f"torch{''.join(torch.__version__.split('.')[:2])}-{abi}"
    return f"{framework}-{backend}-{platform.machine()}-{platform.system().lower()}"


def _header(candidate: Candidate) -> str:
    """The source's file name, a header's, since the compiled unit includes it."""
    return candidate.op + (".cuh" if candidate.language is Language.CUDA else ".hpp")


def _source_layout(
    candidate: Candidate, contract: Contract, package_files: Files, metadata: dict[str, object]
) -> Files:
    """The source layout of kernel-builder: edition 5 of `build.toml`, framework tvm-ffi."""
    device = "cuda" if candidate.language is Language.CUDA else "cpu"
    suffix = ".cu" if device == "cuda" else ".cpp"
    header, entry = _header(candidate), contract.name
    flags = "" if device == "cuda" else 'cxx-flags = ["-O3", "-fopenmp"]\n'
    toml = BUILD_TOML.format(
        name=metadata["name"],
        license=metadata["license"],
        device=device,
        entry=entry,
        header=header,
        suffix=suffix,
        flags=flags,
    )
    unit = UNIT.format(header=header, entry=entry)
    files = {
        "build.toml": toml.encode(),
        "flake.nix": FLAKE.encode(),
        f"csrc/{header}": candidate.source.encode(),
        f"csrc/unit{suffix}": unit.encode(),
        "tvm-ffi-ext/tvm_ffi_binding.cpp": b"// The unit in csrc/ exports the entry itself.\n",
    }
    return files | {f"tvm-ffi-ext/{entry}/{path}": text for path, text in package_files.items()}


FFI_OPS = '''"""The kernel as tvm-ffi loads it."""

from pathlib import Path

import tvm_ffi

ops = tvm_ffi.load_module(str(Path(__file__).with_name("kernel.so")))
'''

TORCH_OPS = '''"""The kernel as pybind11 bound it, for one version of Python."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch  # its libraries must be in the process first

if sys.implementation.cache_tag != "%s":
    raise ImportError("this build is for %s, this is " + str(sys.implementation.cache_tag))
_path = str(Path(__file__).with_name("kernel.so"))
_loader = importlib.machinery.ExtensionFileLoader("candidate", _path)
ops = importlib.util.module_from_spec(
    importlib.util.spec_from_file_location("candidate", _path, loader=_loader)
)
_loader.exec_module(ops)
'''

UNIT = """\
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "{header}"

TVM_FFI_DLL_EXPORT_TYPED_FUNC({entry}, {entry});
"""

BUILD_TOML = """\
[general]
name = "{name}"
version = 1
edition = 5
license = "{license}"
backends = ["{device}"]
python-depends = ["tvm-ffi"]

[tvm-ffi]
src = ["tvm-ffi-ext/tvm_ffi_binding.cpp"]

[kernel.{entry}]
backend = "{device}"
depends = []
{flags}src = ["csrc/unit{suffix}", "csrc/{header}"]
"""

FLAKE = """\
{
  description = "Made by patcher export";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
