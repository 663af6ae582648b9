"""What is compared as it is served, and what was measured."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, JsonValue

from patcher.ab.server import HOST, Installation, WarmUp, installation
from patcher.bench import SCHEMA_VERSION, Record, UsageError, Workload
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.ab.served import ServedPoint, ServedRun, ServingTrace, StalledRun, traces
from patcher.bench.engines.architecture import model_digest
from patcher.bench.engines.served_model import LENGTH_STEP
from patcher.bench.engines.served_prompts import ServedPrompts
from patcher.bench.engines.serving import ServingClient, filled, flags
from patcher.bench.machine.environment import Environment, fingerprint
from patcher.bench.stats.comparison import Arm, Verdict
from patcher.integrate import Patch, Receipt, Store, patch_environment

CONFIDENCE_PCT = 95.0
MOST_POINTS = 50
SPARE = 1.05
"""A trained tokenizer may split a text into a few tokens more than it was made of."""


@dataclass(frozen=True)
class SideSetup:
    """One way to serve the model."""

    name: str
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    """Of the engine."""
    patches: tuple[Patch, ...] = ()
    store: Path | None = None
    """A store whose patches are enabled, in place of `patches`."""
    python: str = sys.executable
    """The interpreter that the engine is installed for."""

    def beside(self, arguments: Mapping[str, JsonValue]) -> Self:
        """This side with arguments over its own."""
        return replace(self, arguments={**self.arguments, **arguments})

    def digests(self, engine: str) -> dict[str, str]:
        """Digests of its patches by id.

        Raises:
            UsageError: the store cannot be read.
        """
        if self.store is None:
            return {patch.manifest.id: patch.digest for patch in self.patches}
        applied = Store(self.store).applied()
        return {one.id: one.digest for one in applied if one.engine == engine}

    def environment(self, folder: Path) -> dict[str, str]:
        """The variables that enable exactly its patches, with receipts in that folder.

        As where it serves, what a patch cannot run falls back and is counted; the verdict reads the
        receipts.

        Raises:
            VerificationError: a bundle was changed or does not match this environment.
        """
        receipts = folder / "receipts"
        if self.store is None:
            found = patch_environment(self.patches, folder / "home", receipts)
            return {**found, "PATCHER_STRICT": "0"}
        home = {"PATCHER_PATCHES": "on", "PATCHER_HOME": str(self.store.absolute())}
        return {**home, "PATCHER_RECEIPTS": str(receipts)}


class ServedSide(Record):
    """A side as it is recorded."""

    name: str
    version: str
    """Of the engine."""
    arguments: dict[str, JsonValue]
    patches: dict[str, str]
    """Digests by id."""


class ServedHeader(Record):
    """All that the processes of one comparison share; another one has another folder."""

    schema_version: int = SCHEMA_VERSION
    fingerprint: str
    """Of device, driver, libraries and threads."""
    workload: Workload
    client: str
    traces: dict[str, ServingTrace]
    points: tuple[ServedPoint, ...]
    sides: tuple[ServedSide, ServedSide]
    serve: tuple[str, ...]
    """The server's command, with names in place of paths; empty: the client starts the engine."""
    bench: tuple[str, ...]
    """The client's."""
    config: str = ""
    """See `model_digest`. Empty in older files."""

    @property
    def offline(self) -> bool:
        """Whether there is no server: the client starts the engine in its own process."""
        return not self.serve

    @property
    def folder_name(self) -> str:
        return f"served-{_digest(self.model_dump_json())}"


class ServedProcess(Record):
    """One process of a server, and what was measured of it; where there is no server, the processes
    of all points, one after the other."""

    schema_version: int = SCHEMA_VERSION
    pair: int
    arm: Arm
    start_s: float
    """Seconds until it served; without a server, of the starts at all points."""
    took_s: float
    """Seconds of all."""
    warm_ups: dict[str, WarmUp]
    """By trace."""
    runs: tuple[ServedRun, ...]
    """One at each point, in their order."""
    stalled: tuple[StalledRun, ...]
    """Runs that were taken again."""
    receipts: tuple[Receipt, ...]
    """Calls by patch since the warm-up."""
    machine: str = ""
    """Digest of the host and its GPU: both processes of a pair are of one. Empty in older files."""


