"""Starts the processes of an end-to-end A/B and asks them for what is not timed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import JsonValue

from patcher.ab import arm_protocol as say
from patcher.ab.arm_process import LOAD_S, ArmProcess
from patcher.ab.job import ABJob, Report
from patcher.bench import Quality
from patcher.bench.ab import cloze
from patcher.bench.ab.engine_config import ConfigTrial, Tuning, overriding, words
from patcher.bench.ab.processes import SHARE_ALONE
from patcher.bench.ab.quality import compare_logits
from patcher.bench.ab.tuning import options_of, tune
from patcher.bench.machine.clocks import ClockMonitor
from patcher.integrate import Patch, engine_wants

REFERENCE: dict[str, dict[str, JsonValue]] = {"vllm": {"enforce_eager": True}}
"""Arguments under which an engine computes the same without compilation and graphs."""
ROUTING_STEPS = 16
REVERT_STEPS = 256
"""Greedy tokens a sequence, at most, that must be the same before and after."""
TUNED_LOAD_S = 300.0
"""A way to serve that takes longer to load, since it compiles, say, is not waited for."""
STAGGER_S = 2.0
"""From one start to the next, so that who starts first is the first to take memory."""


class Yardstick(NamedTuple):
    """What the reference process gave."""

    logits: torch.Tensor
    how: str
    entropy_pct: float | None


class Asking:
    """Processes of one job."""

    def __init__(self, job: ABJob) -> None:
        self.job = job
        self.arguments: dict[str, JsonValue] = dict(job.arguments)
        """Of the engine, in every process, but for what patches want; see `arguments_of`."""
        self._yardsticks: dict[str, Yardstick] = {}
        self._unpatched: dict[str, torch.Tensor] = {}
        """By arguments, as JSON; of the tokens that were first asked for."""

    def tuning(self, report: Report) -> Tuning | None:
        """The best stock configuration, looked for or told, where either was asked for."""
        if self.job.tuned is not None:
            self.arguments |= self.job.tuned.chosen
            return self.job.tuned
        return self.tune(report) if self.job.tune else None

    def arguments_of(self, patches: Iterable[Patch]) -> dict[str, JsonValue]:
        """With what patches want where that is not the baseline: they replace what another
        configuration never calls."""
        names = [patch.manifest.target.point for patch in patches]
        wanted = engine_wants(self.job.workload.engine, names)
        return {**self.arguments, **overriding(wanted, self.arguments)}

    def tune(
        self, report: Report, tried_one: Callable[[ConfigTrial], None] | None = None
    ) -> Tuning:
        """The best stock configuration, which is all processes' from then on."""
        with ClockMonitor(self.job.workload.device, self.job.lock_mhz) as clocks:
            found = tune(
                lambda arguments, share: self.started(
                    "baseline",
                    {**self.arguments, **arguments},
                    share,
                    load_s=TUNED_LOAD_S if arguments else LOAD_S,
                ),
                self.job.workload,
                options_of(self.job.workload.engine),
                clocks,
                wanted=engine_wants(self.job.workload.engine),
                elsewhere=self.job.elsewhere,
                seed=self.job.seed,
                stagger_s=STAGGER_S if loads_beside(self.job) else None,
                progress=report,
                tried_one=tried_one,
            )
        self.arguments |= found.chosen
        return found

    def started(
        self,
        name: str,
        arguments: dict[str, JsonValue],
        memory_share: float,
        patches: tuple[Patch, ...] = (),
        load_s: float = LOAD_S,
    ) -> ArmProcess:
        load = say.Load(
            workload=self.job.workload,
            arguments=arguments,
            memory_share=memory_share,
            room=self.job.elsewhere,
        )
        return ArmProcess(name, load, patches, load_s)

    def greedy(self, process: ArmProcess) -> list[list[int]]:
        steps = max(min(self.job.workload.output_len, REVERT_STEPS), self.job.quality_steps)
        command = say.Generate(seed=self.job.seed + 1, steps=steps)
        return process.ask(command, say.Generated).tokens

    def logits(
        self, process: ArmProcess, tokens: list[list[int]], reference: bool = False
    ) -> tuple[torch.Tensor, str]:
        """[positions, vocabulary] over such tokens, as many as quality is measured by; and how."""
        forced = [row[: self.job.quality_steps + 1] for row in tokens]
        with tempfile.TemporaryDirectory(prefix="patcher-logits-") as folder:
            path = Path(folder) / "logits.npy"
            wrote = process.ask(
                say.Logits(
                    seed=self.job.seed + 1, forced=forced, path=str(path), reference=reference
                ),
                say.Wrote,
            )
            return torch.from_numpy(np.load(path, allow_pickle=False)), wrote.how

    def yardstick(self, tokens: list[list[int]], arguments: Mapping[str, JsonValue]) -> Yardstick:
        """What higher precision or the engine without compilation says over these tokens, and how
        spread out the routing is; a process of its own.
        """
        plain = {**arguments, **REFERENCE.get(self.job.workload.engine, {})}
        with self.started("reference", plain, SHARE_ALONE) as process:
            entropy = process.ask(
                say.AskRouting(seed=self.job.seed, steps=ROUTING_STEPS), say.Entropy
            ).percent
            return Yardstick(*self.logits(process, tokens, reference=True), entropy)

    def quality(
        self,
        patches: Sequence[Patch],
        patched: torch.Tensor,
        baseline: tuple[torch.Tensor, torch.Tensor],
        tokens: list[list[int]],
    ) -> tuple[Quality, float | None]:
        """By logits over these tokens of a process with these patches and of two baselines; and the
        routing's entropy. Takes a process more.

        Where the patches' arm has another configuration than the baseline, what they replace is
        that configuration: then they are held against it, without them, in one process more still,
        since the baseline may differ from it by more than a patch may.
        """
        arguments = self.arguments_of(patches)
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._yardsticks:
            self._yardsticks[key] = self.yardstick(tokens, arguments)
        reference = self._yardsticks[key]
        how = reference.how
        if arguments != self.arguments:
            if key not in self._unpatched:
                with self.started("unpatched", arguments, SHARE_ALONE) as process:
                    self._unpatched[key] = self.logits(process, tokens)[0]
            baseline = self._unpatched[key], self._unpatched[key]
            how += f", all with {words(overriding(arguments, self.arguments))}"
        quality = compare_logits(*baseline, patched, reference.logits, how)
        refusal = cloze.refusal(self.job.workload)
        told = {"task_refusal": refusal or "it is not taken where each arm is a process"}
        return quality.model_copy(update=told), reference.entropy_pct


def loads_beside(job: ABJob) -> bool:
    """Whether two may load at the same time: not while vLLM finds out what memory is left."""
    return job.workload.engine != "vllm" or "kv_cache_memory_bytes" in job.arguments


def with_cache_size(job: ABJob) -> ABJob:
    """With the size of vLLM's KV cache said: else it takes whatever its share leaves, and cannot
    load beside another that does so, too.
    """
    if loads_beside(job):
        return job
    from patcher.bench.engines.vllm import cache_bytes

    size = cache_bytes(job.workload, job.elsewhere)
    if size is None:
        return job
    return job.model_copy(update={"arguments": {**job.arguments, "kv_cache_memory_bytes": size}})
