"""An end-to-end A/B in one process, whose engine is patched and unpatched in turn.

`patcher.ab.compare` starts it as `python -P -m patcher.ab.one_process FOLDER PATCH...`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from patcher.ab.compare import RESULT
from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.ab.other_windows import peak_memory, peak_of_arms, take_in_one_process
from patcher.bench import PatcherError
from patcher.bench.ab.phases import ABPhase, ABProgress
from patcher.bench.ab.planted import PlantedGains, model_delay, plant
from patcher.bench.ab.quality import assess, greedy_identical
from patcher.bench.ab.throughput import compare_in_one_process
from patcher.bench.ab.windows import Arms
from patcher.bench.engines import open_engine
from patcher.bench.engines.child_errors import memory_errors
from patcher.bench.machine.clocks import ClockMonitor
from patcher.integrate import CallCounters, Patch, Receipt, prepare


def compare_here(
    job: ABJob, patches: Sequence[Patch], progress: ABProgress
) -> tuple[Measurement, ...]:
    """Measure everything in this process: A/B with control, quality, revert. The patches are
    installed together; each measurement has the patch's own receipts.
    """
    kernels = [patch.kernel() for patch in patches]
    progress(ABPhase.LOAD, "load the model", 0, 1)
    engine = open_engine(job.workload)
    timed, compared, untimed = (
        [CallCounters(patch.manifest.id, patch.digest) for patch in patches] for _ in range(3)
    )
    prompts = engine.prompts(job.seed)
    steps = job.workload.output_len
    before = engine.generate(prompts, steps).tokens

    def arms(counters: Sequence[CallCounters]) -> Arms:
        prepared = [
            prepare(engine.model, patch, kernel=kernel, book=book)
            for patch, kernel, book in zip(patches, kernels, counters, strict=True)
        ]

        @contextmanager
        def patched() -> Iterator[None]:
            with ExitStack() as stack:
                for one in prepared:
                    stack.enter_context(one)
                yield

        return {"baseline": nullcontext, "patched": patched}

    def calls_in(counters: Sequence[CallCounters]) -> int:
        return sum(book.calls.total() for book in counters)

    untimed_arms = arms(untimed)
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:
        throughput = compare_in_one_process(
            engine,
            arms(timed),
            job.workload,
            untimed=untimed_arms,
            margin_pct=job.margin_pct,
            max_pairs=job.max_pairs,
            looks=job.looks,
            patch_id=" + ".join(patch.manifest.id for patch in patches),
            seed=job.seed,
            clocks=clocks,
            kernel_calls=lambda: calls_in(timed),
            progress=progress,
        )
        others = take_in_one_process(
            job, engine, untimed_arms, lambda: calls_in(untimed), clocks, progress
        )
        memory = peak_memory(peak_of_arms(engine, untimed_arms), job.workload.device)
    progress(ABPhase.QUALITY, "quality", 0, 1)
    quality = assess(engine, arms(compared), job.seed + 1, job.quality_steps)
    progress(ABPhase.QUALITY, "revert", 0, 1)
    identical = greedy_identical(engine, before, prompts, steps)
    return tuple(
        Measurement(
            throughput=throughput,
            quality=quality,
            receipt=Receipt.of(book),
            quality_receipt=Receipt.of(quality_book),
            reverted_identical=identical,
            other_workloads=others.found(memory),
        )
        for book, quality_book in zip(timed, compared, strict=True)
    )


def plant_gains(job: ABJob, progress: ABProgress) -> PlantedGains:
    """Whether an A/B of this workload finds planted gains; in this process, since no patch runs."""
    progress(ABPhase.LOAD, "load the model", 0, 1)
    engine = open_engine(job.workload)
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:
        return plant(
            engine,
            model_delay(engine.model),
            job.workload,
            margin_pct=job.margin_pct,
            max_pairs=job.max_pairs,
            looks=job.looks,
            clocks=clocks,
            seed=job.seed,
            progress=progress,
        )


def main() -> None:
    """Read `job.json` in the folder, and write `result.json` or `error.json` there."""
    folder, *patch_folders = map(Path, sys.argv[1:])
    job = ABJob.model_validate_json((folder / "job.json").read_text(encoding="utf-8"))
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's output goes to the log

    def progress(phase: ABPhase, said: str, done: int, total: int) -> None:
        channel.write(json.dumps([phase, said, done, total]) + "\n")

    try:
        with memory_errors(job.workload):
            measured = compare_here(job, [Patch.load(each) for each in patch_folders], progress)
    except PatcherError as error:
        (folder / "error.json").write_text(json.dumps(error.as_dict()), encoding="utf-8")
        sys.exit(error.exit_code)
    (folder / "result.json").write_bytes(RESULT.dump_json(measured))


if __name__ == "__main__":
    main()