class ServedFigures(Record):
    """One side at one point: means over processes, in the units of `ServedRun`."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    user_tokens_per_s: float | None = None
    goodput_per_s: float | None = None
    ttft_ms: dict[str, float] = Field(default_factory=dict)
    tpot_ms: dict[str, float] = Field(default_factory=dict)
    itl_ms: dict[str, float] = Field(default_factory=dict)
    batch_ms: dict[str, float] = Field(default_factory=dict)
    stalls: int | None = None
    """Runs that were taken again, and last ones that stalled, too; None if waits are not timed."""


class ServedGain(Record):
    """A gain in output tokens per second, in percent."""

    gain_pct: float
    gain_low_pct: float
    """-100 or less where there is no interval: a single pair has none."""
    gain_high_pct: float

    @property
    def interval(self) -> tuple[float, float] | None:
        return (self.gain_low_pct, self.gain_high_pct) if self.gain_low_pct > -100 else None

    @property
    def said(self) -> str:
        """As text, with its interval if there is one."""
        interval = self.interval
        ends = "[{:+.2f}, {:+.2f}]".format(*interval) if interval else ", no interval"
        return f"{self.gain_pct:+.2f} %{' ' if interval else ''}{ends}"


class PointGain(ServedGain):
    """The gain at one point; at a rate of requests, in the tokens per second that a user sees."""

    point: ServedPoint
    figures: dict[Arm, ServedFigures]

    @property
    def loses(self) -> bool:
        """Whether it loses beyond its noise."""
        return self.gain_high_pct < 0


class ServedComparison(ServedGain):
    """The gain over all concurrencies, as the geometric mean of theirs, and the verdict; over rates
    of requests where there are only these."""

    points: tuple[PointGain, ...]
    process_pairs: int
    confidence_pct: float = CONFIDENCE_PCT
    margin_pct: float
    noise_pct: float | None
    """Standard deviation of one pair at one point; None for a single pair."""
    verdict: Verdict
    reasons: tuple[str, ...]


class ServedResult(Record):
    """A comparison as it is served."""

    schema_version: int = SCHEMA_VERSION
    header: ServedHeader
    processes: tuple[ServedProcess, ...]
    comparison: ServedComparison
    clocks: str
    environment: Environment
    command: str = ""
    """That measured it."""
    created: str = ""
    """When: ISO 8601, UTC."""


@dataclass(frozen=True)
class ServedJob:
    """What to measure."""

    workload: Workload
    """Model, engine, weights and dtype; its batch and lengths are not used."""
    client: str
    serving: ServingClient
    points: tuple[ServedPoint, ...]
    process_pairs: int
    margin_pct: float = 0.5
    port: int | None = None
    """None: a free one."""
    lock_mhz: int | None = None
    tuning: Tuning | None = None
    """The search for the baseline's arguments, if there was one."""
    flags_no_faster: bool = True
    """Whether nothing hints that a difference of the sides' arguments is what gains."""
    earlier: tuple[ServedResult, ...] = ()
    """Results of the same comparison, whose pairs count."""

    @property
    def random(self) -> bool:
        """Whether weights are random."""
        return self.workload.weights == "random"

    @property
    def traces(self) -> dict[str, ServingTrace]:
        """The traces of the points."""
        return {point.trace: traces()[point.trace] for point in self.points}

    def values(self, prompts: ServedPrompts) -> dict[str, Any]:
        """What commands are filled with, but for what a process has of its own."""
        longest = int(SPARE * max(trace.longest for trace in self.traces.values()))
        lengths: dict[str, Any] = {}
        if self.serving.offline is not None:
            [part] = self.traces[self.serving.offline.trace].parts
            lengths = {"input_len": part.input_len, "output_len": part.output_len}
        return {
            **lengths,
            "model": prompts.model,
            "tokenizer": prompts.tokenizer,
            "host": HOST,
            "dtype": self.workload.dtype,
            "seed": self.workload.seed,
            "context": -(-longest // LENGTH_STEP) * LENGTH_STEP,
            "users": max(point.concurrency for point in self.points),
        }

    def serve_command(self, side: SideSetup, values: Mapping[str, Any]) -> list[str]:
        """The command line of a side's server; `values` has the rest."""
        return self._of_engine(filled(self.serving.serve, {**values, "python": side.python}), side)

    def offline_command(self, side: SideSetup, values: Mapping[str, Any]) -> list[str]:
        """The command line of a client that starts a side's engine; `values` has the rest."""
        return self._of_engine([side.python, "-m", *filled(self.serving.bench, values)], side)

    def _of_engine(self, command: list[str], side: SideSetup) -> list[str]:
        weights = self.serving.random_weights if self.random else ()
        return [*command, *weights, *flags(side.arguments)]


def header_of(
    job: ServedJob, sides: Sequence[SideSetup]
) -> tuple[ServedHeader, tuple[Installation, Installation]]:
    """What a comparison consists of, and what is installed for each side.

    Raises:
        UsageError: the client cannot serve these weights, or a side is no Python.
        MissingError: an engine or a client is not installed.
    """
    if job.random and not job.serving.random_weights:
        raise UsageError(
            f"{job.client} cannot serve random weights", "use --weights hub, or another --client"
        )
    if not job.serving.rate and any(point.rate is not None for point in job.points):
        raise UsageError(f"{job.client} has no rate of requests", "leave out --rate")
    one, other = (installation(job.serving, side.python) for side in sides)
    unnamed = ("model", "tokenizer", "port", "requests", "count", "concurrency", "run")
    prompts = ServedPrompts(job.workload)
    _refuse_small_vocabulary(job, max(prompts.vocabulary) + 1)
    values = job.values(prompts)
    values |= {name: name.upper() for name in (*unnamed, "folder", "result", "python")}
    baseline, patched = (
        ServedSide(
            name=side.name,
            version=installed.version or "",
            arguments=dict(side.arguments),
            patches=side.digests(job.workload.engine),
        )
        for side, installed in zip(sides, (one, other), strict=True)
    )
    named = SideSetup("", python="PYTHON")
    offline = job.serving.offline is not None
    bench = ("PYTHON", "-m", *filled(job.serving.bench, values))
    return ServedHeader(
        fingerprint=fingerprint(job.workload.device, job.workload.threads),
        workload=job.workload,
        client=job.client,
        traces=job.traces,
        points=job.points,
        sides=(baseline, patched),
        serve=() if offline else tuple(job.serve_command(named, values)),
        bench=tuple(job.offline_command(named, values)) if offline else bench,
        config=model_digest(job.workload),
    ), (one, other)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _refuse_small_vocabulary(job: ServedJob, size: int) -> None:
    """Check that the model has the token ids from which a client draws prompts.

    Raises:
        UsageError: it has not.
    """
    needed = 1 if job.serving.offline is None else job.serving.offline.vocabulary
    if size < needed:
        raise UsageError(
            f"{job.client} draws prompts from {needed:,} token ids, and {job.workload.model} has "
            f"{size:,}",
            "give another --client or model",
        )


def refuse_many_points(points: Sequence[ServedPoint]) -> None:
    """Check that the seeds of a pair suffice.

    Raises:
        UsageError: there are too many points.
    """
    if len(points) > MOST_POINTS:
        raise UsageError(f"{len(points)} points are too many", f"give at most {MOST_POINTS}")
