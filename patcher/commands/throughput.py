"""`patcher throughput`: patches, baselines and the measurement itself, measured end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from patcher.bench import UsageError
from patcher.commands.console import Json, MarginPct, Out, Output, app, examples, write_out
from patcher.commands.option_groups import grouped
from patcher.commands.throughput_options import (
    NO_PAGE,
    BaselineChoice,
    EngineChoice,
    Model,
    OtherWorkloadsChoice,
    PageChoice,
    Patches,
    SampleSize,
    WorkloadChoice,
    job_for,
)
from patcher.commands.throughput_served import (
    ServedChoice,
    SwitchChoice,
    compare_patched,
    compare_sides,
    served_job,
    tune_as_served,
)
from patcher.commands.throughput_spelling import ThroughputGroup

throughput_app = typer.Typer(cls=ThroughputGroup, no_args_is_help=True)
app.add_typer(throughput_app, name="throughput")


@throughput_app.callback()
@examples(
    "patcher throughput compare gpt-oss-tiny --patch norm.zip",
    "patcher throughput compare gpt-oss-20b --engine vllm --patch P --client vllm-bench",
    "patcher throughput compare-engines gpt-oss-20b --engine vllm stock moe_backend=marlin",
    "patcher throughput best-set gpt-oss-20b --engine vllm --patch P --patch Q",
    "patcher throughput tune gpt-oss-20b --engine vllm --out stock.json",
    "patcher throughput self-test gpt-oss-tiny",
    "patcher throughput decide samples.jsonl",
)
def throughput() -> None:
    """Measure the whole model end to end: A/B pairs in turn, with an interval and a verdict."""


@throughput_app.command()
@examples(
    "patcher throughput compare gpt-oss-tiny --patch patcher-runs/RUN/patch",
    "patcher throughput compare gpt-oss-20b --patch norm.zip --batch 8 --input-len 1024",
    "patcher throughput compare gpt-oss-20b --engine vllm --patch norm.zip --preset quick",
    "patcher throughput compare gpt-oss-20b --engine vllm --patch P --patch Q --report verdict",
    "patcher throughput compare gpt-oss-20b --engine vllm --patch P --tuned stock.json",
    "patcher throughput compare gpt-oss-20b --engine vllm --patch P --other-workloads",
    "patcher throughput compare gpt-oss-20b --patch P --also-batch 1,64 --also-context 4096,8192",
    "patcher throughput compare gpt-oss-tiny --patch norm.zip --processes 3",
    "patcher throughput compare gpt-oss-20b --engine vllm --patch P --client vllm-bench",
    "patcher throughput compare gpt-oss-20b --engine vllm --patch P --client vllm-latency",
)
@grouped
def compare(
    model: Model,
    patches: Patches,
    workload: WorkloadChoice,
    size: SampleSize,
    baseline: BaselineChoice,
    engine: EngineChoice,
    others: OtherWorkloadsChoice,
    page: PageChoice,
    served: ServedChoice,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick/--alone",
            help="A quick look: two processes side by side where they fit. Default: one at a time, "
            "as an engine is served.",
        ),
    ] = False,
    margin_pct: MarginPct = None,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Compare a model with patches and without: is it faster, and still the same model?

    Exit code 0: accepted; 1: not.
    """
    from patcher.commands.throughput_results import ThroughputCommand

    if served.client is not None:
        if quick or page.profile or page.patched_profile:
            raise UsageError(
                "an engine with a client is measured alone, and not profiled",
                "leave out --quick, --profile and --patched-profile, or --client",
            )
        chosen = (model, workload, engine, size, baseline, others, served, margin_pct)
        return compare_patched(*served_job(*chosen), patches, Output(as_json), out, page)
    _refuse_without_client(served)
    command = ThroughputCommand.of(Output(as_json), out, page)
    job = job_for(model, workload, engine, size, baseline, others, margin_pct)
    if quick and not job.process_pairs:
        raise UsageError(
            "--quick is for one verdict with a process for each arm",
            "give --processes 3 or --engine vllm",
        )
    return command.compare(job.model_copy(update={"alone": not quick}), patches)


def _refuse_without_client(served: ServedChoice) -> None:
    if served != ServedChoice():
        raise UsageError(
            "--trace, --concurrency, --rate, --port and --with are of a client",
            "give --client vllm-bench, too, or leave them out",
        )


