"""The options of `patcher throughput`, by what they are about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from patcher.bench import UsageError
from patcher.commands.console import Device, Engine, Threads
from patcher.commands.option_groups import OptionGroup
from patcher.commands.workloads import Batch, ElementType, Prompt, Steps, Weights, workload_of

if TYPE_CHECKING:
    from patcher.ab.job import ABJob

Model = Annotated[str, typer.Argument(help="Preset, Hugging Face id, folder or config.json.")]
Patches = Annotated[
    list[Path],
    typer.Option("--patch", help="A patch bundle; several: all in together.", show_default=False),
]


@dataclass(frozen=True)
class WorkloadChoice(OptionGroup):
    """What is served, and to how much traffic."""

    PANEL: ClassVar[str] = "Workload"

    engine: Engine = "transformers"
    device: Device = None
    batch: Batch = None
    input_len: Prompt = None
    output_len: Steps = None
    weights: Weights = "random"
    dtype: ElementType = None
    preset_name: Annotated[
        str | None,
        typer.Option("--preset", help="Traffic: kforge (hours) or quick (minutes)."),
    ] = None
    threads: Threads = None


@dataclass(frozen=True)
class EngineChoice(OptionGroup):
    """How the engine and the device are run."""

    PANEL: ClassVar[str] = "Engine and device"

    engine_args: Annotated[
        list[str] | None,
        typer.Option("--engine-arg", metavar="NAME=VALUE", help="vllm: an argument for both arms."),
    ] = None
    lock_mhz: Annotated[
        int | None,
        typer.Option(help="Lock the GPU's SM clock for the A/B (root; else monitored).", min=1),
    ] = None


@dataclass(frozen=True)
class BaselineChoice(OptionGroup):
    """Which configuration of the engine is the baseline."""

    PANEL: ClassVar[str] = "Baseline"

    tune_baseline: Annotated[
        bool,
        typer.Option(
            "--tune-baseline", help="vllm: find the best stock configuration first, and use it."
        ),
    ] = False
    tuned: Annotated[
        Path | None,
        typer.Option(help="vllm: what `patcher throughput tune` wrote, in place of a search."),
    ] = None


@dataclass(frozen=True)
class SampleSize(OptionGroup):
    """How much is measured."""

    PANEL: ClassVar[str] = "How much is measured"

    pairs: Annotated[int | None, typer.Option(help="Pairs of windows at most.", min=6)] = None
    processes: Annotated[
        int | None,
        typer.Option(
            help="Process pairs, a process for each arm; 0: one process for both. Default: 4 for "
            "vllm, which is patched when it starts, else 0.",
            min=0,
        ),
    ] = None
    quality_steps: Annotated[
        int, typer.Option(help="Decode steps compared for quality.", min=1)
    ] = 32


@dataclass(frozen=True)
class OtherWorkloadsChoice(OptionGroup):
    """At which other traffic nothing may be lost."""

    PANEL: ClassVar[str] = "Other workloads"

    other_workloads: Annotated[
        bool,
        typer.Option(
            "--other-workloads",
            "--elsewhere",
            help="Also at other batch sizes and contexts; see --also-...",
        ),
    ] = False
    also_batch: Annotated[
        str | None,
        typer.Option(help="Other batch sizes. Default: 1 and eight times the workload's."),
    ] = None
    also_context: Annotated[
        str | None,
        typer.Option(help="Other contexts. Default: four and eight times the workload's."),
    ] = None


def _writable(folder: Path | None) -> Path | None:
    """Before the work, which may take an hour, not after it."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error}", "give another --report") from error
    return folder


@dataclass(frozen=True)
class PageChoice(OptionGroup):
    """The verdict as a page, and the profiles that it shows."""

    PANEL: ClassVar[str] = "Report"

    report: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the verdict as a page: HTML, Markdown, JSON.", callback=_writable
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(help="Of the engine as it comes: its steps and kernels, for the report."),
    ] = None
    patched_profile: Annotated[
        Path | None, typer.Option(help="Of the patched engine: what moved, and how often it ran.")
    ] = None


NO_PAGE = PageChoice()


def job_for(
    model: str,
    workload: WorkloadChoice,
    engine: EngineChoice,
    size: SampleSize = SampleSize(),
    baseline: BaselineChoice = BaselineChoice(),
    others: OtherWorkloadsChoice = OtherWorkloadsChoice(),
    margin_pct: float | None = None,
) -> ABJob:
    """What these options ask for.

    Raises:
        UsageError: options that do not go together, or of what is unknown.
    """
    from patcher.ab.options import ThroughputOptions, job_of, read_tuning
    from patcher.ab.other_windows import other_shapes
    from patcher.settings import resolve

    asked = ThroughputOptions(
        preset=workload.preset_name,
        batch=workload.batch,
        input_len=workload.input_len,
        output_len=workload.output_len,
        pairs=size.pairs,
        processes=size.processes,
    )
    served = workload_of(
        model,
        workload.device,
        workload.engine,
        *asked.shape,
        workload.weights,
        workload.threads,
        workload.dtype,
    )
    job = job_of(
        asked,
        served,
        tune=baseline.tune_baseline,
        engine_args=engine.engine_args or [],
        margin_pct=resolve({"margin_pct": margin_pct}).margin_pct,
        quality_steps=size.quality_steps,
        tuned=None if baseline.tuned is None else read_tuning(baseline.tuned, served),
    )
    shapes = other_shapes(served, others.other_workloads, others.also_batch, others.also_context)
    return job.model_copy(update={"lock_mhz": engine.lock_mhz, "other_workloads": shapes})
