"""TensorRT-LLM through its own benchmark: `trtllm-bench throughput`, its inputs and its report.

It runs in processes of its own, so an arm of an A/B is a run, not a turn (`take_window`).
What was read in NVIDIA/TensorRT-LLM: the table in tests/doubles/trtllm/README.md.
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

WORKER_PREFIX = "TLLM_"
"""Workers are given the variables that begin so (and with TRTLLM), and no other."""
_TAIL = 2000


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, each `PATCHER_*` switch also under the name that reaches the workers.

    Raises:
        UsageError: a switch has one value here and another for the workers.
    """
    full = dict(environment)
    for name in [name for name in full if name.startswith("PATCHER_")]:
        value, theirs = full[name], full.setdefault(WORKER_PREFIX + name, full[name])
        if value != theirs:
            raise UsageError(
                f"{name} is {value!r}, but {WORKER_PREFIX}{name}, which TensorRT-LLM's workers "
                f"see, is {theirs!r}",
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
    """Write the inputs into `folder`, run it to its end, read its report.

    Args:
        environment: of the process; this one's by default. See `worker_environment`.

    Raises:
        MissingError: there is no such program.
        PatcherError: it ended with an error or ran too long.
        VerificationError: see `read_report`.
    """
    env = worker_environment(os.environ if environment is None else environment)
    found = shutil.which(program, path=env.get("PATH"))
    if found is None:
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
            status = _run_to_its_end(command(run, folder, found), env, stream, timeout_s)
    except OSError as error:
        raise MissingError(
            f"{found} cannot be run: {error.strerror}", "install TensorRT-LLM again"
        ) from error
    if status is None:
        raise PatcherError(f"{program} did not end in {timeout_s:g} s", f"see {log}")
    if status != 0:
        said = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip().splitlines()
        last = said[-1] if said else "it said nothing"
        raise PatcherError(f"{program} ended with status {status}: {last}", f"see {log}")
    return read_report(report, run)


def _run_to_its_end(
    line: list[str], environment: dict[str, str], log: IO[bytes], timeout_s: float
) -> int | None:
    """Its exit status; None when it ran too long. Workers that it started end with it."""
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
