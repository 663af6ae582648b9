"""trtllm-bench: what goes in and what is read back. The double runs in test_tensorrt_llm.py."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from trtllm_sample import DOUBLE, RUN

from patcher import bench
from patcher.bench.engines.tensorrt_llm import (
    Benchmark,
    command,
    options,
    read_report,
    run_benchmark,
    take_window,
    worker_environment,
    write_dataset,
)

REPORT: dict[str, Any] = {
    "engine": {
        "model": "openai/gpt-oss-20b",
        "version": "1.3.0",
        "backend": "Pytorch",
        "dtype": "bfloat16",
        "kv_cache_dtype": None,
        "quantization": "W4A16_MXFP4",
    },
    "machine": {"name": "NVIDIA H200", "memory.total": 139.8, "clocks.mem": 3.201},
    "world_info": {
        "tp_size": 1,
        "pp_size": 1,
        "world_size": 1,
        "max_batch_size": 2,
        "max_num_tokens": 8192,
    },
    "request_info": {"num_requests": 6, "avg_input_length": 5.0, "avg_output_length": 4.0},
    "performance": {
        "total_latency_ms": 12.0,
        "avg_request_latency_ms": 4.0,
        "system_output_throughput_tok_s": 2000.0,
    },
}
"""Fields of `ReportUtility.get_statistics_dict`, of a run of `RUN`."""


def reported(folder: Path, **changes: Any) -> Path:
    """`world_info__tp_size=2` changes that field; None takes it out."""
    report = json.loads(json.dumps(REPORT))
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if value is None:
            del report[part][field]
        else:
            report[part][field] = value
    path = folder / "report.json"
    path.write_text(json.dumps(report))
    return path


def test_a_report_becomes_a_record_and_a_side_of_a_pair(tmp_path: Path) -> None:
    report = read_report(reported(tmp_path), RUN)
    assert (report.version, report.gpu, report.quantization) == (
        "1.3.0",
        "NVIDIA H200",
        "W4A16_MXFP4",
    )
    window = take_window(RUN, report, pair=3, arm="patched")
    assert window.tokens_per_s == pytest.approx(report.output_tokens_per_s)
    windows = [
        take_window(RUN, report, pair=pair, arm=arm)
        for pair in range(5)
        for arm in ("baseline", "patched")
    ]
    assert bench.compare(windows, 0.5, 95.0, 1).gain_pct == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"performance__total_latency_ms": None}, "performance.total_latency_ms: Field required"),
        ({"performance__total_latency_ms": "12"}, "performance.total_latency_ms"),
        ({"performance__total_latency_ms": float("nan")}, "finite"),
        ({"engine__backend": "TRT"}, "engine.backend"),
        ({"request_info__num_requests": 5}, "reports requests 5, 6 was asked for"),
        ({"request_info__avg_output_length": 3.5}, "output length of 3.5, 4 was asked for"),
        ({"request_info__avg_input_length": 6.0}, "input length of 6"),
        ({"world_info__tp_size": 2}, "tensor parallel size of 2"),
        ({"world_info__max_batch_size": 8}, "largest batch of 8"),
        ({"performance__system_output_throughput_tok_s": 2100.0}, "over its time make 2000"),
    ],
)
def test_a_report_of_another_run_or_shape_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(bench.VerificationError, match=message) as error:
        read_report(reported(tmp_path, **changes), RUN)
    assert error.value.exit_code == 5


def test_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(bench.VerificationError, match="wrote no report"):
        read_report(tmp_path / "report.json", RUN)
    (tmp_path / "report.json").write_bytes(b"\xff{")
    with pytest.raises(bench.VerificationError, match="no report of trtllm-bench as we know it"):
        read_report(tmp_path / "report.json", RUN)


def test_prompts_differ_have_one_length_and_come_from_the_seed(tmp_path: Path) -> None:
    run = RUN.model_copy(update={"vocab_size": 3, "requests": 27, "input_len": 4})
    texts = []
    for index, seed in enumerate((0, 0, 1)):
        path = tmp_path / f"{index}.jsonl"
        write_dataset(path, run.model_copy(update={"seed": seed}))
        texts.append(path.read_text())
    assert texts[0] == texts[1] != texts[2]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert [row["task_id"] for row in rows] == list(range(27))
    assert {len(row["input_ids"]) for row in rows} == {4}
    assert len({tuple(row["input_ids"][:3]) for row in rows}) == 27
    assert {token for row in rows for token in row["input_ids"]} == {0, 1, 2}
    assert {row["output_tokens"] for row in rows} == {run.output_tokens}
    with pytest.raises(bench.UsageError, match="no 27 different prompts of 2 tokens out of 3"):
        write_dataset(tmp_path / "x", run.model_copy(update={"input_len": 2}))


def test_options_and_command_line(tmp_path: Path) -> None:
    run = Benchmark(
        model="openai/gpt-oss-20b",
        model_path=Path("/models/gpt-oss"),
        vocab_size=201088,
        requests=512,
        concurrency=8,
        input_len=1024,
        output_tokens=8192,
        load_format="dummy",
        moe_backend="CUTLASS",
        separate_finalize=True,
        module_folders=(tmp_path / "a", tmp_path / "b"),
    )
    assert options(run) == {
        "enable_autotuner": False,
        "cuda_graph_config": {"max_batch_size": 8, "enable_padding": True},
        "load_format": "dummy",
        "moe_config": {"backend": "CUTLASS", "disable_finalize_fusion": True},
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.9},
    }
    line = command(run, tmp_path)
    assert line[:6] == [
        *("trtllm-bench", "--model", "openai/gpt-oss-20b", "--model_path", "/models/gpt-oss"),
        "--workspace",
    ]
    given = dict(itertools.pairwise(line))
    assert (given["--max_seq_len"], given["--eos_id"], given["--backend"]) == (
        "9216",
        "-1",
        "pytorch",
    )
    assert line[-4:] == [
        *("--custom_module_dirs", str(tmp_path / "a")),
        *("--custom_module_dirs", str(tmp_path / "b")),
    ]


def test_every_switch_is_given_to_the_workers_too() -> None:
    full = worker_environment({"PATCHER_PATCHES": "on", "TLLM_PATCHER_HOME": "/h", "X": "1"})
    assert full == {
        "PATCHER_PATCHES": "on",
        "TLLM_PATCHER_PATCHES": "on",
        "TLLM_PATCHER_HOME": "/h",
        "X": "1",
    }
    with pytest.raises(bench.UsageError, match="which TensorRT-LLM's workers see, is 'off'"):
        worker_environment({"PATCHER_PATCHES": "on", "TLLM_PATCHER_PATCHES": "off"})


def test_a_run_that_cannot_be_is_told_in_a_sentence(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path)}
    with pytest.raises(bench.MissingError, match="trtllm-bench is not on PATH") as error:
        run_benchmark(RUN, tmp_path / "run", nothing)
    assert error.value.exit_code == 3
    program = tmp_path / "trtllm-bench"
    program.write_text("#!/bin/sh\necho CUDA out of memory >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(bench.PatcherError, match="ended with status 1: CUDA out of memory"):
        run_benchmark(RUN, tmp_path / "run", nothing)
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    with pytest.raises(bench.PatcherError, match=r"did not end in 0\.2 s"):
        run_benchmark(RUN, tmp_path / "run", nothing, timeout_s=0.2)
    program.write_text("#!/nowhere/python\n")
    with pytest.raises(bench.MissingError, match="cannot be run"):
        run_benchmark(RUN, tmp_path / "run", nothing)
    empty = RUN.model_copy(update={"module_folders": (tmp_path,)})
    with pytest.raises(bench.UsageError, match="is no Python package"):
        run_benchmark(empty, tmp_path / "run", nothing)


def test_the_double_refuses_what_trtllm_bench_would(tmp_path: Path) -> None:
    """Else a wrong option of ours would pass unseen."""
    environment = {"PATH": f"{DOUBLE / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    folder = RUN.model_copy(update={"model": str(tmp_path)})
    with pytest.raises(bench.PatcherError, match="please provide a model name"):
        run_benchmark(folder, tmp_path / "run", environment)
