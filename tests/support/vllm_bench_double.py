"""A double of vLLM's offline benchmarks: `python -m vllm_bench_double bench latency|throughput`.

It takes the arguments that `vllm bench` takes, prints what that prints when the engine has started,
and writes the JSON that it writes. Times are those of the engine's arguments: a batch takes
`--first-ms`, and `--token-ms` for each further token; of prompts, 100 get a token in that time.
With `--patch` it writes receipts as a patched engine does: two calls while it starts, then one for
each prompt, or none with `--start-only`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def options() -> argparse.Namespace:
    engine = argparse.ArgumentParser(add_help=False)
    for name in ("model", "tokenizer", "dtype", "load-format", "patch", "seen", "output-json"):
        engine.add_argument(f"--{name}", default="")
    for name in ("seed", "max-model-len", "max-num-seqs", "kv-cache-memory-bytes"):
        engine.add_argument(f"--{name}", type=int)
    engine.add_argument("--gpu-memory-utilization", type=float)
    for name, default in (("first-ms", 4.0), ("token-ms", 4.0), ("pause-s", 0.0)):
        engine.add_argument(f"--{name}", type=float, default=default)
    for name in ("start-only", "dies", "mute", "idle", "short"):
        engine.add_argument(f"--{name}", action="store_true")
    parser = argparse.ArgumentParser()
    kinds = parser.add_subparsers(required=True)
    bench = kinds.add_parser("bench").add_subparsers(required=True, dest="kind")
    latency = bench.add_parser("latency", parents=[engine])
    for name in ("input-len", "output-len", "batch-size", "num-iters-warmup", "num-iters"):
        latency.add_argument(f"--{name}", type=int, required=True)
    throughput = bench.add_parser("throughput", parents=[engine])
    throughput.add_argument("--backend", choices=["vllm"])
    throughput.add_argument("--dataset-name", choices=["random"])
    for name in ("random-input-len", "random-output-len", "num-prompts", "num-warmups"):
        throughput.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


def write_receipt(given: argparse.Namespace, calls: int) -> None:
    """What a worker with that patch would have written by now."""
    if given.patch:
        folder = Path(os.environ["PATCHER_RECEIPTS"])
        folder.mkdir(parents=True, exist_ok=True)
        receipt = {"patch_id": given.patch, "digest": "0" * 64, "pid": os.getpid()}
        half = folder / "receipt.part"
        half.write_text(json.dumps({**receipt, "calls": {"kernel": calls}}))
        half.replace(folder / "receipt.json")


def latency(given: argparse.Namespace) -> dict[str, object]:
    """As `vllm/benchmarks/latency.py` writes it."""
    seconds = (given.first_ms + (given.output_len - 1) * given.token_ms) / 1e3
    return {
        "avg_latency": seconds,
        "latencies": [seconds] * given.num_iters,
        "percentiles": dict.fromkeys(map(str, PERCENTAGES), seconds),
    }


def throughput(given: argparse.Namespace) -> dict[str, object]:
    """As `vllm/benchmarks/throughput.py` writes it."""
    outputs = given.num_prompts * given.random_output_len
    elapsed = outputs * given.token_ms / 1e3 / 100
    total = given.num_prompts * given.random_input_len + (0 if given.short else outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": given.num_prompts,
        "total_num_tokens": total,
        "requests_per_second": given.num_prompts / elapsed,
        "tokens_per_second": total / elapsed,
    }


if __name__ == "__main__":
    given = options()
    if given.seen:
        with Path(given.seen).open("a") as seen:
            seen.write(json.dumps(sys.argv[1:]) + "\n")
    assert given.load_format == "patcher_random"
    assert os.environ["PATCHER_RANDOM_WEIGHTS"] == "1"
    write_receipt(given, 2)
    if given.dies:
        raise ValueError("out of luck")
    prompts = given.batch_size if given.kind == "latency" else given.num_prompts
    said = "..." if given.kind == "latency" else f" with {given.num_warmups} requests..."
    if not given.mute:
        print("Warming up" + said)
    time.sleep(given.pause_s)
    write_receipt(given, 2 if given.start_only else 2 + prompts)
    found = latency(given) if given.kind == "latency" else throughput(given)
    if not given.idle:
        Path(given.output_json).write_text(json.dumps(found, indent=4))
