"""Start the processes of an end-to-end A/B, each with its own patches and arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from patcher.ab import arm_protocol as say
from patcher.ab.arm_process import LOAD_S, ArmProcess
from patcher.ab.job import ABJob
from patcher.bench import Throughput, UsageError, Workload
from patcher.bench.ab.engine_config import ConfigTrial, Tuning, overriding
from patcher.bench.ab.phases import ABProgress
from patcher.bench.ab.processes import WARM_UP_STEPS
from patcher.bench.ab.tuning import chosen_options, options_for, tune
from patcher.bench.ab.windows import prompt_seed
from patcher.bench.engines import ENGINES, cache_argument, compiles
from patcher.bench.machine.clocks import ClockMonitor
from patcher.integrate import Patch, engine_wants

TUNED_LOAD_S = 300.0
"""Time limit in seconds to load; a configuration that takes longer (it may compile) fails."""
STAGGER_S = 2.0
"""Seconds between two starts, so that the first one to start allocates memory first."""


class ArmLauncher:
    """Starts the arms of one job; see `patcher.bench.ab.processes.Launcher`."""

    def __init__(self, job: ABJob, sets: Mapping[str, Sequence[Patch]] | None = None) -> None:
        """Set up the launcher.

        Args:
            sets: the patches of each patched process, by its name.
        """
        self.job = job
        self.sets = {name: tuple(patches) for name, patches in (sets or {}).items()}
        self.arguments: dict[str, JsonValue] = dict(job.arguments)
        """The engine's arguments in every process, without those of patches; see `arguments_of`."""
        self._compiled: set[tuple[str, ...]] = set()
        self._compiling = threading.Lock()

    def start(self, name: str, memory_share: float) -> ArmProcess:
        """Start and load the process of that name with its patches. No process that is measured
        has compiled: with patches that are new here, one that is not measured runs before it.
        """
        patches = self.sets.get(name, ())
        arguments, which = self.arguments_of(patches), tuple(one.manifest.id for one in patches)
        with self._compiling:
            if which not in self._compiled and compiles(self.job.workload.engine):
                first = self.launch(name, arguments, memory_share, patches)
                steps = min(self.job.workload.output_len, WARM_UP_STEPS)
                try:
                    first.warm_up(prompt_seed(self.job.seed, -1), steps)
                finally:
                    first.close()
                self._compiled.add(which)
        return self.launch(name, arguments, memory_share, patches)

    def launch(
        self,
        name: str,
        arguments: dict[str, JsonValue],
        memory_share: float,
        patches: tuple[Patch, ...] = (),
        load_s: float = LOAD_S,
    ) -> ArmProcess:
        """Start and load a process with these engine arguments and patches."""
        load = say.Load(
            workload=self.job.workload,
            arguments=arguments,
            memory_share=memory_share,
            room=self.job.other_workloads,
        )
        return ArmProcess(name, load, patches, load_s)

    def arguments_of(self, patches: Iterable[Patch]) -> dict[str, JsonValue]:
        """The arguments with those that the patches require: another configuration would never call
        the code that they replace.
        """
        names = [patch.manifest.target.point for patch in patches]
        wanted = engine_wants(self.job.workload.engine, names)
        return {**self.arguments, **overriding(wanted, self.arguments)}

    def tuning(self, progress: ABProgress) -> Tuning | None:
        """The best stock configuration, searched for or given, if requested."""
        if self.job.tuned is not None:
            self.arguments |= self.job.tuned.chosen
            return self.job.tuned
        return self.tune(progress) if self.job.tune else None

    def tune(
        self,
        progress: ABProgress,
        tried_one: Callable[[ConfigTrial], None] | None = None,
        names: Sequence[str] = (),
    ) -> Tuning:
        """Search for the best stock configuration, and use it for all later processes.

        Args:
            names: of the engine's arguments to search over; none: all.
        """
        options = chosen_options(options_for(self.job.workload), names)
        with ClockMonitor(self.job.workload.device, self.job.lock_mhz) as clocks:
            found = tune(
                lambda arguments, share: self.launch(
                    "baseline",
                    {**self.arguments, **arguments},
                    share,
                    load_s=TUNED_LOAD_S if arguments else LOAD_S,
                ),
                self.job.workload,
                options,
                clocks,
                wanted=engine_wants(self.job.workload.engine),
                other_workloads=self.job.other_workloads,
                seed=self.job.seed,
                stagger_s=STAGGER_S if loads_beside(self.job) else None,
                progress=progress,
                tried_one=tried_one,
            )
        self.arguments |= found.chosen
        return found

    def configured(
        self, throughput: Throughput, patches: Sequence[Patch], tuning: Tuning | None
    ) -> Throughput:
        """The throughput, with the engine's arguments in both arms and the search for them."""
        return throughput.model_copy(
            update={
                "engine_arguments": self.arguments,
                "patched_arguments": overriding(self.arguments_of(patches), self.arguments),
                "tuning": tuning,
            }
        )


def refuse_other_engines(workload: Workload, patches: Iterable[Patch]) -> None:
    """Check that all patches are for the workload's engine.

    Raises:
        UsageError: a patch is for another engine.
    """
    for patch in patches:
        target = patch.manifest.target.engine
        if target != workload.engine:
            raise UsageError(
                f"{patch.manifest.id} is for {target}, not for {workload.engine}",
                f"use --engine {target}",
            )


def loads_beside(job: ABJob) -> bool:
    """Whether two processes may load at the same time; not while an engine measures free memory."""
    argument = cache_argument(job.workload.engine)
    return not argument or argument in job.arguments


def with_cache_size(job: ABJob) -> ABJob:
    """The arguments with a fixed size of the engine's KV cache, if it has such an argument. By
    default, the cache takes all that its share leaves, so two engines cannot load side by side.
    """
    if loads_beside(job):
        return job
    factory: Any = ENGINES.load(job.workload.engine)
    size = factory.cache_size(job.workload, job.other_workloads)
    if size is None:
        return job
    argument = cache_argument(job.workload.engine)
    return job.model_copy(update={"arguments": {**job.arguments, argument: size}})
