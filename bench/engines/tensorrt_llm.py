"""TensorRT-LLM through its own benchmark: `trtllm-bench throughput`, its inputs and its report.

It runs in processes of its own, so an arm of an A/B is a run, not a turn (`take_window`).
Read in NVIDIA/TensorRT-LLM: bench/benchmark/throughput.py (5685103), commands/bench.py (0c9a37d),
bench/utils/data.py (04276b4), bench/dataclasses/reporting.py (0249976 and 2787769); the table in
tests/doubles/trtllm/README.md says what each was read for.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import Field

from bench.engines.tensorrt_llm_report import Report, read_report, take_window
from bench.errors import MissingError, PatcherError, UsageError
from bench.records import Record

WORKER_PREFIX = "TLLM_"
"""Workers are given the variables that begin so (and with TRTLLM), and no other."""
_TAIL = 2000


class Benchmark(Record):
    """One `trtllm-bench throughput`: requests of one length, kept at one concurrency."""

    model: str
    """Hugging Face id; a folder goes into `model_path`, since a folder as id is refused there."""
    model_path: Path | None = None
    vocab_size: int = Field(ge=2)
    requests: int = Field(ge=1)
    concurrency: int = Field(ge=1)
    """Requests under way at once, and the largest batch."""
    input_len: int = Field(ge=1)
    output_tokens: int = Field(ge=2)
    """A request, the one that comes from prefill counted."""
    seed: int = 0
    warmup: int = Field(default=2, ge=0)
    """Requests before the timed ones."""
    tensor_parallel: int = Field(default=1, ge=1)
    max_num_tokens: int = Field(default=8192, ge=1)
    kv_cache_share: float = Field(default=0.9, gt=0, le=1)
    """Of the memory that is free once the model is loaded."""
    load_format: Literal["auto", "dummy"] = "auto"
    moe_backend: Literal["AUTO", "CUTLASS", "TRTLLM", "TRITON"] = "AUTO"
    separate_finalize: bool = False
    """Keeps MoE finalize a kernel of its own, where the CUTLASS backend would fuse it."""
    module_folders: tuple[Path, ...] = ()
    """For `--custom_module_dirs`: what carries patches into the workers."""


def write_dataset(path: Path, run: Benchmark) -> None:
    """One request a line, of fixed lengths; prompts differ, and are the same for the same seed.

    Raises:
        UsageError: there are not so many prompts of that length.
    """
    # each prompt begins with its own number, written in tokens: none is another's beginning
    digits = 1
    while run.vocab_size**digits < run.requests:
        digits += 1
    if digits > run.input_len:
        raise UsageError(
            f"there are no {run.requests} different prompts of {run.input_len} tokens "
            f"out of {run.vocab_size}",
            "ask for fewer requests or a longer input",
        )
    rng = random.Random(run.seed)
    with path.open("w", encoding="utf-8") as stream:
        for index in range(run.requests):
            number = [index // run.vocab_size**place % run.vocab_size for place in range(digits)]
            rest = [rng.randrange(run.vocab_size) for _ in range(run.input_len - digits)]
            row = {
                "task_id": index,
                "input_ids": number + rest,
                "output_tokens": run.output_tokens,
            }
            stream.write(json.dumps(row) + "\n")


def options(run: Benchmark) -> dict[str, Any]:
    """What goes into the YAML file: what else differs from run to run is switched off."""
    moe: dict[str, Any] = {"backend": run.moe_backend}
    if run.separate_finalize:
        moe["disable_finalize_fusion"] = True
    return {
        "enable_autotuner": False,
        "cuda_graph_config": {"max_batch_size": run.concurrency, "enable_padding": True},
        "load_format": run.load_format,
        "moe_config": moe,
        "kv_cache_config": {
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": run.kv_cache_share,
        },
    }


def write_inputs(run: Benchmark, folder: Path) -> None:
    """Dataset and options into the folder.

    Raises:
        UsageError: it cannot be written, or see `write_dataset`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_dataset(folder / "dataset.jsonl", run)
        # every JSON document is YAML, too
        text = json.dumps(options(run), indent=2) + "\n"
        (folder / "options.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}", "choose another folder"
        ) from error


def command(run: Benchmark, folder: Path, program: str = "trtllm-bench") -> list[str]:
    """The command line; dataset, options and report lie in `folder`."""
    line = [program, "--model", run.model]
    if run.model_path is not None:
        line += ["--model_path", str(run.model_path)]
    line += ["--workspace", str(folder / "workspace"), "throughput", "--backend", "pytorch"]
    given = {
        "dataset": folder / "dataset.jsonl",
        "num_requests": run.requests,
        "concurrency": run.concurrency,
        "warmup": run.warmup,
        "eos_id": -1,
        "tp": run.tensor_parallel,
        "max_batch_size": run.concurrency,
        "max_num_tokens": run.max_num_tokens,
        "max_seq_len": run.input_len + run.output_tokens,
        "kv_cache_free_gpu_mem_fraction": run.kv_cache_share,
        # newer versions call it --config and still take this name
        "extra_llm_api_options": folder / "options.yaml",
        "report_json": folder / "report.json",
    }
    for name, value in given.items():
        line += [f"--{name}", str(value)]
    for module in run.module_folders:
        line += ["--custom_module_dirs", str(module)]
    return line


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
) -> Report:
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
    with log.open("wb") as stream:
        status = _run_to_its_end(command(run, folder, found), env, stream, timeout_s)
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
    "Benchmark",
    "Report",
    "command",
    "options",
    "read_report",
    "run_benchmark",
    "take_window",
    "worker_environment",
    "write_dataset",
    "write_inputs",
]
