"""End-to-end A/B and quality of a patch, or of several at once, in a process of its own.

The patched kernel was written by a model: the process that runs it gets an environment by
allow-list, so that no key is in its reach, and what comes back is schema-checked JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from patcher.ab.job import ABJob, Measurement, Report
from patcher.bench import PatcherError, relayed
from patcher.bench.machine.environment import engine_environment
from patcher.bench.sandbox.die_with_parent import die_with_parent
from patcher.integrate import Patch, Receipt

if TYPE_CHECKING:
    from patcher.bench.ab.planted import PlantedGains

RESULT: TypeAdapter[tuple[Measurement, ...]] = TypeAdapter(tuple[Measurement, ...])
"""What the measuring process leaves."""


def measure_in_child(job: ABJob, patch_folder: Path, report: Report) -> Measurement:
    """As `measure_together`, one patch."""
    [measured] = measure_together(job, [patch_folder], report)
    return measured


def measure_together(
    job: ABJob, patch_folders: Sequence[Path], report: Report
) -> tuple[Measurement, ...]:
    """Run `measure` in a process without keys, or each arm in one; killed as a group when
    interrupted.

    Raises:
        PatcherError: the process failed; its last lines are in the message.
    """
    patches = [Patch.load(folder) for folder in patch_folders]
    for patch in patches:
        patch.verify_target()
    if job.process_pairs:
        from patcher.ab.pairs import measure_pairs

        return measure_pairs(job, patches, report)
    with tempfile.TemporaryDirectory(prefix="patcher-measure-") as scratch:
        folder = Path(scratch)
        (folder / "job.json").write_text(job.model_dump_json(), encoding="utf-8")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                die_with_parent(
                    *(sys.executable, "-P", "-m", "patcher.ab.one_process", str(folder)),
                    *(str(each.resolve()) for each in patch_folders),
                ),
                env=engine_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _relay(line, report)
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        result = folder / "result.json"
        if code != 0 or not result.is_file():
            error = folder / "error.json"
            if error.is_file():
                raise relayed(json.loads(error.read_text(encoding="utf-8")))
            tail = (folder / "log").read_text(encoding="utf-8", errors="replace")[-1500:]
            raise PatcherError(f"measuring failed (exit code {code}): {tail.strip()}")
        try:
            return RESULT.validate_json(result.read_bytes())
        except ValidationError as error:
            raise PatcherError(f"measuring gave no valid result: {error}") from error


def _relay(line: bytes, report: Report) -> None:
    try:
        stage, done, total = json.loads(line)
    except (ValueError, TypeError):
        return  # something in the engine prints to stdout: not progress
    report(str(stage), int(done), int(total))


def measure(job: ABJob, patches: Sequence[Patch], report: Report) -> tuple[Measurement, ...]:
    """The whole measurement in this process: A/B with control, quality, revert; for each of the
    patches, which are in together, with its own receipts.
    """
    from contextlib import ExitStack, contextmanager, nullcontext

    from patcher.ab.other_windows import OtherTraffic, peak_memory, peak_of_arms
    from patcher.bench.ab.quality import assess, greedy_identical
    from patcher.bench.ab.throughput import measure as measure_throughput
    from patcher.bench.ab.windows import Arms, LocalSide
    from patcher.bench.engines import open_engine
    from patcher.bench.machine.clocks import ClockMonitor
    from patcher.integrate import CallCounters, prepare

    kernels = [patch.kernel() for patch in patches]
    report("load the model", 0, 1)
    engine = open_engine(job.workload)
    books, quality_books, other_books = (
        [CallCounters(patch.manifest.id, patch.digest) for patch in patches] for _ in range(3)
    )
    prompts = engine.prompts(job.seed)
    steps = job.workload.output_len
    before = engine.generate(prompts, steps).tokens

    def arms(receipts: Sequence[CallCounters]) -> Arms:
        prepared = [
            prepare(engine.model, patch, kernel=kernel, book=book)
            for patch, kernel, book in zip(patches, kernels, receipts, strict=True)
        ]

        @contextmanager
        def patched() -> Iterator[None]:
            with ExitStack() as stack:
                for one in prepared:
                    stack.enter_context(one)
                yield

        return {"baseline": nullcontext, "patched": patched}

    def calls_in(receipts: Sequence[CallCounters]) -> int:
        return sum(book.calls.total() for book in receipts)

    elsewhere_arms = arms(other_books)
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:
        throughput = measure_throughput(
            engine,
            arms(books),
            job.workload,
            untimed=elsewhere_arms,
            margin_pct=job.margin_pct,
            max_pairs=job.max_pairs,
            looks=job.looks,
            patch_id=" + ".join(patch.manifest.id for patch in patches),
            seed=job.seed,
            clocks=clocks,
            kernel_calls=lambda: calls_in(books),
            progress=report,
        )
        other = OtherTraffic(job, clocks, report)
        other.take(
            lambda shape: {
                arm: LocalSide(engine, enter, lambda: calls_in(other_books), shape)
                for arm, enter in elsewhere_arms.items()
            },
            engine.vocab_size,
        )
        memory = peak_memory(peak_of_arms(engine, elsewhere_arms), job.workload.device)
    report("quality", 0, 1)
    quality = assess(engine, arms(quality_books), job.seed + 1, job.quality_steps)
    report("revert", 0, 1)
    identical = greedy_identical(engine, before, prompts, steps)
    return tuple(
        Measurement(
            throughput=throughput,
            quality=quality,
            receipt=Receipt.of(book),
            quality_receipt=Receipt.of(quality_book),
            reverted_identical=identical,
            elsewhere=other.found(memory),
        )
        for book, quality_book in zip(books, quality_books, strict=True)
    )


def measure_planted(job: ABJob, report: Report) -> PlantedGains:
    """Whether an A/B of this workload finds planted gains; in this process, as no patch runs."""
    from patcher.bench.ab.planted import model_delay, plant
    from patcher.bench.engines import open_engine
    from patcher.bench.machine.clocks import ClockMonitor

    report("load the model", 0, 1)
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
            progress=report,
        )


def main() -> None:
    """`python -P -m patcher.ab.one_process FOLDER PATCH...`: job.json in, result or error.json
    out."""
    folder, *patch_folders = map(Path, sys.argv[1:])
    job = ABJob.model_validate_json((folder / "job.json").read_text(encoding="utf-8"))
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an engine prints goes to the log

    def report(stage: str, done: int, total: int) -> None:
        channel.write(json.dumps([stage, done, total]) + "\n")

    try:
        measured = measure(job, [Patch.load(each) for each in patch_folders], report)
    except PatcherError as error:
        (folder / "error.json").write_text(json.dumps(error.as_dict()), encoding="utf-8")
        sys.exit(error.exit_code)
    (folder / "result.json").write_bytes(RESULT.dump_json(measured))


if __name__ == "__main__":
    main()
