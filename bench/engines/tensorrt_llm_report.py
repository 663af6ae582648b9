"""Read the report of `trtllm-bench throughput --report_json` and check it against the request.

Based on NVIDIA/TensorRT-LLM: bench/dataclasses/reporting.py (2787769, and 0249976, which adds the
machine); see the table in tests/doubles/trtllm/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from patcher.bench.engines.tensorrt_llm_inputs import Benchmark
from patcher.bench.errors import VerificationError
from patcher.bench.records import SCHEMA_VERSION, Record, problem
from patcher.bench.stats.comparison import Arm, Window

AGREEMENT = 0.01
"""Largest relative difference between the report's values that should agree."""


class BenchReport(Record):
    """Report of one run, checked against the request."""

    schema_version: int = SCHEMA_VERSION
    version: str
    """Version of TensorRT-LLM."""
    dtype: str
    """Dtype of weights and activations."""
    kv_cache_dtype: str | None
    """Dtype of the KV cache."""
    quantization: str | None
    """Quantisation of the weights."""
    gpu: str | None
    """Name of the GPU; None in reports of older versions."""
    world_size: int
    """Number of workers."""
    requests: int
    """Number of requests."""
    input_len: int
    """Prompt tokens per request."""
    output_tokens: int
    """Output tokens per request."""
    total_latency_s: float
    """Seconds from the first request's start to the last request's end, including prefill."""
    output_tokens_per_s: float
    """Output tokens per second of all requests."""
    avg_request_latency_ms: float
    """Mean latency of a request in milliseconds."""


def take_window(
    run: Benchmark, report: BenchReport, *, pair: int, arm: Arm, kind: Literal["ab", "aa"] = "ab"
) -> Window:
    """Convert a run into a window for `compare`.

    The report times prefill and decode together, so `decode_s` covers both, and `tokens` counts all
    output tokens.

    Args:
        run: the request.
        report: its report.
        pair: number of the pair.
        arm: arm of the pair.
        kind: `ab`, or `aa` for a control.
    """
    return Window(
        pair=pair,
        arm=arm,
        kind=kind,
        tokens=run.requests * run.output_tokens,
        decode_s=report.total_latency_s,
        prefill_s=0.0,
    )


def read_report(path: Path, run: Benchmark) -> BenchReport:
    """Read a report; fields that are not used here may change between versions.

    Args:
        path: the file that `--report_json` wrote.
        run: the request.

    Raises:
        VerificationError: the report is missing or damaged, lacks a field, belongs to another run,
            or contradicts itself.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise VerificationError("trtllm-bench wrote no report", "see its log") from error
    try:
        report = _Report.model_validate_json(text)
    except ValidationError as error:
        raise VerificationError(
            f"{path.name} is no report of trtllm-bench as we know it: {problem(error)}",
            "see tests/doubles/trtllm/README.md for the supported versions",
        ) from error
    for what, actual, expected in _expectations(report, run):
        if actual != expected:
            raise VerificationError(
                f"trtllm-bench reports {what} {actual:g}, {expected:g} was asked for",
                "see its log; a request that stops early invalidates the result",
            )
    performance = report.performance
    seconds = performance.total_latency_ms / 1e3
    counted = run.requests * run.output_tokens / seconds
    if abs(counted / performance.system_output_throughput_tok_s - 1) > AGREEMENT:
        raise VerificationError(
            f"the report says {performance.system_output_throughput_tok_s:g} tokens/s, its tokens "
            f"over its time make {counted:g}",
            "run it again; see its log",
        )
    return BenchReport(
        version=report.engine.version,
        dtype=report.engine.dtype,
        kv_cache_dtype=report.engine.kv_cache_dtype,
        quantization=report.engine.quantization,
        gpu=report.machine.name if report.machine else None,
        world_size=report.world_info.world_size,
        requests=run.requests,
        input_len=run.input_len,
        output_tokens=run.output_tokens,
        total_latency_s=seconds,
        output_tokens_per_s=performance.system_output_throughput_tok_s,
        avg_request_latency_ms=performance.avg_request_latency_ms,
    )


def _expectations(report: _Report, run: Benchmark) -> Iterator[tuple[str, float, float]]:
    """Yield (name, reported value, expected value)."""
    world, requests = report.world_info, report.request_info
    yield "requests", requests.num_requests, run.requests
    yield "an average input length of", requests.avg_input_length, run.input_len
    yield "an average output length of", requests.avg_output_length, run.output_tokens
    yield "a tensor parallel size of", world.tp_size, run.tensor_parallel
    yield "a largest batch of", world.max_batch_size, run.concurrency
    yield "at most so many tokens a step:", world.max_num_tokens, run.max_num_tokens


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Engine(_Part):
    version: str
    backend: Literal["Pytorch"]
    dtype: str
    kv_cache_dtype: str | None
    quantization: str | None


class _Machine(_Part):
    name: str


class _World(_Part):
    tp_size: int
    world_size: int
    max_batch_size: int
    max_num_tokens: int


class _Requests(_Part):
    num_requests: int
    avg_input_length: float
    avg_output_length: float


class _Performance(_Part):
    total_latency_ms: float = Field(gt=0)
    avg_request_latency_ms: float = Field(gt=0)
    system_output_throughput_tok_s: float = Field(gt=0)


class _Report(_Part):
    """The fields of `ReportUtility.get_statistics_dict` that are used here."""

    engine: _Engine
    machine: _Machine | None = None
    """Missing in older versions, null without a GPU."""
    world_info: _World
    request_info: _Requests
    performance: _Performance
