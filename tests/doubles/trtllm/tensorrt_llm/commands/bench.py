"""Double of `trtllm-bench`: real option names, dataset rows, YAML keys and report fields.

Times are made up from the work asked for, as if each token took 1 ms for the whole batch.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tensorrt_llm import __version__
from tensorrt_llm.executor.proxy import GenerationExecutorProxy
from tensorrt_llm.tools.importlib_utils import import_custom_module_from_dir

OPTIONS = ("enable_autotuner", "cuda_graph_config", "load_format", "moe_config", "kv_cache_config")
"""Of the arguments of the LLM class, those that the double knows; another is refused there, too."""
MS_PER_STEP = 1.0


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser("trtllm-bench", allow_abbrev=False)
    top.add_argument("--model", "-m", required=True)
    top.add_argument("--model_path", type=Path)
    top.add_argument("--workspace", "-w", type=Path, default=Path("/tmp"))
    commands = top.add_subparsers(required=True)
    run = commands.add_parser("throughput", allow_abbrev=False)
    run.add_argument("--backend", choices=["pytorch", "_autodeploy", "tensorrt"], default="pytorch")
    run.add_argument("--custom_module_dirs", type=Path, action="append", default=[])
    run.add_argument("--extra_llm_api_options", "--config", type=Path)
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        run.add_argument(f"--{name}", type=int)
    run.add_argument("--kv_cache_free_gpu_mem_fraction", type=float, default=0.9)
    run.add_argument("--dataset", type=Path, required=True)
    for name, default in (("eos_id", -1), ("num_requests", 0), ("warmup", 2), ("concurrency", -1)):
        run.add_argument(f"--{name}", type=int, default=default)
    for name in ("tp", "pp"):
        run.add_argument(f"--{name}", type=int, default=1)
    run.add_argument("--report_json", type=Path)
    return top


def _dataset(path: Path, most: int) -> tuple[list[list[int]], list[int]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = rows[: most or None]
    assert all(isinstance(row["task_id"], int) for row in rows)
    return [row["input_ids"] for row in rows], [row["output_tokens"] for row in rows]


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {f"p{share}": ordered[len(ordered) * share // 100] for share in (50, 90, 95, 99)}
    mean = sum(values) / len(values)
    return at | {"minimum": ordered[0], "maximum": ordered[-1], "average": mean}


def _report(
    asked: argparse.Namespace, kv_share: float, inputs: list[int], outputs: list[int]
) -> dict[str, Any]:
    requests, world = len(outputs), asked.tp * asked.pp
    waves = -(-requests // asked.max_batch_size)
    total_ms = MS_PER_STEP * max(outputs) * waves
    latency_ms = MS_PER_STEP * max(outputs)
    tokens_s = sum(outputs) / total_ms * 1e3
    lengths = {
        "isl_stats": _percentiles([float(value) for value in inputs]),
        "osl_stats": _percentiles([float(value) for value in outputs]),
        "num_requests": requests,
        "dataset_path": str(asked.dataset),
    }
    return {
        "engine": {
            "model": asked.model,
            "model_path": str(asked.model_path),
            "engine_dir": "None",
            "version": __version__,
            "backend": "Pytorch",
            "dtype": "bfloat16",
            "kv_cache_dtype": None,
            "quantization": "W4A16_MXFP4",
        },
        "machine": None,
        "world_info": {
            "tp_size": asked.tp,
            "pp_size": asked.pp,
            "ep_size": 1,
            "world_size": world,
            "max_batch_size": asked.max_batch_size,
            "max_num_tokens": asked.max_num_tokens,
            "scheduling_policy": "GUARANTEED_NO_EVICT",
            "kv_cache_percentage": kv_share,
            "issue_rate": 1e6,
        },
        "request_info": {
            "num_requests": requests,
            "avg_num_concurrent_requests": requests * latency_ms / total_ms,
            "avg_input_length": sum(inputs) / requests,
            "avg_output_length": sum(outputs) / requests,
        },
        "performance": {
            "total_latency_ms": total_ms,
            "avg_request_latency_ms": latency_ms,
            "request_throughput_req_s": requests / total_ms * 1e3,
            "system_output_throughput_tok_s": tokens_s,
            "system_total_throughput_tok_s": tokens_s + sum(inputs) / total_ms * 1e3,
            "output_throughput_per_user_tok_s": 1e3 / MS_PER_STEP,
            "output_throughput_per_gpu_tok_s": tokens_s / world,
            "request_latency_percentiles_ms": _percentiles([latency_ms] * requests),
        },
        "dataset": lengths,
    }


def main() -> None:
    asked = _parser().parse_args()
    if Path(asked.model).exists():
        sys.exit("Model is a file or directory, please provide a model name.")
    for folder in asked.custom_module_dirs:
        import_custom_module_from_dir(folder)
    # TensorRT-LLM reads YAML; of that the double reads the part that is JSON
    options = json.loads(asked.extra_llm_api_options.read_text())
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        sys.exit(f"LlmArgs has no field {unknown[0]}")
    prompts, outputs = _dataset(asked.dataset, asked.num_requests)
    if max(map(len, prompts)) + max(outputs) > asked.max_seq_len:
        sys.exit("a request is longer than max_seq_len")
    executor = GenerationExecutorProxy(asked.tp * asked.pp)
    work = {"output_tokens": max(outputs), "batch": asked.max_batch_size}
    if asked.warmup:
        executor.generate(prompts=prompts[: asked.warmup], **work)
    tokens = executor.generate(prompts=prompts, **work)
    executor.shutdown()
    if asked.report_json is not None:
        # the real one writes text (--output_json); ids of every rank are the double's own
        (asked.report_json.parent / "tokens.json").write_text(json.dumps(tokens))
        share = options["kv_cache_config"]["free_gpu_memory_fraction"]
        report = _report(asked, share, [len(prompt) for prompt in prompts], outputs)
        asked.report_json.write_text(json.dumps(report, indent=4))


if __name__ == "__main__":
    main()
