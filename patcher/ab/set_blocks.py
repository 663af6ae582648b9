"""Several sets of patches against one baseline, in waves of processes: see `ab.shared_baseline`.

What a wave gave is a file of the folder, so that a second start goes on after the last whole wave.
Logits lie beside it until quality is known, which takes one process more, after the last wave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from patcher.ab.arm_process import ArmProcess
from patcher.ab.block_folder import BlockFolder, BlockRecord, BlocksHeader, BlocksQuality, Tokens
from patcher.ab.job import ABJob, Measurement, Report
from patcher.ab.launcher import STAGGER_S, Asking, loads_beside, with_cache_size
from patcher.ab.other_windows import OtherTraffic, peak_memory, planned
from patcher.ab.pairs import identical, refuse_other_engines, told
from patcher.ab.receipt_counts import called_between, merged
from patcher.bench import UsageError, Window
from patcher.bench.ab.blocks import (
    BASELINE,
    CONTROL,
    Block,
    BlockRound,
    BlockSession,
    mirrored,
    take_round,
    throughput_of,
)
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.ab.processes import ABPlan, refuse_few
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import fingerprint
from patcher.integrate import Patch, Receipt


def measure_waves(
    job: ABJob, sets: Mapping[str, Sequence[Patch]], folder: Path, report: Report
) -> dict[str, tuple[Measurement, ...]] | None:
    """Every set of patches, by name, as `patcher.ab.pairs.measure_pairs` gives it.

    Args:
        folder: where waves are kept; what it has is not taken again.

    Returns:
        for each set what was measured for each of its patches; None where fewer processes fit side
        by side than a wave needs (`patcher.bench.ab.blocks.MIN_ROOM`).

    Raises:
        UsageError: a patch is for another engine, the folder's waves are of another machine, or
            too few process pairs.
        VerificationError: a patch was changed or does not fit here; a file of the folder is
            damaged.
        PatcherError: as `BlockSession.run`, or every pair of a set was unfit.
    """
    refuse_few(job.process_pairs)
    every = [patch for patches in sets.values() for patch in patches]
    refuse_other_engines(job.workload, every)
    for patch in every:
        patch.verify_target()
    job = with_cache_size(job)
    sitting = SetSitting(job, sets, folder)
    sitting.open(report)
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:
        if not sitting.take(clocks, report):
            return None
        report("quality", 0, 1)
        compared = sitting.compare()
        return {name: sitting.measured(name, compared, clocks, report) for name in sets}


class SetSitting(Asking):
    """What is asked of the processes of waves beside their windows: tokens, logits, receipts.

    The first baseline of all gives its greedy tokens before any patched process is started, which
    all are later forced to decode for the logits; the control gives the A/A floor. A baseline that
    was started after a wave with a set in it shows what the revert of that set leaves.
    """

    def __init__(self, job: ABJob, sets: Mapping[str, Sequence[Patch]], folder: Path) -> None:
        super().__init__(job)
        self.sets = {name: tuple(patches) for name, patches in sets.items()}
        self.folder = BlockFolder(folder)
        self.taken: list[BlockRecord] = []
        self._tuning: Tuning | None = None
        self._empty()

    def _empty(self) -> None:
        """For the next wave."""
        self._greedy: dict[str, Tokens] = {}
        self._receipts: dict[str, dict[str, Receipt]] = {}
        self._quality: dict[str, dict[str, Receipt]] = {}
        self._elsewhere: dict[str, list[list[Window]]] = {}

    def open(self, report: Report) -> None:
        """Read what the folder has, or begin it: tuned, where that was asked for."""
        workload = self.job.workload
        here = fingerprint(workload.device, workload.threads)

        def begin() -> BlocksHeader:
            tuning = self.tuning(report)
            return BlocksHeader(fingerprint=here, arguments=self.arguments, tuning=tuning)

        begun = self.folder.begun(begin)
        if begun.fingerprint != here:
            raise UsageError(
                f"the waves in {self.folder.path} are of another machine, or of other libraries",
                "go on there, or remove that folder to measure anew",
            )
        self.arguments, self._tuning = dict(begun.arguments), begun.tuning
        self.taken = self.folder.waves()

    def take(self, clocks: ClockMonitor, report: Report) -> bool:
        """The waves that are missing; False where too few processes fit."""
        job = self.job
        return BlockSession(
            tuple(self.sets),
            self.start,
            job.workload,
            ABPlan(
                process_pairs=job.process_pairs,
                pairs=job.pairs_each,
                stagger_s=STAGGER_S if loads_beside(job) else None,
            ),
            clocks,
            self.begin,
            self.visit,
            partial(self.also, clocks, report),
            self.keep,
            waves=[one.wave for one in self.taken],
            seed=job.seed,
            progress=report,
        ).run()

    def start(self, name: str, memory_share: float) -> ArmProcess:
        patches = self.sets.get(name, ())
        return self.started(name, self.arguments_of(patches), memory_share, patches)

    def begin(self, process: ArmProcess) -> None:
        """See `shared_baseline.Begin`; what an interrupted first wave left is forgotten."""
        self._empty()
        self._greedy["before"] = self.greedy(process)

    def visit(self, number: int, name: str, process: ArmProcess) -> None:
        """See `patcher.bench.ab.blocks.Visit`."""
        if name == BASELINE and number > 0:
            self._greedy["after"] = self.greedy(process)
        elif name == CONTROL:
            self._greedy["again"] = self.greedy(process)
        if name in self.sets:
            self._receipts[name] = process.called_since_warm()
        seen = any(name in one.wave.swapped for one in self.taken)
        timed = process.receipts()
        if number == 0 or (name in self.sets and not seen):
            self.folder.write_logits(name, self.logits(process, self._before)[0])
        if name in self.sets and not seen:
            self._quality[name] = called_between(timed, process.receipts())

    def also(
        self,
        clocks: ClockMonitor,
        report: Report,
        number: int,
        swapped: Mapping[str, bool],
        processes: Mapping[str, ArmProcess],
    ) -> None:
        """See `shared_baseline.Also`: windows at other traffic, one baseline there, too."""
        job = self.job
        for index, (shape, numbers, rng) in enumerate(planned(job, number)):
            report(f"elsewhere: {shape.label}", index, len(job.elsewhere))
            sides = {name: process.side(shape) for name, process in processes.items()}
            orders = mirrored(rng, list(processes), len(numbers))
            found: dict[str, list[Window]] = {}
            for each, order in zip(numbers, orders, strict=True):
                two = take_round(
                    BlockRound(each, number, order, swapped),
                    sides,
                    shape.of(job.workload),
                    processes[BASELINE].vocab_size,
                    job.seed,
                    clocks,
                )
                for name, windows in two.items():
                    found.setdefault(name, []).extend(windows)
            for name, windows in found.items():
                self._elsewhere.setdefault(name, []).append(windows)

    def keep(self, wave: Block) -> None:
        """A whole wave, with all that was asked in it."""
        taken = BlockRecord(
            wave=wave,
            greedy=self._greedy,
            receipts=self._receipts,
            quality_receipts=self._quality,
            elsewhere={name: tuple(map(tuple, points)) for name, points in self._elsewhere.items()},
        )
        self.folder.keep(taken)
        self.taken.append(taken)
        self._empty()

    def compare(self) -> BlocksQuality:
        """Quality of all sets, with the help of one more process."""
        return self.folder.compared(self._compared)

    def measured(
        self, name: str, compared: BlocksQuality, clocks: ClockMonitor, report: Report
    ) -> tuple[Measurement, ...]:
        """For each patch of the set."""
        job, own = self.job, [one for one in self.taken if name in one.wave.swapped]
        waves = [one.wave for one in self.taken]
        throughput = told(
            throughput_of(name, waves, job.workload, job.margin_pct, clocks),
            compared.routing_entropy_pct,
            self,
            self.sets[name],
            self._tuning,
        )
        other = OtherTraffic(job, clocks, report)
        for one in own:
            for shape, windows in zip(job.elsewhere, one.elsewhere.get(name, ()), strict=True):
                other.add(shape, windows)
        elsewhere = other.found(peak_memory(throughput.peak_memory_bytes, job.workload.device))
        first = self.taken[0].greedy
        reverted = identical(first["before"], first["again"], own[-1].greedy.get("after", []))
        return tuple(
            Measurement(
                throughput=throughput,
                quality=compared.quality[name],
                receipt=merged([one.receipts[name][patch.manifest.id] for one in own]),
                quality_receipt=own[0].quality_receipts[name][patch.manifest.id],
                reverted_identical=reverted,
                elsewhere=elsewhere,
            )
            for patch in self.sets[name]
        )

    @property
    def _before(self) -> Tokens:
        return (self.taken[0].greedy if self.taken else self._greedy)["before"]

    def _compared(self) -> BlocksQuality:
        baseline = self.folder.logits(BASELINE), self.folder.logits(CONTROL)
        found = {
            name: self.quality(patches, self.folder.logits(name), baseline, self._before)
            for name, patches in self.sets.items()
        }
        return BlocksQuality(
            routing_entropy_pct=next(iter(found.values()))[1],
            quality={name: quality for name, (quality, _) in found.items()},
        )
