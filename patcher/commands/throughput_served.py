"""`--client` and `compare-engines`: ways to serve a model, measured as users see them."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from patcher.bench import UsageError, content
from patcher.commands.console import Output, runs_dir, write_out
from patcher.commands.option_groups import OptionGroup
from patcher.commands.throughput_options import (
    BaselineChoice,
    EngineChoice,
    OtherWorkloadsChoice,
    PageChoice,
    SampleSize,
    WorkloadChoice,
)
from patcher.commands.throughput_sides import STOCK, side_of
from patcher.commands.workloads import workload_of

if TYPE_CHECKING:
    from patcher.ab.served_records import ServedJob, ServedResult, SideSetup

SERVED_PAIRS = 2
"""Process pairs where none are asked for: four starts of a server."""
BACKENDS = "backends"
"""The switch that stands for the kernels that the engine has."""


@dataclass(frozen=True)
class ServedChoice(OptionGroup):
    """A client of others, and what it sends."""

    PANEL: ClassVar[str] = "As it is served"

    client: Annotated[
        str | None,
        typer.Option(
            help="Measure an engine alone by a client of others: over HTTP vllm-bench (`vllm "
            "serve` and `vllm bench serve`) or sglang-bench; without a server vllm-latency (`vllm "
            "bench latency`) or vllm-throughput (`vllm bench throughput`), which start the engine "
            "anew for each point."
        ),
    ] = None
    trace: Annotated[
        str | None,
        typer.Option(
            help="What a client over HTTP sends: fixed, mixed, or both. Default: both; one without "
            "a server has prompts of its own."
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Users at a time, such as 1,8,64, in place of the traces' own; with vllm-latency "
            "the batch (1,8,64), with vllm-throughput the number of prompts (1000)."
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            help="Requests that arrive a second, such as 2,8, besides these users: the gain there "
            "is in tokens/s of a user, and may not be a loss."
        ),
    ] = None
    port: Annotated[
        int | None, typer.Option(help="Of the server; default: a free one.", min=1, max=65535)
    ] = None
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="FILE",
            help="A result (--out) of the same comparison, such as of another host: its process "
            "pairs count, and only others are measured. Several: repeat it.",
        ),
    ] = None


@dataclass(frozen=True)
class SwitchChoice(OptionGroup):
    """What a search over HTTP tries."""

    PANEL: ClassVar[str] = "As it is served"

    switches: Annotated[
        list[str] | None,
        typer.Option(
            "--switch",
            metavar="NAME",
            help="With --client: async-scheduling, chunked-prefill, fp8-kv, ngram, eagle3 or "
            "backends; else an argument of the engine, such as attention_backend. Several: repeat "
            "it. Default: all that keep the outputs.",
        ),
    ] = None
    draft: Annotated[
        str | None, typer.Option(help="A draft model for eagle3: a folder or an id.")
    ] = None


def served_job(
    model: str,
    workload: WorkloadChoice,
    engine: EngineChoice,
    size: SampleSize,
    baseline: BaselineChoice,
    others: OtherWorkloadsChoice,
    served: ServedChoice,
    margin_pct: float | None,
) -> tuple[ServedJob, SideSetup]:
    """What these options ask for, and the baseline.

    Raises:
        UsageError: options that do not go together, or of what is unknown.
    """
    from patcher.ab.options import engine_arguments, read_tuning
    from patcher.ab.other_windows import whole_numbers
    from patcher.ab.served_points import points_for
    from patcher.ab.served_records import ServedJob, SideSetup
    from patcher.bench.engines.serving import client_of
    from patcher.settings import resolve

    of_windows = {
        "--batch": workload.batch,
        "--input-len": workload.input_len,
        "--output-len": workload.output_len,
        "--preset": workload.preset_name,
        "--pairs": size.pairs,
        "--tune-baseline": baseline.tune_baseline,
        "--other-workloads": others != OtherWorkloadsChoice(),
    }
    if given := [name for name, value in of_windows.items() if value]:
        raise UsageError(
            f"a client has traffic of its own, without {' and '.join(given)}",
            "use --trace and --concurrency, and tune before: patcher throughput tune",
        )
    what = workload_of(
        model,
        workload.device,
        workload.engine,
        None,
        None,
        None,
        workload.weights,
        workload.threads,
        workload.dtype,
    )
    name, client = client_of(served.client, what.engine)
    users = (
        None if served.concurrency is None else whole_numbers(served.concurrency, "--concurrency")
    )
    tuned = None if baseline.tuned is None else read_tuning(baseline.tuned, what)
    arguments = engine_arguments(engine.engine_args or [], tuned)
    arguments |= tuned.chosen if tuned else {}
    job = ServedJob(
        workload=what,
        client=name,
        serving=client,
        points=points_for(name, client, served.trace, users, rates_of(served.rate), served.port),
        process_pairs=SERVED_PAIRS if size.processes is None else size.processes,
        margin_pct=resolve({"margin_pct": margin_pct}).margin_pct,
        port=served.port,
        lock_mhz=engine.lock_mhz,
        tuning=tuned,
        earlier=tuple(map(read_earlier, served.earlier or ())),
    )
    if job.process_pairs < 1:
        raise UsageError("no process pair", "use --processes 2 or more")
    return job, SideSetup(name=STOCK, arguments=arguments)


def rates_of(text: str | None) -> tuple[float, ...]:
    """Rates of requests, in the order given.

    Raises:
        UsageError: one is no number from 0.01, where a run takes hours, to 10,000.
    """
    words = [] if text is None else text.split(",")
    try:
        rates = tuple(float(word) for word in words)
    except ValueError:
        rates = (math.nan,)
    if not all(0.01 <= rate <= 1e4 for rate in rates):
        raise UsageError(
            f"--rate {text} is no list of requests a second",
            "give numbers from 0.01 to 10000, such as --rate 0.5,4",
        )
    return rates


def read_earlier(path: Path) -> ServedResult:
    """A result that `--out` wrote.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    from pydantic import ValidationError

    from patcher.ab.served_records import ServedResult

    try:
        return ServedResult.model_validate_json(content(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give a file of --out") from error
    except ValidationError as error:
        raise UsageError(
            f"{path} is no result of a comparison over HTTP", "give a file of --out"
        ) from error


def compare_patched(
    job: ServedJob,
    stock: SideSetup,
    bundles: Sequence[Path],
    output: Output,
    out: Path | None,
    page: PageChoice,
) -> int:
    """Compare the stock server with one whose patches are all in; returns the exit code."""
    from patcher.ab.served import with_patches
    from patcher.integrate import Patch, unpacked

    with ExitStack() as stack:
        patches = [Patch.load(stack.enter_context(unpacked(one))) for one in bundles]
        job, patched = with_patches(job, stock, patches)
        return show(job, (stock, patched), output, out, page)


def compare_sides(
    job: ServedJob,
    stock: SideSetup,
    texts: tuple[str, str],
    output: Output,
    out: Path | None,
    page: PageChoice,
) -> int:
    """Compare two ways to serve that are told apart by words; returns the exit code."""
    with ExitStack() as stack:
        sides = tuple(side_of(text, job.workload.engine, stock, stack) for text in texts)
        return show(job, (sides[0], sides[1]), output, out, page)


def tune_as_served(
    job: ServedJob,
    stock: SideSetup,
    choice: SwitchChoice,
    output: Output,
    out: Path | None,
) -> int:
    """Search for the best way to serve; returns the exit code.

    Raises:
        UsageError: a switch is unknown, or a draft model is given that none needs.
    """
    from patcher.ab.served_tuning import tune_served
    from patcher.ab.timeline import Timeline
    from patcher.bench.ab.tuning import options_for
    from patcher.bench.engines.switches import ways_to_try
    from patcher.show.throughput import trial_line, tuning_lines

    if job.earlier:
        raise UsageError("--with adds to a comparison, and this is a search", "leave it out")
    names = choice.switches or []
    asked = [name for name in names if name != BACKENDS]
    switched, refused = (
        ways_to_try(job.workload, asked, choice.draft) if asked or not names else ((), ())
    )
    backends = options_for(job.workload) if BACKENDS in names else ()
    with output.progress() as bar:
        found = tune_served(
            job,
            stock,
            [*backends, *switched],
            refused,
            runs_dir(),
            Timeline(bar),
            lambda one: bar.say(trial_line(one)),
        )
    write_out(out, found)
    output.emit(found, *tuning_lines(found)[len(found.trials) :])
    return 0


def show(
    job: ServedJob,
    sides: tuple[SideSetup, SideSetup],
    output: Output,
    out: Path | None,
    page: PageChoice,
) -> int:
    """Measure, write and show; returns the exit code."""
    from rich.text import Text

    from patcher.ab.served import compare_served
    from patcher.ab.timeline import Timeline
    from patcher.report.served import write_served
    from patcher.show.served import served_lines

    with output.progress() as bar:
        result = compare_served(job, sides, runs_dir(), Timeline(bar))
    command = shlex.join(["patcher", *sys.argv[1:]])
    result = result.model_copy(update={"command": command})
    write_out(out, result)
    lines = served_lines(result)
    if page.report is not None:
        lines.append(Text(f"report: {write_served(result, page.report)}"))
    output.emit(result, *lines)
    return 0 if result.comparison.verdict == "accept" else 1
