"""End-to-end A/B of patches with a process for each arm; vLLM needs it, any engine may use it.

Besides the windows (see `patcher.bench.ab.blocks`), processes give tokens, logits, answers to the
task, receipts and windows at other traffic. One further process, the *reference*, gives logits in
higher precision or without compilation, and the routing's entropy.

Each block is saved in a folder, so that a second start continues after the last complete block.
Logits and answers are saved beside it until quality is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from patcher.ab.arm_process import ArmProcess
from patcher.ab.block_folder import (
    BlockFolder,
    BlockRecord,
    BlocksHeader,
    BlocksQuality,
    blocks_folder,
)
from patcher.ab.job import ABJob
from patcher.ab.launcher import (
    STAGGER_S,
    ArmLauncher,
    loads_beside,
    refuse_other_engines,
    with_cache_size,
)
from patcher.ab.measurement import Measurement
from patcher.ab.other_windows import OtherWindows, peak_memory, planned
from patcher.ab.quality_check import QualityCheck, Tokens, identical
from patcher.ab.receipt_counts import called_between, merged
from patcher.bench import UsageError, Window
from patcher.bench.ab.block_session import BlockSession, OpenBlock
from patcher.bench.ab.blocks import (
    BASELINE,
    CONTROL,
    Block,
    BlockRound,
    round_orders,
    take_round,
    throughput_of,
)
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.ab.phases import ABPhase, ABProgress
from patcher.bench.ab.processes import ABPlan, refuse_few
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import fingerprint
from patcher.integrate import Patch, Receipt
from patcher.places import require_layers

PATCHED = "patched"
"""Name of the patched process if there is one set of patches."""


def compare_in_pairs(
    job: ABJob, patches: Sequence[Patch], progress: ABProgress, keep: Path | None = None
) -> tuple[Measurement, ...]:
    """Measure one set of patches in process pairs: best stock configuration, A/B with control,
    quality, revert.

    Args:
        keep: None, or a folder for a folder of the process pairs that were measured; after a stop
            the same call goes on with the next. It is removed at the end.

    Returns:
        The measurement of each patch, with its own receipts; the patches are installed together.

    Raises:
        UsageError: a patch is for another engine, a window is too short to time, or there are too
            few process pairs.
        PatcherError: a process died, an engine gave unexpected tokens, or no pair was usable.
    """
    plan = _plan(job, shared=False)
    with blocks_folder(job, patches, keep) as folder:
        if keep is not None:
            progress(ABPhase.READY, f"each process pair is kept in {folder}", 0, 1)
        found = _compare(job, {PATCHED: patches}, folder, plan, progress)
    assert found is not None, "one process at a time always fits"
    return found[PATCHED]


def compare_sets(
    job: ABJob, sets: Mapping[str, Sequence[Patch]], folder: Path, progress: ABProgress
) -> dict[str, tuple[Measurement, ...]] | None:
    """Measure several sets of patches, by name, against shared baselines.

    Args:
        folder: where blocks are saved; those in it are not measured again.

    Returns:
        The measurements of each set's patches; None if fewer processes fit side by side than a
        block needs (`patcher.bench.ab.block_session.MIN_ROOM`).

    Raises:
        UsageError: as `compare_in_pairs`, or the folder's blocks are from another machine.
        VerificationError: a patch was changed or does not match this environment, or a file of the
            folder is damaged.
        PatcherError: as `compare_in_pairs`.
    """
    for patches in sets.values():
        refuse_other_engines(job.workload, patches)
        for patch in patches:
            patch.verify_target()
        require_layers(job.workload, patches)
    return _compare(job, sets, folder, _plan(job, shared=True), progress)


def _plan(job: ABJob, shared: bool) -> ABPlan:
    return ABPlan(
        process_pairs=job.process_pairs,
        pairs=job.pairs_each,
        shared=shared,
        together=False if job.alone and not shared else None,
        stagger_s=STAGGER_S if loads_beside(with_cache_size(job)) else None,
    )


def _compare(
    job: ABJob,
    sets: Mapping[str, Sequence[Patch]],
    folder: Path,
    plan: ABPlan,
    progress: ABProgress,
) -> dict[str, tuple[Measurement, ...]] | None:
    refuse_few(job.process_pairs)
    for patches in sets.values():
        refuse_other_engines(job.workload, patches)
    session = PatchSession(with_cache_size(job), sets, folder)
    session.open(progress)
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:
        if not session.take(plan, clocks, progress):
            return None
        progress(ABPhase.QUALITY, "quality", 0, 1)
        compared = session.compare()
        return {name: session.measurements(name, compared, clocks) for name in sets}


class PatchSession:
    """Takes the blocks of an A/B of sets of patches, and the further measurements.

    The first baseline generates greedy tokens before any patched process starts; later processes
    are forced to decode these tokens for the logits. The control gives the A/A floor. A baseline
    that starts after a block with a set shows the state after that set's revert.
    """

    def __init__(self, job: ABJob, sets: Mapping[str, Sequence[Patch]], folder: Path) -> None:
        self.job, self.launcher = job, ArmLauncher(job, sets)
        self.sets = self.launcher.sets
        self.check = QualityCheck(self.launcher)
        self.folder = BlockFolder(folder)
        self.taken: list[BlockRecord] = []
        self._tuning: Tuning | None = None
        self._residency: dict[str, str] = {}
        self._begin_block()

    def _begin_block(self) -> None:
        """Delete the files of an interrupted block."""
        self._greedy: dict[str, Tokens] = {}
        self._receipts: dict[str, dict[str, Receipt]] = {}
        self._quality: dict[str, dict[str, Receipt]] = {}
        self._others: dict[str, list[list[Window]]] = {}

    def open(self, progress: ABProgress) -> None:
        """Read the folder's header, or create it; this tunes the baseline if requested."""
        workload = self.job.workload
        here = fingerprint(workload.device, workload.threads)

        def begin() -> BlocksHeader:
            tuning = self.launcher.tuning(progress)
            return BlocksHeader(fingerprint=here, arguments=self.launcher.arguments, tuning=tuning)

        header = self.folder.header(begin)
        if header.fingerprint != here:
            raise UsageError(
                f"the blocks in {self.folder.path} are from another machine or other libraries",
                "continue there, or remove that folder to measure again",
            )
        self.launcher.arguments, self._tuning = dict(header.arguments), header.tuning
        self.taken = self.folder.blocks()

    def take(self, plan: ABPlan, clocks: ClockMonitor, progress: ABProgress) -> bool:
        """Take the missing blocks; False if too few processes fit."""
        with BlockSession(
            launcher=self.launcher,
            variants=tuple(self.sets),
            workload=self.job.workload,
            plan=plan,
            clocks=clocks,
            taken=[one.block for one in self.taken],
            seed=self.job.seed,
            progress=progress,
        ) as session:
            for block in session.blocks_left():
                self._begin_block()
                if block.number == 0 and block.swapped:
                    assert session.pool.baseline is not None, (
                        "the memory of one process showed how many fit"
                    )
                    self._greedy["before"] = self.check.greedy(session.pool.baseline)
                for processes in block.loaded():
                    block.take(processes)
                    for name, process in processes.items():
                        session.tell_block(ABPhase.ASK, f"asking {name}")
                        block.read_peak(name, process)
                        self.ask(block.number, name, process)
                        block.time_steps(name, process)
                    self._take_other_workloads(block, processes)
                self.keep(block.close())
            if not session.complete:
                return False
            self._residency = {name: session.residency(name) for name in self.sets}
        return True

    def ask(self, number: int, name: str, process: ArmProcess) -> None:
        """Take the further measurements of a process after its windows. Its receipts are read
        first, so they count only calls in windows.
        """
        if name == BASELINE and number > 0:
            self._greedy["after"] = self.check.greedy(process)
        elif name == BASELINE and "before" not in self._greedy:
            self._greedy["before"] = self.check.greedy(process)
        elif name == CONTROL:
            self._greedy["again"] = self.check.greedy(process)
        if name in self.sets:
            self._receipts[name] = process.called_since_warm()
        seen = any(name in one.block.swapped for one in self.taken)
        if number > 0 and (name not in self.sets or seen):
            return
        timed = process.receipts()
        self.folder.write_served(name, self.check.served(process, self._before, name == BASELINE))
        if name in self.sets:
            self._quality[name] = called_between(timed, process.receipts())

    def _take_other_workloads(
        self, block: OpenBlock[ArmProcess], processes: Mapping[str, ArmProcess]
    ) -> None:
        """Windows at other traffic, of the loaded processes without the control."""
        if not block.swapped:
            return
        session, job = block.session, self.job
        names = [name for name in block.names if name != CONTROL]
        for index, (shape, numbers, rng) in enumerate(planned(job, block.number)):
            total = len(job.other_workloads)
            session.progress(ABPhase.OTHER, f"other traffic: {shape.label}", index, total)
            sides = {name: process.side(shape) for name, process in processes.items()}
            vocab_size = next(iter(processes.values())).vocab_size
            orders = round_orders(rng, names, len(numbers), session.plan.shared)
            for number, order in zip(numbers, orders, strict=True):
                at = BlockRound(number, block.number, order, block.swapped)
                workload = shape.of(job.workload)
                found = take_round(at, sides, workload, vocab_size, job.seed, session.clocks)
                for name, windows in found.items():
                    points = self._others.setdefault(name, [[] for _ in job.other_workloads])
                    points[index] += windows

    def keep(self, block: Block) -> None:
        """A complete block, with its further measurements."""
        record = BlockRecord(
            block=block,
            greedy=self._greedy,
            receipts=self._receipts,
            quality_receipts=self._quality,
            other_workloads={
                name: tuple(map(tuple, points)) for name, points in self._others.items()
            },
        )
        self.folder.keep(record)
        self.taken.append(record)

    def compare(self) -> BlocksQuality:
        """The quality of all sets; it needs one more process."""
        return self.folder.quality(self._compared)

    def measurements(
        self, name: str, compared: BlocksQuality, clocks: ClockMonitor
    ) -> tuple[Measurement, ...]:
        """The measurement of each patch of the set."""
        job, own = self.job, [one for one in self.taken if name in one.block.swapped]
        patches = self.sets[name]
        throughput = throughput_of(
            name,
            [one.block for one in self.taken],
            job.workload,
            job.margin_pct,
            clocks,
            self._residency[name],
        ).model_copy(
            update={
                "patch": " + ".join(patch.manifest.id for patch in patches),
                "routing_entropy_pct": compared.routing_entropy_pct,
            }
        )
        throughput = self.launcher.configured(throughput, patches, self._tuning)
        memory = peak_memory(throughput.peak_memory_bytes, job.workload.device)
        other_workloads = self.other_windows(name).found(memory)
        return tuple(
            Measurement(
                throughput=throughput,
                quality=compared.quality[name],
                receipt=merged([one.receipts[name][patch.manifest.id] for one in own]),
                quality_receipt=own[0].quality_receipts[name][patch.manifest.id],
                reverted_identical=self.reverted_identical(name),
                other_workloads=other_workloads,
            )
            for patch in patches
        )

    def other_windows(self, name: str) -> OtherWindows:
        """The set's windows at other traffic."""
        found = OtherWindows(self.job.other_workloads)
        for one in self.taken:
            for shape, windows in zip(
                self.job.other_workloads, one.other_workloads.get(name, ()), strict=False
            ):
                found.add(shape, windows)
        return found

    def reverted_identical(self, name: str) -> bool:
        """Whether a baseline that started after that set's processes gives the tokens of one that
        started before, as far as two processes of the control agree.
        """
        first = self.taken[0].greedy
        after = [one.greedy.get("after", []) for one in self.taken if name in one.block.swapped]
        return identical(first["before"], first["again"], after[-1])

    @property
    def _before(self) -> Tokens:
        return (self.taken[0].greedy if self.taken else self._greedy)["before"]

    def _compared(self) -> BlocksQuality:
        baseline = self.folder.served(BASELINE), self.folder.served(CONTROL)
        found = {
            name: self.check.quality(patches, self.folder.served(name), baseline, self._before)
            for name, patches in self.sets.items()
        }
        return BlocksQuality(
            routing_entropy_pct=next(iter(found.values()))[1],
            quality={name: quality for name, (quality, _) in found.items()},
        )
