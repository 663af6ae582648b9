"""What `trtllm-bench throughput --report_json` says, held against what was asked for.

Read in NVIDIA/TensorRT-LLM: bench/dataclasses/reporting.py (2787769, and 0249976, which adds the
machine); the table in tests/doubles/trtllm/README.md says more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from patcher.bench.engines.tensorrt_llm_inputs import Benchmark
from patcher.bench.errors import VerificationError
from patcher.bench.records import SCHEMA_VERSION, Record
from patcher.bench.stats.comparison import Arm, Window

AGREEMENT = 0.01
"""How far the report's own figures may be from one another, as a share."""


class BenchReport(Record):
    """What one run said, checked against what was asked for."""

    schema_version: int = SCHEMA_VERSION
    version: str
    """Of TensorRT-LLM."""
    dtype: str
    kv_cache_dtype: str | None
    quantization: str | None
    gpu: str | None
    world_size: int
    requests: int
    input_len: int
    output_tokens: int
    """A request."""
    total_latency_s: float
    """First request's start to last request's end, prefill counted."""
    output_tokens_per_s: float
    avg_request_latency_ms: float


def take_window(
    run: Benchmark, report: BenchReport, *, pair: int, arm: Arm, kind: Literal["ab", "aa"] = "ab"
) -> Window:
    """A run as one side of a pair, for `compare`.

    The report times prefill and decode together, and so does this: tokens are all that came out.
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
    """Read `--report_json`. Fields that we do not use may come and go with versions.

    Raises:
        VerificationError: missing, damaged, without a field that we use, of another run than
            `run`, or at odds with itself.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise VerificationError("trtllm-bench wrote no report", "see its log") from error
    try:
        told = _Report.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise VerificationError(
            f"{path.name} is no report of trtllm-bench as we know it: {where}: {first['msg']}",
            "see tests/doubles/trtllm/README.md for the versions that were read",
        ) from error
    for what, found, asked in _expectations(told, run):
        if found != asked:
            raise VerificationError(
                f"trtllm-bench reports {what} {found:g}, {asked:g} was asked for",
                "see its log; a request that stops early makes the figures worthless",
            )
    performance = told.performance
    seconds = performance.total_latency_ms / 1e3
    counted = run.requests * run.output_tokens / seconds
    if abs(counted / performance.system_output_throughput_tok_s - 1) > AGREEMENT:
        raise VerificationError(
            f"the report says {performance.system_output_throughput_tok_s:g} tokens/s, its tokens "
            f"over its time make {counted:g}",
            "run it again; see its log",
        )
    return BenchReport(
        version=told.engine.version,
        dtype=told.engine.dtype,
        kv_cache_dtype=told.engine.kv_cache_dtype,
        quantization=told.engine.quantization,
        gpu=told.machine.name if told.machine else None,
        world_size=told.world_info.world_size,
        requests=run.requests,
        input_len=run.input_len,
        output_tokens=run.output_tokens,
        total_latency_s=seconds,
        output_tokens_per_s=performance.system_output_throughput_tok_s,
        avg_request_latency_ms=performance.avg_request_latency_ms,
    )


def _expectations(told: _Report, run: Benchmark) -> Iterator[tuple[str, float, float]]:
    """(what, as reported, as asked for)."""
    world, requests = told.world_info, told.request_info
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
    """`ReportUtility.get_statistics_dict`, of which these fields are used."""

    engine: _Engine
    machine: _Machine | None = None
    """Absent in older versions, null without a GPU."""
    world_info: _World
    request_info: _Requests
    performance: _Performance
