"""CuTe DSL (nvidia-cutlass-dsl): a Python file whose kernels are compiled without a GPU.

The compile check runs the file, so it runs in the compilers' sandbox. Hostile source can forge its
result, so only the judge's runner decides, on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from importlib import resources
from pathlib import Path

from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import Contract, Point
from patcher.bench.toolchains import Built, Missing
from patcher.bench.toolchains.compilers import CompileJob, compiled
from patcher.bench.toolchains.native import cuda_arch
from patcher.bench.toolchains.python import TorchToolchain, installed

PACKAGE = "nvidia-cutlass-dsl"
_CHECK = "cutedsl_check.py"


class CuteDslToolchain(TorchToolchain):
    language = Language.CUTEDSL

    def missing(self) -> Missing | None:
        try:
            importlib.metadata.version(PACKAGE)  # `cutlass` alone may be another project's
        except importlib.metadata.PackageNotFoundError:
            return Missing(reason=f"{PACKAGE} is not installed", fix=f"pip install {PACKAGE}")
        if not installed("cutlass"):  # a .pth file of the package makes it importable
            return Missing(
                reason=f"{PACKAGE} is installed, but `import cutlass` fails",
                fix=f"pip install --force-reinstall {PACKAGE}",
            )
        return None

    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        parsed = super().build(candidate, contract, folder)
        if not parsed.ok:
            return parsed
        arch = cuda_arch()
        versions = (importlib.metadata.version(name) for name in (PACKAGE, "torch"))
        check = resources.files("patcher.bench.toolchains") / _CHECK
        job = CompileJob(
            files={_CHECK: check.read_text(encoding="utf-8"), "cases.json": _cases(contract)},
            command=(sys.executable, "-P", _CHECK, candidate.file_name, contract.name),
            product=candidate.file_name,
            binding="python",
            shown=f"cute.compile for {arch}",
            version=" ".join([*versions, sys.version]),
            environment={
                "CUTE_DSL_ARCH": arch,
                "CUTE_DSL_DISABLE_FILE_CACHING": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            },
        )
        return compiled(candidate, job, folder)


def _cases(contract: Contract) -> str:
    """The calls to try: for each combination of dtypes, the first size of the first sweep."""
    sweep = next((each for each in contract.sweeps if each.device == "cuda"), contract.sweeps[0])
    axes = sweep.points()[0].axes
    cases = []
    for dtypes in contract.dtype_choices():
        point = Point(axes=axes, dtypes=dtypes)
        tensors = [
            {"shape": contract.shape(tensor, point), "dtype": dtypes[tensor.dtype]}
            for tensor in contract.tensors
        ]
        scalars = [
            int(scalar.value) if scalar.type == "int" else scalar.value
            for scalar in contract.scalars
        ]
        cases.append({"label": point.label(), "tensors": tensors, "scalars": scalars})
    return json.dumps(cases)