@throughput_app.command("compare-engines")
@examples(
    "patcher throughput compare-engines gpt-oss-20b --engine vllm stock moe_backend=marlin",
    "patcher throughput compare-engines gpt-oss-20b --engine vllm python=v25/bin/python "
    "python=v33/bin/python",
    "patcher throughput compare-engines gpt-oss-20b --engine vllm store=a store=b --trace fixed",
)
@grouped
def compare_engines(
    model: Model,
    one: Annotated[
        str,
        typer.Argument(
            help="A side: `stock`, or NAME=VALUE words: arguments of the engine, python=PATH, "
            "store=FOLDER of patches, patch=BUNDLE."
        ),
    ],
    other: Annotated[str, typer.Argument(help="The side that may replace it.")],
    workload: WorkloadChoice,
    size: SampleSize,
    baseline: BaselineChoice,
    engine: EngineChoice,
    page: PageChoice,
    served: ServedChoice,
    margin_pct: MarginPct = None,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Compare two versions or option sets of an engine, or two stores of patches, as it is served.

    Each server runs alone under a client of others. Exit code 0: the other side gains; 1: not.
    """
    others = OtherWorkloadsChoice()
    chosen = (model, workload, engine, size, baseline, others, served, margin_pct)
    return compare_sides(*served_job(*chosen), (one, other), Output(as_json), out, page)


@throughput_app.command("best-set")
@examples(
    "patcher throughput best-set gpt-oss-20b --engine vllm --patch P --patch Q",
    "patcher throughput best-set gpt-oss-20b --engine vllm --patch P --patch Q --tuned stock.json",
)
@grouped
def best_set(
    model: Model,
    patches: Patches,
    workload: WorkloadChoice,
    size: SampleSize,
    baseline: BaselineChoice,
    engine: EngineChoice,
    others: OtherWorkloadsChoice,
    margin_pct: MarginPct = None,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Find which of several patches to keep: each is measured alone, and all together.

    What was measured lies in a folder, so that the same command goes on after a stop; the report
    of the best set is there, too. Exit code 0: a best set was found; 1: none was accepted.
    """
    from patcher.commands.throughput_results import ThroughputCommand

    command = ThroughputCommand.of(Output(as_json), out)
    return command.best_set(
        job_for(model, workload, engine, size, baseline, others, margin_pct), patches
    )


@throughput_app.command()
@examples(
    "patcher throughput tune gpt-oss-20b --engine vllm --out stock.json",
    "patcher throughput tune gpt-oss-20b --engine vllm --preset kforge --also-batch 1,64",
    "patcher throughput tune gpt-oss-20b --engine vllm --switch attention_backend",
    "patcher throughput tune my-model --engine vllm --weights hub --client vllm-bench",
)
@grouped
def tune(
    model: Model,
    workload: WorkloadChoice,
    engine: EngineChoice,
    others: OtherWorkloadsChoice,
    served: ServedChoice,
    switches: SwitchChoice,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Find the engine's best stock configuration: a baseline that a patch has to beat.

    With --client, what people switch on is tried, a server for each way. What --out writes is for
    `--tuned` of `compare` and `best-set`.
    """
    from patcher.ab.launcher import ArmLauncher, with_cache_size
    from patcher.ab.timeline import Timeline
    from patcher.bench.ab.tuning import options_of
    from patcher.show.throughput import trial_line, tuning_lines

    output = Output(as_json)
    if served.client is not None:
        chosen = (model, workload, engine, SampleSize(), BaselineChoice(), others, served, None)
        return tune_as_served(*served_job(*chosen), switches, output, out)
    _refuse_without_client(served)
    if switches.draft is not None:
        raise UsageError("a draft model is tried over HTTP", "give --client vllm-bench, too")
    options_of(workload.engine)
    searched = BaselineChoice(tune_baseline=True)
    job = with_cache_size(job_for(model, workload, engine, baseline=searched, others=others))
    with output.progress() as bar:
        found = ArmLauncher(job).tune(
            Timeline(bar), lambda one: bar.say(trial_line(one)), switches.switches or ()
        )
    write_out(out, found)
    output.emit(found, tuning_lines(found)[-1])
    return 0


@throughput_app.command("self-test")
@examples(
    "patcher throughput self-test gpt-oss-tiny",
    "patcher throughput self-test gpt-oss-tiny --pairs 200 --json",
)
@grouped
def self_test(
    model: Model,
    workload: WorkloadChoice,
    engine: EngineChoice,
    size: SampleSize,
    margin_pct: MarginPct = None,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Test the measurement itself: does it find planted gains of +1, +0.5 and -1 %?

    Exit code 0: every gain was found; 1: not all; 5: one was judged the wrong way round.
    """
    from patcher.ab.one_process import plant_gains
    from patcher.ab.timeline import Timeline
    from patcher.show.comparison import planted_lines

    output = Output(as_json)
    job = job_for(model, workload, engine, size, margin_pct=margin_pct)
    with output.progress() as bar:
        planted = plant_gains(job, Timeline(bar))
    write_out(out, planted)
    output.emit(planted, *planted_lines(planted))
    return 5 if planted.wrong else int(not planted.all_found)


@throughput_app.command()
@examples(
    "patcher throughput decide samples.jsonl",
    "patcher throughput decide verdict.json --patch norm.zip --report verdict",
    "patcher throughput decide verdict.json --patch P --profile stock.sqlite "
    "--patched-profile patched.sqlite --report verdict",
)
@grouped
def decide(
    file: Annotated[
        Path,
        typer.Argument(
            help='JSONL of {"pair", "arm", "tokens_per_s"[, "process"]}; with --patch: what '
            "`compare --out` wrote of these patches."
        ),
    ],
    page: PageChoice,
    patches: Annotated[
        list[Path] | None, typer.Option("--patch", help="A patch bundle that was measured.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model that was measured; checked, or named.")
    ] = None,
    margin_pct: MarginPct = None,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Decide on recorded samples, or once more on what was measured, with other profiles or pages.

    Exit code 0: accepted; 1: not.
    """
    from patcher.commands.throughput_results import ThroughputCommand, decide_on_samples

    if not patches:
        if page != NO_PAGE:
            raise UsageError(
                "a report is of one verdict", "give the bundles that were measured: --patch"
            )
        return decide_on_samples(file, model or file.name, margin_pct, Output(as_json), out)
    if margin_pct is not None:
        raise UsageError("the margin was declared before it was measured", "leave out --margin-pct")
    command = ThroughputCommand.of(Output(as_json), out, page)
    return command.decide_again(file, patches, model)
