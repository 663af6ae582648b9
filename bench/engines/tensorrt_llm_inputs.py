"""Inputs of `trtllm-bench throughput`: dataset, options and command line.

Based on NVIDIA/TensorRT-LLM: bench/benchmark/throughput.py (5685103), commands/bench.py (0c9a37d),
bench/utils/data.py (04276b4).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from patcher.bench.errors import UsageError
from patcher.bench.records import Record


class Benchmark(Record):
    """One run of `trtllm-bench throughput`: requests of one length at one concurrency."""

    model: str
    """Hugging Face id. The benchmark rejects a folder here; set `model_path` instead."""
    model_path: Path | None = None
    """Folder of the model."""
    vocab_size: int = Field(ge=2)
    """Number of token ids."""
    requests: int = Field(ge=1)
    """Number of requests."""
    concurrency: int = Field(ge=1)
    """Number of concurrent requests, and the largest batch."""
    input_len: int = Field(ge=1)
    """Prompt tokens per request."""
    output_tokens: int = Field(ge=2)
    """Output tokens per request, including the first one, which prefill produces."""
    seed: int = 0
    """Seed of the prompts."""
    warmup: int = Field(default=2, ge=0)
    """Number of requests before the timed ones."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Tensor parallel size."""
    max_num_tokens: int = Field(default=8192, ge=1)
    """Most tokens per step."""
    kv_cache_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the memory that is free after loading the model, for the KV cache."""
    load_format: Literal["auto", "dummy"] = "auto"
    """How weights are loaded; `dummy`: none are read."""
    moe_backend: Literal["AUTO", "CUTLASS", "TRTLLM", "TRITON"] = "AUTO"
    """Backend of the mixture-of-experts layers."""
    separate_finalize: bool = False
    """Run MoE finalize as a separate kernel, which the CUTLASS backend would otherwise fuse."""
    module_folders: tuple[Path, ...] = ()
    """Packages for `--custom_module_dirs`, which apply patches in the workers."""


def write_dataset(path: Path, run: Benchmark) -> None:
    """Write one request per line, with fixed lengths and distinct prompts.

    Args:
        path: the JSONL file.
        run: number and lengths of requests, and the seed.

    Raises:
        UsageError: there are fewer prompts of that length than requests.
    """
    # each prompt begins with its number as tokens, so that no two share a beginning
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
    """Options for the YAML file. They disable what would vary from run to run."""
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
    """Write dataset and options into a folder.

    Raises:
        UsageError: the folder cannot be written, or `write_dataset` raised.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_dataset(folder / "dataset.jsonl", run)
        # every JSON document is valid YAML
        text = json.dumps(options(run), indent=2) + "\n"
        (folder / "options.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}", "choose another folder"
        ) from error


def command(run: Benchmark, folder: Path, program: str = "trtllm-bench") -> list[str]:
    """The command line of the benchmark, with dataset, options and report in `folder`."""
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
        # newer versions call it --config and still accept this name
        "extra_llm_api_options": folder / "options.yaml",
        "report_json": folder / "report.json",
    }
    for name, value in given.items():
        line += [f"--{name}", str(value)]
    for module in run.module_folders:
        line += ["--custom_module_dirs", str(module)]
    return line
