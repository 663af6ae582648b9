"""What the tests of TensorRT-LLM share: the double in this process or started, and a patch."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patch_sample import OP, evaluation

from patcher.bench import Candidate, Language
from patcher.bench.engines.tensorrt_llm import Benchmark, run_benchmark
from patcher.integrate import Patch, Store
from patcher.integrate.tensorrt_llm import write_module

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = ROOT / "tests/doubles/trtllm"
CPP = (ROOT / "kernels/fused_add_rms_norm/solutions/cpu_simd/fused_add_rms_norm.cpp").read_text()
CANDIDATE = Candidate(op=OP.name, language=Language.CPP, source=CPP)
LAYERS = 3
"""Of the double's model."""
RUN = Benchmark(
    model="openai/gpt-oss-20b",
    vocab_size=97,
    requests=6,
    concurrency=2,
    input_len=5,
    output_tokens=4,
    warmup=0,
)
CALLS = 2 * LAYERS * RUN.output_tokens * RUN.requests // RUN.concurrency
"""A rank's fused norms in that run."""


@contextmanager
def installed(*folders: Path) -> Iterator[None]:
    """The double importable in this process, what else lies in `folders` before it."""
    before = list(sys.path)
    sys.path[:0] = [*map(str, folders), str(DOUBLE)]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


def make_patch(folder: Path) -> Patch:
    """For the installed double; its kernel is the library's own for the CPU."""
    return Patch.create(
        folder, OP, CANDIDATE, evaluation(CANDIDATE), engine="tensorrt_llm", made_by="test"
    )


def write_program(path: Path, *start: str) -> None:
    """The double's trtllm-bench, run by this Python, whatever PATH says."""
    path.parent.mkdir(parents=True)
    line = shlex.join([*start, str(DOUBLE / "bin/trtllm-bench")])
    path.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
    path.chmod(0o755)


class Setup:
    """A store with the patch applied, the generated package, an environment, a program."""

    def __init__(self, folder: Path, *start: str) -> None:
        """`start`: the command that starts the program; this Python by default."""
        self.folder, self.receipts, self.home = folder, folder / "receipts", folder / "home"
        with installed():
            self.digest = make_patch(folder / "patch").digest
            Store(self.home).apply(folder / "patch")
        self.module = write_module(folder / "module")
        program = folder / "bin/trtllm-bench"
        write_program(program, *(start or [sys.executable]))
        # OMPI and PRTE: how Open MPI is told that it may run as root, or start more than cores
        kept = re.compile("(PATH|HOME|PATCHER_CACHE|OMPI_.*|PRTE_.*)")
        self.environment = {k: v for k, v in os.environ.items() if kept.fullmatch(k)}
        self.environment["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        self.environment["PYTHONPATH"] = str(ROOT)

    def run(self, name: str, *, module: bool = True, ranks: int = 1, **variables: str) -> Any:
        """The tokens that each rank found, patches on; `module`: with the generated package."""
        switches = {"PATCHES": "on", "HOME": str(self.home), "RECEIPTS": str(self.receipts)}
        on = {f"PATCHER_{key}": value for key, value in switches.items()}
        folders = (self.module,) if module else ()
        asked = RUN.model_copy(update={"module_folders": folders, "tensor_parallel": ranks})
        environment = {**self.environment, **on, **variables}
        run_benchmark(asked, self.folder / name, environment, timeout_s=120)
        return json.loads((self.folder / name / "tokens.json").read_text())
