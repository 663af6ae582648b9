"""TensorRT-LLM: patch point, generated package, workers and benchmark, against a double.

What the double stands for, and what of TensorRT-LLM it was read from: doubles/trtllm/README.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patch_sample import OP, evaluation

import bench
from bench import Candidate, Language
from bench.engines.tensorrt_llm import Benchmark, run_benchmark, worker_environment
from integrate import read_receipts
from integrate.tensorrt_llm import MODULE, check_workers, write_module

ROOT = Path(__file__).resolve().parent.parent
DOUBLE = ROOT / "tests/doubles/trtllm"
LAYERS = 3
"""Of the double's model."""
CPP = (ROOT / "kernels/fused_add_rms_norm/solutions/cpu_simd/fused_add_rms_norm.cpp").read_text()
CANDIDATE = Candidate(op=OP.name, language=Language.CPP, source=CPP)
RUN = Benchmark(
    model="openai/gpt-oss-20b",
    vocab_size=97,
    requests=6,
    concurrency=2,
    input_len=5,
    output_tokens=4,
    warmup=0,
    tensor_parallel=2,
)
CALLS = 2 * LAYERS * RUN.output_tokens * RUN.requests // RUN.concurrency
"""A rank's fused norms in that run."""
HAS_MPI = importlib.util.find_spec("mpi4py") is not None and shutil.which("mpiexec") is not None
POOLS = (
    "subprocess",
    pytest.param(
        "mpi4py",
        marks=pytest.mark.skipif(not HAS_MPI, reason="mpi4py or mpiexec is not installed"),
    ),
)


class Setup:
    """A store with one patch applied, the generated package, an environment, a program."""

    def __init__(self, folder: Path, pool: str = "subprocess") -> None:
        self.folder, self.receipts = folder, folder / "receipts"
        self.store = folder / "home"
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(DOUBLE))),
            "TRTLLM_DOUBLE_POOL": pool,
        }
        if "PATCHER_CACHE" in os.environ:
            self.environment["PATCHER_CACHE"] = os.environ["PATCHER_CACHE"]
        programs = folder / "bin"
        programs.mkdir(parents=True)
        start = f"mpiexec -n 1 {sys.executable}" if pool == "mpi4py" else sys.executable
        program = programs / "trtllm-bench"
        program.write_text(f'#!/bin/sh\nexec {start} {DOUBLE / "bin/trtllm-bench"} "$@"\n')
        program.chmod(0o755)
        self.environment["PATH"] = f"{programs}{os.pathsep}{self.environment['PATH']}"
        self.module = write_module(folder / "module")

    def python(self, code: str, **more: str) -> str:
        """What a process in which the double is installed prints."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, bundle: Path) -> str:
        """Applied in the environment of the double; gives the digest."""
        code = f"""
from pathlib import Path
import integrate
print(integrate.Store(Path({str(self.store)!r})).apply(Path({str(bundle)!r})).digest)
"""
        return self.python(code).split()[-1]

    def switched_on(self, **more: str) -> dict[str, str]:
        on = {"PATCHES": "on", "HOME": str(self.store), "RECEIPTS": str(self.receipts)}
        return {**self.environment, **{f"TLLM_PATCHER_{k}": v for k, v in on.items()}, **more}

    def run(self, environment: dict[str, str], *, module: bool = True, name: str = "run") -> Any:
        asked = RUN.model_copy(update={"module_folders": (self.module,) if module else ()})
        run_benchmark(asked, self.folder / name, environment, timeout_s=120)
        return json.loads((self.folder / name / "tokens.json").read_text())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patch for the double, whose kernel is the library's own for the CPU."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "evaluation.json").write_text(evaluation(CANDIDATE).model_dump_json())
    code = f"""
from pathlib import Path
import bench, integrate
source = Path({str(ROOT)!r}) / "kernels/fused_add_rms_norm/solutions/cpu_simd"
source = (source / "fused_add_rms_norm.cpp").read_text()
candidate = bench.Candidate(op="fused_add_rms_norm", language=bench.Language.CPP, source=source)
text = Path({str(folder / "evaluation.json")!r}).read_text()
integrate.Patch.create(
    Path({str(folder / "patch")!r}), bench.load_op("fused_add_rms_norm"), candidate,
    bench.Evaluation.model_validate_json(text), engine="tensorrt_llm", made_by="test",
)
"""
    Setup(folder / "setup").python(code)
    return folder / "patch"


@pytest.mark.parametrize("way", ["classes", "modules"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_patch_reaches_every_worker_and_leaves_no_trace(
    pool: str, way: str, bundle: Path, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, pool)
    digest = setup.apply(bundle)
    way_of = {"TRTLLM_DOUBLE_WAY": way}
    patched = setup.run(setup.switched_on(**way_of), name="patched")
    assert check_workers(setup.receipts, [digest], 2) == {0: CALLS, 1: CALLS}
    receipts = read_receipts(setup.receipts)
    assert len(receipts) == 3, "two workers, and the process that started them"
    assert all(not receipt.fallbacks and receipt.failure is None for receipt in receipts)
    # without the option the same environment patches nothing
    reverted = setup.run(setup.switched_on(**way_of), module=False, name="reverted")
    assert len(read_receipts(setup.receipts)) == 3
    assert patched == reverted
    assert len(patched) == 2
    assert len(patched[0]) == RUN.requests
