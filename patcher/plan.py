"""What one run is to do, and how it ended: the records that the pipeline and the report share."""

from __future__ import annotations

from typing import Literal

from patcher.ab.decision import Decision
from patcher.attempts import LoopResult
from patcher.bench import SCHEMA_VERSION, Language, Record, Workload
from patcher.bench.stats.compare import DEFAULT_PAIRS
from patcher.hotspot import Profile
from patcher.runs.patch import RunPatch
from patcher.strategies.search import Search

DEMO = "replay:demo"
"""The language model of `patcher demo`: the recorded conversation that ships with patcher."""


class ProfileFromFile(Profile):
    """A profile that the user gave: the run keeps a copy, which holds on every machine."""


class RunPlan(Record):
    """What one run is to do; stored in `run.json`, so that resuming needs nothing else."""

    schema_version: int = SCHEMA_VERSION
    op: str | None = None
    """None: the first hotspot that an op of the library covers."""
    language: Language | None = None
    sweep: str | None = None
    whole: bool = True
    """False: the agent loop alone, without profile, patch and A/B."""
    pairs: int = DEFAULT_PAIRS
    """End-to-end pairs at most."""
    quality_steps: int = 32
    threads: int | None = None
    judge_pairs: int = 12
    search: Search = Search()
    counters: bool = True
    """Whether the analyst reads hardware counters, where ncu works."""

    profile_file: str | None = None
    """Name of the file that the profile was read from; None: it is captured on this machine."""

    def measured_on(self, workload: Workload | None) -> Literal["cpu", "cuda"]:
        """The kind of device whose figures the run is about."""
        if workload is not None:
            return workload.device
        return "cuda" if self.language and self.language.traits.device != "cpu" else "cpu"


class RunResult(Record):
    """How a run ended."""

    schema_version: int = SCHEMA_VERSION
    run: str
    op: str | None
    optimisation: LoopResult | None
    patch: RunPatch | None
    decision: Decision | None
    reports: tuple[str, ...] = ()
    """File names in the run's folder, once written."""
