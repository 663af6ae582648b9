"""End-to-end A/B of patches with a process for each arm: vLLM, and any engine that way.

One process more than the pairs take, the *reference*, gives what higher precision or the engine
without compilation says, and how spread out the routing is.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue

from bench import Quality, Shape, Throughput, UsageError, cloze
from bench.clocks import ClockMonitor
from bench.comparison import Arm, Tuning
from bench.process_pairs import SHARE_ALONE, SHARE_BESIDE, Plan, measure_processes
from bench.quality import compare_logits
from bench.tuning import options_of, tune
from bench.windows import Pair, Side
from integrate import Patch, Receipt
from patcher.endtoend import arm_protocol as say
from patcher.endtoend.arm_process import ArmProcess
from patcher.endtoend.measured import Job, Measured, Report
from patcher.endtoend.other_traffic import OtherTraffic, peak_memory

REFERENCE: dict[str, dict[str, JsonValue]] = {"vllm": {"enforce_eager": True}}
"""Arguments under which an engine computes the same without compilation and graphs."""
ROUTING_STEPS = 16
STAGGER_S = 5.0
"""So that the one that starts first is the first to take memory."""
REVERT_STEPS = 256
"""Greedy tokens a sequence, at most, that must be the same before and after."""
COUNTS = ("calls", "replayed", "fallbacks")
"""Of a receipt."""


def measure_pairs(job: Job, patches: Sequence[Patch], report: Report) -> tuple[Measured, ...]:
    """The whole measurement: best stock configuration, A/B with control, quality, revert.

    Returns:
        for each of the patches, which are in together, what was measured, with its own receipts.

    Raises:
        UsageError: a patch is for another engine.
        PatcherError: as `bench.process_pairs.measure_processes`.
    """
    for patch in patches:
        target = patch.manifest.target.engine
        if target != job.workload.engine:
            raise UsageError(
                f"{patch.manifest.id} is for {target}, not for {job.workload.engine}",
                f"say --engine {target}",
            )
    sitting = PatchSitting(job, patches)
    tuning = sitting.tune(report) if job.tune else None
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:
        other = OtherTraffic(job, clocks, report)
        throughput = measure_processes(
            sitting.start,
            job.workload,
            Plan(
                process_pairs=job.process_pairs,
                pairs=job.pairs_each,
                looks=1,
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
    throughput = _with(throughput, entropy, sitting.arguments, tuning)
    memory = peak_memory(throughput.peak_memory_bytes, job.workload.device)
    return tuple(
        Measured(
            throughput=throughput,
            quality=quality,
            receipt=sitting.receipt(patch),
            quality_receipt=sitting.quality_receipt(patch),
            reverted_identical=sitting.reverted_identical,
            elsewhere=other.found(memory),
        )
        for patch in patches
    )


def loads_beside(job: Job) -> bool:
    """Whether two may load at the same time: not while vLLM finds out what memory is left."""
    return job.workload.engine != "vllm" or "kv_cache_memory_bytes" in job.arguments


def elsewhere(other: OtherTraffic, last: Pair, processes: Mapping[Arm, ArmProcess]) -> None:
    """See `bench.process_pairs.Also`."""

    def sides(shape: Shape) -> dict[Arm, Side]:
        return {arm: process.side(shape) for arm, process in processes.items()}

    vocab_size = next(iter(processes.values())).vocab_size
    other.take(sides, vocab_size, last.process, last.swapped)


def _with(
    throughput: Throughput,
    entropy: float | None,
    arguments: dict[str, JsonValue],
    tuning: Tuning | None,
) -> Throughput:
    return throughput.model_copy(
        update={
            "routing_entropy_pct": entropy,
            "engine_arguments": arguments,
            "tuning": tuning,
        }
    )


class PatchSitting:
    """What is asked of the processes beside their windows: tokens, logits, receipts.

    Control, first process: greedy tokens before any patch ran, which all are then forced to decode
    for the logits; its second process gives the A/A floor. A baseline started after a patched
    process shows what a revert leaves.
    """

    def __init__(self, job: Job, patches: Sequence[Patch]) -> None:
        self.job, self.patches = job, tuple(patches)
        self.arguments: dict[str, JsonValue] = dict(job.arguments)
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
        return self._started(arm, self.arguments, memory_share, patches)

    def tune(self, report: Report) -> Tuning:
        """The best stock configuration, which is both arms' from then on."""
        with ClockMonitor(self.job.workload.device, self.job.lock_mhz) as clocks:
            found = tune(
                lambda arguments: self._started(
                    "baseline", {**self.arguments, **arguments}, SHARE_BESIDE
                ),
                self.job.workload,
                options_of(self.job.workload.engine),
                clocks,
                seed=self.job.seed,
                progress=report,
            )
        self.arguments |= found.chosen
        return found

    def visit(self, pair: Pair, arm: Arm, process: ArmProcess) -> None:
        """See `bench.process_pairs.Visit`."""
        steps = self.job.quality_steps
        if pair.kind == "aa":
            # both of its processes are the baseline
            if not self._before:
                self._before = self._greedy(process)
                self._logits["baseline"] = self._asked(process, steps)[0]
            else:
                self._repeated = self._greedy(process)
                self._again = self._asked(process, steps)[0]
        elif arm == "baseline":
            self._after = self._greedy(process)
        else:
            timed = {one.patch_id: one for one in process.receipts()}
            for name, one in timed.items():
                self._receipts.setdefault(name, []).append(one)
            if arm not in self._logits:
                self._logits[arm] = self._asked(process, steps)[0]
                self._quality = {
                    one.patch_id: difference(one, timed[one.patch_id]) for one in process.receipts()
                }

    def finish(self) -> tuple[Quality, float | None]:
        """Quality and routing entropy, with the help of one more process."""
        workload = self.job.workload
        arguments = {**self.arguments, **REFERENCE.get(workload.engine, {})}
        with self._started("reference", arguments, SHARE_ALONE) as process:
            entropy = process.ask(
                say.Routing(seed=self.job.seed, steps=ROUTING_STEPS), say.Entropy
            ).percent
            reference, how = self._asked(process, self.job.quality_steps, reference=True)
        baseline, patched = self._logits["baseline"], self._logits["patched"]
        assert self._again is not None
        quality = compare_logits(baseline, self._again, patched, reference, how)
        refusal = cloze.refusal(workload) or "it is not taken where each arm is a process"
        return quality.model_copy(update={"task_refusal": refusal}), entropy

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

    def _started(
        self,
        name: str,
        arguments: dict[str, JsonValue],
        memory_share: float,
        patches: tuple[Patch, ...] = (),
    ) -> ArmProcess:
        load = say.Load(
            workload=self.job.workload,
            arguments=arguments,
            memory_share=memory_share,
            room=self.job.elsewhere,
        )
        return ArmProcess(name, load, patches)

    def _greedy(self, process: ArmProcess) -> list[list[int]]:
        steps = max(min(self.job.workload.output_len, REVERT_STEPS), self.job.quality_steps)
        command = say.Generate(seed=self.job.seed + 1, steps=steps)
        return process.ask(command, say.Generated).tokens

    def _asked(
        self, process: ArmProcess, steps: int, reference: bool = False
    ) -> tuple[torch.Tensor, str]:
        """Logits [positions, vocabulary] over the tokens of the first process, and how."""
        forced = [row[: steps + 1] for row in self._before]
        with tempfile.TemporaryDirectory(prefix="patcher-logits-") as folder:
            path = Path(folder) / "logits.npy"
            wrote = process.ask(
                say.Logits(
                    seed=self.job.seed + 1, forced=forced, path=str(path), reference=reference
                ),
                say.Wrote,
            )
            return torch.from_numpy(np.load(path, allow_pickle=False)), wrote.how


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


def merged(receipts: Sequence[Receipt]) -> Receipt:
    """Of one patch in several processes: all their calls."""
    last = receipts[-1]
    sums = {
        field: dict(sum((Counter(getattr(one, field)) for one in receipts), Counter[str]()))
        for field in COUNTS
    }
    return last.model_copy(update=sums)


def difference(later: Receipt, earlier: Receipt) -> Receipt:
    """What was called in between."""
    counts = {
        field: dict(Counter(getattr(later, field)) - Counter(getattr(earlier, field)))
        for field in COUNTS
    }
    return later.model_copy(update=counts)
