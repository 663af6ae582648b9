"""End-to-end A/B of patches with a process for each arm: vLLM, and any engine that way.

One process more than the pairs take, the *reference*, gives what higher precision or the engine
without compilation says, and how spread out the routing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from patcher.ab.arm_process import ArmProcess
from patcher.ab.job import ABJob, Measurement, Report
from patcher.ab.launcher import STAGGER_S, Asking, loads_beside, with_cache_size
from patcher.ab.other_windows import OtherTraffic, peak_memory
from patcher.ab.receipt_counts import called_between, merged
from patcher.bench import Quality, Shape, Throughput, UsageError, Workload
from patcher.bench.ab.engine_config import Tuning, overriding
from patcher.bench.ab.processes import ABPlan, measure_processes
from patcher.bench.ab.windows import Pair, Side
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.comparison import Arm
from patcher.integrate import Patch, Receipt


def measure_pairs(job: ABJob, patches: Sequence[Patch], report: Report) -> tuple[Measurement, ...]:
    """The whole measurement: best stock configuration, A/B with control, quality, revert.

    Returns:
        for each of the patches, which are in together, what was measured, with its own receipts.

    Raises:
        UsageError: a patch is for another engine.
        PatcherError: as `patcher.bench.ab.processes.measure_processes`.
    """
    refuse_other_engines(job.workload, patches)
    job = with_cache_size(job)
    sitting = PatchSitting(job, patches)
    tuning = sitting.tuning(report)
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:
        other = OtherTraffic(job, clocks, report)
        throughput = measure_processes(
            sitting.start,
            job.workload,
            ABPlan(
                process_pairs=job.process_pairs,
                pairs=job.pairs_each,
                looks=1,
                together=False if job.alone else None,
                stagger_s=STAGGER_S if loads_beside(job) else None,
            ),
            margin_pct=job.margin_pct,
            patch_id=" + ".join(patch.manifest.id for patch in patches),
            clocks=clocks,
            seed=job.seed,
            visit=sitting.visit,
            also=partial(elsewhere, other),
            progress=report,
        )
    report("quality", 0, 1)
    quality, entropy = sitting.finish()
    throughput = told(throughput, entropy, sitting, patches, tuning)
    memory = peak_memory(throughput.peak_memory_bytes, job.workload.device)
    return tuple(
        Measurement(
            throughput=throughput,
            quality=quality,
            receipt=sitting.receipt(patch),
            quality_receipt=sitting.quality_receipt(patch),
            reverted_identical=sitting.reverted_identical,
            elsewhere=other.found(memory),
        )
        for patch in patches
    )


def refuse_other_engines(workload: Workload, patches: Iterable[Patch]) -> None:
    """Raises:
    UsageError: a patch is for another engine than the workload's.
    """
    for patch in patches:
        target = patch.manifest.target.engine
        if target != workload.engine:
            raise UsageError(
                f"{patch.manifest.id} is for {target}, not for {workload.engine}",
                f"say --engine {target}",
            )


def elsewhere(other: OtherTraffic, last: Pair, processes: Mapping[Arm, ArmProcess]) -> None:
    """See `patcher.bench.ab.processes.Also`."""

    def sides(shape: Shape) -> dict[Arm, Side]:
        return {arm: process.side(shape) for arm, process in processes.items()}

    vocab_size = next(iter(processes.values())).vocab_size
    other.take(sides, vocab_size, last.process, last.swapped)


def told(
    throughput: Throughput,
    entropy: float | None,
    asking: Asking,
    patches: Sequence[Patch],
    tuning: Tuning | None,
) -> Throughput:
    """With what was found beside the windows."""
    return throughput.model_copy(
        update={
            "routing_entropy_pct": entropy,
            "engine_arguments": asking.arguments,
            "patched_arguments": overriding(asking.arguments_of(patches), asking.arguments),
            "tuning": tuning,
        }
    )


class PatchSitting(Asking):
    """What is asked of the processes beside their windows: tokens, logits, receipts.

    Control, first process: greedy tokens before any patch ran, which all are then forced to decode
    for the logits; its second process gives the A/A floor. A baseline started after a patched
    process shows what a revert leaves.
    """

    def __init__(self, job: ABJob, patches: Sequence[Patch]) -> None:
        super().__init__(job)
        self.patches = tuple(patches)
        self._before: list[list[int]] = []
        self._repeated: list[list[int]] = []
        self._after: list[list[int]] = []
        self._logits: dict[Arm, torch.Tensor] = {}
        self._again: torch.Tensor | None = None
        self._receipts: dict[str, list[Receipt]] = {}
        """By patch id, of each process."""
        self._quality: dict[str, Receipt] = {}

    def start(self, arm: Arm, memory_share: float) -> ArmProcess:
        patches = self.patches if arm == "patched" else ()
        return self.started(arm, self.arguments_of(patches), memory_share, patches)

    def visit(self, pair: Pair, arm: Arm, process: ArmProcess) -> None:
        """See `patcher.bench.ab.processes.Visit`."""
        if pair.kind == "aa":
            # both of its processes are the baseline
            if not self._before:
                self._before = self.greedy(process)
                self._logits["baseline"] = self.logits(process, self._before)[0]
            else:
                self._repeated = self.greedy(process)
                self._again = self.logits(process, self._before)[0]
        elif arm == "baseline":
            self._after = self.greedy(process)
        else:
            for name, one in process.called_since_warm().items():
                self._receipts.setdefault(name, []).append(one)
            if arm not in self._logits:
                timed = process.receipts()
                self._logits[arm] = self.logits(process, self._before)[0]
                self._quality = called_between(timed, process.receipts())

    def finish(self) -> tuple[Quality, float | None]:
        """Quality and routing entropy, with the help of one more process or two."""
        assert self._again is not None
        baseline = self._logits["baseline"], self._again
        return self.quality(self.patches, self._logits["patched"], baseline, self._before)

    def receipt(self, patch: Patch) -> Receipt:
        return merged(self._receipts[patch.manifest.id])

    def quality_receipt(self, patch: Patch) -> Receipt:
        return self._quality[patch.manifest.id]

    @property
    def reverted_identical(self) -> bool:
        """A baseline started after patched processes gives the tokens of one started before, as
        far as two processes of the control do.
        """
        return identical(self._before, self._repeated, self._after)


def identical(before: list[list[int]], again: list[list[int]], after: list[list[int]]) -> bool:
    """Whether `after` is `before` [batch][tokens], up to where `again` leaves it: an engine that
    does not repeat itself from process to process cannot show more. False where that is nowhere.
    """
    if not len(before) == len(again) == len(after):
        return False
    shared = 0
    for first, second, third in zip(before, again, after, strict=True):
        both = min(len(first), len(second))
        length = next((at for at in range(both) if first[at] != second[at]), both)
        shared += length
        if third[:length] != first[:length]:
            return False
    return shared > 0
