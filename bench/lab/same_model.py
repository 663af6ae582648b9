"""Is it still the same model with these patches? `python -m patcher.bench.lab.same_model OUT.json
MODEL BUNDLE... --engine vllm`, without a word on speed.

A process after the other: stock, patched, stock again, and the reference. OUT.json has the quality
of a verdict with its near ties, the task score of both arms where the weights are real, receipts of
the patched process, and whether the second stock process gives the first one's greedy tokens.
A whole verdict, with process pairs, is `patcher throughput compare`.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from patcher.ab.job import ABJob
from patcher.ab.launcher import ArmLauncher, with_cache_size
from patcher.ab.options import argument
from patcher.ab.quality_check import QualityCheck, Served, Tokens
from patcher.bench import Workload
from patcher.bench.ab.processes import SHARE_ALONE
from patcher.bench.machine.environment import describe
from patcher.integrate import Patch, unpacked

PATCHED = "patched"


def same_model(job: ABJob, patches: tuple[Patch, ...]) -> dict[str, Any]:
    """What a verdict says of the model, from four processes."""
    check = QualityCheck(ArmLauncher(with_cache_size(job), {PATCHED: patches}))
    tokens: Tokens = []
    greedy: dict[str, Tokens] = {}
    served: dict[str, Served] = {}
    receipts: dict[str, Any] = {}
    took: dict[str, float] = {}
    for name in ("stock", PATCHED, "stock again"):
        begin = time.monotonic()
        mine = patches if name == PATCHED else ()
        arguments = check.launcher.arguments_of(patches)
        with check.launcher.launch(name, arguments, SHARE_ALONE, mine) as process:
            took[f"{name}: load"] = time.monotonic() - begin
            greedy[name] = check.greedy(process)
            tokens = tokens or greedy[name]
            served[name] = check.served(process, tokens, name == "stock")
            for one in process.receipts():
                receipts[one.patch_id] = one.model_dump(mode="json")
        took[f"{name}: all"] = time.monotonic() - begin
    both = served["stock"], served["stock again"]
    quality, _ = check.quality(patches, served[PATCHED], both, tokens)
    return {
        "workload": job.workload.model_dump(mode="json"),
        "arguments": dict(check.launcher.arguments_of(patches)),
        "patches": [each.manifest.id for each in patches],
        "quality": quality.model_dump(mode="json"),
        "receipts": receipts,
        "greedy_tokens": sum(map(len, tokens)),
        "stock_repeats_itself_after_the_patch": greedy["stock"] == greedy["stock again"],
        "took_s": {name: round(seconds, 1) for name, seconds in took.items()},
        "environment": describe("cpu", job.workload.threads, "not timed").model_dump(mode="json"),
    }


def main() -> None:
    """Write OUT.json."""
    parser = argparse.ArgumentParser(prog="python -m patcher.bench.lab.same_model")
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--weights", choices=("local", "random"), default="local")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--quality-steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--engine-arg", action="append", default=[], metavar="NAME=VALUE")
    asked = parser.parse_args()
    workload = Workload(
        model=asked.model,
        engine=asked.engine,
        device="cpu",
        dtype=asked.dtype,
        batch=asked.batch,
        input_len=asked.input_len,
        output_len=asked.output_len,
        weights=asked.weights,
        threads=asked.threads,
    )
    job = ABJob(
        workload=workload,
        quality_steps=asked.quality_steps,
        arguments=dict(argument(each) for each in asked.engine_arg),
    )
    with ExitStack() as kept:
        folders = [kept.enter_context(unpacked(path)) for path in asked.bundles]
        found = same_model(job, tuple(map(Patch.load, folders)))
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(found["quality"]["reason"])


if __name__ == "__main__":
    main()
