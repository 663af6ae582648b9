"""TensorRT-LLM through its benchmark `trtllm-bench throughput`: inputs, run and report.

The benchmark starts its own processes, so an arm of an A/B comparison is a whole run
(`take_window`). tests/doubles/trtllm/README.md lists the files of NVIDIA/TensorRT-LLM that this
code relies on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from patcher.bench.engines.tensorrt_llm_inputs import (
    Benchmark,
    command,
    options,
    write_dataset,
    write_inputs,
)
from patcher.bench.engines.tensorrt_llm_report import BenchReport, read_report, take_window
from patcher.bench.errors import MissingError, PatcherError, UsageError
from patcher.bench.sandbox import Excerpt

WORKER_PREFIX = "TLLM_"
"""Workers inherit only variables with this prefix or with TRTLLM."""


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Add each `PATCHER_*` variable under the prefix that reaches the workers.

    Args:
        environment: environment variables of the benchmark.

    Returns:
        The extended environment.

    Raises:
        UsageError: a variable already has another value for the workers.
    """
    full = dict(environment)
    for name in [name for name in full if name.startswith("PATCHER_")]:
        value, worker_value = full[name], full.setdefault(WORKER_PREFIX + name, full[name])
        if value != worker_value:
            raise UsageError(
                f"{name} is {value!r}, but {WORKER_PREFIX}{name}, which TensorRT-LLM's workers "
                f"see, is {worker_value!r}",
                f"unset {name}",
            )
    return full


def run_benchmark(
    run: Benchmark,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    program: str = "trtllm-bench",
    timeout_s: float = 3600,
) -> BenchReport:
    """Write the inputs, run the benchmark, and read its report.

    Args:
        run: model and traffic.
        folder: folder for inputs, log and report.
        environment: environment variables of the process; None: this process's. See
            `worker_environment`.
        program: name or path of the program.
        timeout_s: time limit in seconds.

    Raises:
        UsageError: a module folder is no Python package, or the inputs cannot be written.
        MissingError: the program is not installed or cannot run.
        PatcherError: the program failed or exceeded the time limit.
        VerificationError: see `read_report`.
    """
    env = worker_environment(os.environ if environment is None else environment)
    executable = shutil.which(program, path=env.get("PATH"))
    if executable is None:
        raise MissingError(
            f"{program} is not on PATH",
            "install TensorRT-LLM (NVIDIA's release container has it) and run this there",
        )
    for module in run.module_folders:
        if not (module / "__init__.py").is_file():
            raise UsageError(f"{module} is no Python package", "write it with `write_module`")
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    write_inputs(run, folder)
    log = folder / "log.txt"
    try:
        with log.open("wb") as stream:
            status = _run(command(run, folder, executable), env, stream, timeout_s)
    except OSError as error:
        raise MissingError(
            f"{executable} cannot be run: {error.strerror}", "install TensorRT-LLM again"
        ) from error
    if status is None:
        raise PatcherError(f"{program} did not end in {timeout_s:g} s", f"see {log}")
    if status != 0:
        lines = str(Excerpt.of_file(log)).strip().splitlines()
        last = lines[-1][:2000] if lines else "it printed nothing"
        raise PatcherError(f"{program} ended with status {status}: {last}", f"see {log}")
    return read_report(report, run)


def _run(
    line: list[str], environment: dict[str, str], log: IO[bytes], timeout_s: float
) -> int | None:
    """Run a command; return its exit status, or None if it exceeded the time limit.

    Its workers are killed with it.
    """
    with subprocess.Popen(
        line, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


__all__ = [
    "BenchReport",
    "Benchmark",
    "command",
    "options",
    "read_report",
    "run_benchmark",
    "take_window",
    "worker_environment",
    "write_dataset",
    "write_inputs",
]
