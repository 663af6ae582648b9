"""Windows at other batch sizes and context lengths, besides those of an A/B."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from patcher.ab.job import ABJob
from patcher.ab.other_workloads import LIMIT_PCT, OtherPoint, OtherWorkloads, PeakMemory
from patcher.bench import Shape, UsageError, Window, Workload
from patcher.bench.ab.phases import ABPhase, ABProgress
from patcher.bench.ab.throughput import compare_windows
from patcher.bench.ab.windows import Arms, LocalSide, Pair, Side, abba_orders, take_pair
from patcher.bench.engines import Engine
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.comparison import Arm

RESIDENT_PAIRS = 12
"""Pairs at each point if both arms are one process, without the warm-up pair."""
PROCESS_PAIRS = 4
"""Pairs at each point in each block of processes, without the warm-up pair; more of small batches.
"""
MOST_TIMES = 4
"""So many times more pairs at most: where a batch is small, windows are short and a pause of the
host of 20 ms is an eighth of one, but they cost little, since few prompts are read."""
FIRST_PAIR = 1_000_000
"""Offset of pair numbers, so that no pair here has the prompts of one of the workload's."""
BATCH_TIMES = 8
"""The larger default batch size, as a multiple of the workload's; the smaller is one sequence."""
CONTEXT_TIMES = (4, 8)
"""Default contexts, as multiples of the workload's."""


def shapes_of(
    workload: Workload, batches: Sequence[int] | None, contexts: Sequence[int] | None
) -> tuple[Shape, ...]:
    """The other workloads: each other batch at the workload's context, and each other context at
    its batch. By default: one sequence, eight times the batch, and four and eight times the
    context.
    """
    if batches is None:
        batches = (1, BATCH_TIMES * workload.batch)
    if contexts is None:
        contexts = [times * workload.input_len for times in CONTEXT_TIMES]
    made = [Shape(batch=batch, context=workload.input_len) for batch in batches]
    made += [Shape(batch=workload.batch, context=context) for context in contexts]
    own = Shape(batch=workload.batch, context=workload.input_len)
    return tuple(dict.fromkeys(shape for shape in made if shape != own))


def other_shapes(
    workload: Workload, default: bool, batches: str | None, contexts: str | None
) -> tuple[Shape, ...]:
    """Parse `--other-workloads`, `--also-batch 1,64` and `--also-context 4096`.

    Raises:
        UsageError: a value is not a whole number.
    """
    if batches is None and contexts is None:
        return shapes_of(workload, None, None) if default else ()
    return shapes_of(
        workload,
        _others(batches, default, "--also-batch"),
        _others(contexts, default, "--also-context"),
    )


def _others(text: str | None, default: bool, option: str) -> list[int] | None:
    """What an option lists; None: the default."""
    if text is None:
        return None if default else []
    return whole_numbers(text, option)


def whole_numbers(text: str, option: str) -> list[int]:
    """Parse whole numbers with commas, the value of an option.

    Raises:
        UsageError: a value is none, or there is none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"{option} {text!r}", f"give whole numbers with commas: {option} 1,64")
    return [int(part) for part in parts]


def planned(job: ABJob, block: int | None) -> Iterator[tuple[Shape, range, random.Random]]:
    """For each point: the numbers of its pairs in that block, of which the first warms up, and the
    seed of their orders. None: both arms are one process.
    """
    first = FIRST_PAIR + (block or 0) * sum(1 + pairs_at(one, job) for one in job.other_workloads)
    for index, shape in enumerate(job.other_workloads):
        count = 1 + (RESIDENT_PAIRS if block is None else pairs_at(shape, job))
        yield shape, range(first, first + count), random.Random(f"{job.seed}:{block}:{index}")
        first += count


def pairs_at(shape: Shape, job: ABJob) -> int:
    """Pairs of one block of processes at a point, without the warm-up pair."""
    return PROCESS_PAIRS * min(MOST_TIMES, max(1, job.workload.batch // shape.batch))


class OtherWindows:
    """The windows and memory figures of each point."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self._windows: dict[Shape, list[Window]] = {shape: [] for shape in shapes}

    def add(self, shape: Shape, windows: Iterable[Window]) -> None:
        """Add windows of that point."""
        self._windows[shape] += windows

    def found(self, memory: PeakMemory | None) -> OtherWorkloads | None:
        """The results; None if there are none."""
        if not self._windows and memory is None:
            return None
        points, unusable = [], []
        for shape, windows in self._windows.items():
            comparison = compare_windows(windows, "ab", -LIMIT_PCT, 95.0)
            if comparison is None:
                unusable.append(shape.label)
                continue
            points.append(
                OtherPoint(
                    batch=shape.batch,
                    context=shape.context,
                    comparison=comparison,
                    windows=tuple(windows),
                )
            )
        return OtherWorkloads(points=tuple(points), memory=memory, unusable=tuple(unusable))


def take_in_one_process(
    job: ABJob,
    engine: Engine,
    arms: Arms,
    kernel_calls: Callable[[], int] | None,
    clocks: ClockMonitor,
    progress: ABProgress,
) -> OtherWindows:
    """Measure pairs at every point, of which the first warms up; both arms are one process.

    Args:
        kernel_calls: the number of calls of the patched kernel until now.
    """
    others = OtherWindows(job.other_workloads)
    for index, (shape, numbers, rng) in enumerate(planned(job, None)):
        progress(ABPhase.OTHER, f"other traffic: {shape.label}", index, len(job.other_workloads))
        sides: dict[Arm, Side] = {
            arm: LocalSide(engine, enter, kernel_calls, shape) for arm, enter in arms.items()
        }
        workload = shape.of(job.workload)
        for number, order in zip(numbers, abba_orders(rng, len(numbers)), strict=True):
            pair = Pair(number, "ab", order)
            windows = take_pair(pair, sides, workload, engine.vocab_size, job.seed, clocks)
            others.add(shape, windows)
    return others


def peak_memory(peak: Mapping[Arm, int], device: str) -> PeakMemory | None:
    """The memory of the GPU only; on a CPU a process's memory is mostly Python's own."""
    if device != "cuda" or not {"baseline", "patched"} <= peak.keys():
        return None
    return PeakMemory(baseline_bytes=peak["baseline"], patched_bytes=peak["patched"])


def peak_of_arms(engine: Engine, arms: Arms) -> dict[Arm, int]:
    """Peak bytes of the GPU's tensors in one batch of each arm; empty on a CPU."""
    if engine.workload.device != "cuda":
        return {}
    peak: dict[Arm, int] = {}
    prompts = engine.prompts(engine.workload.seed)
    for arm, enter in arms.items():
        with enter():
            torch.cuda.reset_peak_memory_stats()
            engine.generate(prompts, engine.workload.output_len)
            peak[arm] = int(torch.cuda.max_memory_allocated())
    return peak
