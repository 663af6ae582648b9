"""`patcher throughput`: a patch, or several, measured end to end."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from patcher.bench import UsageError
from patcher.commands.console import (
    Device,
    Engine,
    Json,
    MarginPct,
    Out,
    Output,
    Threads,
    app,
    examples,
    write_out,
)
from patcher.commands.workloads import Batch, Prompt, Steps, Weights, workload_of


def _writable(folder: Path | None) -> Path | None:
    """Before the work, which may take an hour, not after it."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error}", "give another --report") from error
    return folder


@app.command()
@examples(
    "patcher throughput gpt-oss-tiny --patch patcher-runs/RUN/patch",
    "patcher throughput gpt-oss-20b --patch norm-patch --batch 8 --input-len 1024",
    "patcher throughput gpt-oss-20b --from samples.jsonl",
    "patcher throughput gpt-oss-tiny --self-test --pairs 200",
    "patcher throughput gpt-oss-20b --engine vllm --patch norm-patch --preset quick",
    "patcher throughput gpt-oss-20b --engine vllm --patch P --preset kforge --tune-baseline",
    "patcher throughput gpt-oss-20b --engine vllm --tune-baseline --out stock.json",
    "patcher throughput gpt-oss-20b --engine vllm --patch P --tuned stock.json",
    "patcher throughput gpt-oss-tiny --patch norm-patch --processes 3",
    "patcher throughput gpt-oss-20b --engine vllm --patch P --elsewhere",
    "patcher throughput gpt-oss-20b --patch P --also-batch 1,64 --also-context 4096,8192",
    "patcher throughput gpt-oss-20b --engine vllm --patch P --patch Q --best-set",
    "patcher throughput gpt-oss-20b --engine vllm --patch P --patch Q --report verdict",
    "patcher throughput gpt-oss-20b --from verdict.json --patch P --report verdict",
)
def throughput(
    model: Annotated[str, typer.Argument(help="Preset, Hugging Face id or folder.")],
    patches: Annotated[
        list[Path] | None,
        typer.Option("--patch", help="A patch bundle; several: all in together."),
    ] = None,
    find_best: Annotated[
        bool,
        typer.Option("--best-set", help="Each --patch alone and all together: which to keep?"),
    ] = False,
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="Also at other batch sizes and contexts; see --also-..."),
    ] = False,
    also_batch: Annotated[
        str | None,
        typer.Option(help="Other batch sizes. Default: 1 and eight times the workload's."),
    ] = None,
    also_context: Annotated[
        str | None,
        typer.Option(help="Other contexts. Default: four and eight times the workload's."),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help='JSONL of {"pair", "arm", "tokens_per_s"[, "process"]}; with --patch: what --out '
            "wrote of them.",
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant gains of +1, +0.5 and -1 %; are they found?")
    ] = False,
    engine: Engine = "transformers",
    device: Device = None,
    batch: Batch = None,
    input_len: Prompt = None,
    output_len: Steps = None,
    weights: Weights = "random",
    preset_name: Annotated[
        str | None,
        typer.Option("--preset", help="Traffic: kforge (hours) or quick (minutes)."),
    ] = None,
    pairs: Annotated[int | None, typer.Option(help="Pairs at most.", min=6)] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Process pairs, a process for each arm; 0: one process for both. Default: 4 for "
            "vllm, which is patched when it starts, else 0.",
            min=0,
        ),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone", help="One process at a time, as served; else two are loaded where they fit."
        ),
    ] = False,
    tune_baseline: Annotated[
        bool,
        typer.Option(
            "--tune-baseline",
            help="vllm: the best stock configuration is the baseline; without --patch: find it.",
        ),
    ] = False,
    tuned: Annotated[
        Path | None,
        typer.Option(help="vllm: what --tune-baseline wrote to --out, in place of a search."),
    ] = None,
    engine_args: Annotated[
        list[str] | None,
        typer.Option("--engine-arg", metavar="NAME=VALUE", help="vllm: an argument for both arms."),
    ] = None,
    margin_pct: MarginPct = None,
    quality_steps: Annotated[
        int, typer.Option(help="Decode steps compared for quality.", min=1)
    ] = 32,
    lock_mhz: Annotated[
        int | None,
        typer.Option(help="Lock the GPU's SM clock for the A/B (root; else monitored).", min=1),
    ] = None,
    out: Out = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the verdict as a page: HTML, Markdown, JSON.", callback=_writable
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Of the engine as it comes: its steps and kernels, for the report."),
    ] = None,
    patched_profile: Annotated[
        Path | None, typer.Option(help="Of the patched engine: what moved, and how often it ran.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """End-to-end A/B of a patch, interleaved, with interval and verdict.

    Or, with --from, decide on samples, or once more on what was measured of --patch, now with other
    profiles or another page; or, with --self-test, test the measurement itself; or, with
    --tune-baseline alone, look for vLLM's best stock configuration.

    Exit code 0: accepted, or a best set found; 1: not; of --self-test 0: every planted gain found,
    1: not all, 5: one judged the wrong way round.
    """
    from patcher.settings import resolve

    output = Output(as_json)
    margin = resolve({"margin_pct": margin_pct}).margin_pct
    if self_test and (samples is not None or patches):
        raise UsageError("several things to do", "give one of --patch, --from and --self-test")
    if samples is not None and not patches:
        from patcher.bench.stats.compare import compare, read_samples
        from patcher.show.comparison import comparison_lines

        comparison = compare(read_samples(samples), margin_pct=margin)
        write_out(out, comparison)
        output.emit(comparison, comparison_lines(model, comparison))
        return 0 if comparison.verdict == "accept" else 1
    if samples is not None and find_best:
        raise UsageError("several things to do", "give --from without --best-set")
    if not (patches or self_test or tune_baseline):
        raise UsageError(
            "nothing to compare",
            "give --patch BUNDLE, --from SAMPLES, --self-test or --tune-baseline",
        )
    from patcher.ab.one_process import plant_gains
    from patcher.ab.options import ThroughputOptions, job_of, read_tuning
    from patcher.ab.other_windows import other_shapes
    from patcher.ab.timeline import Timeline
    from patcher.commands.verdicts import Verdicts
    from patcher.hotspot import read
    from patcher.show.comparison import planted_lines

    if (report or profile or patched_profile) and (find_best or not patches):
        raise UsageError(
            "a report is of one verdict", "give --patch without --best-set, which writes its own"
        )
    before, after = (read(one, model) if one else None for one in (profile, patched_profile))
    command = shlex.join(["patcher", *sys.argv[1:]])
    verdicts = Verdicts(command, output, out, report, before, after)
    if samples is not None:
        if margin_pct is not None:
            raise UsageError(
                "the margin was declared before it was measured", "leave out --margin-pct"
            )
        return verdicts.once_more(samples, patches or [], model)
    asked = ThroughputOptions(preset_name, batch, input_len, output_len, pairs, processes)
    workload = workload_of(model, device, engine, *asked.shape, weights, threads)
    before_it = None if tuned is None else read_tuning(tuned, workload)
    job = job_of(
        asked, workload, tune_baseline, engine_args or [], margin, quality_steps, before_it
    )
    shapes = other_shapes(workload, elsewhere, also_batch, also_context)
    if alone and (find_best or not patches or not job.process_pairs):
        raise UsageError(
            "--alone is for one verdict with a process for each arm",
            "give --patch, --processes 3 or --engine vllm, and no --best-set",
        )
    job = job.model_copy(update={"lock_mhz": lock_mhz, "other_workloads": shapes, "alone": alone})
    if find_best:
        return verdicts.best_set(job, patches or [])
    if patches:
        return verdicts.measured(job, patches)
    if not self_test:
        from patcher.ab.launcher import ArmLauncher, with_cache_size
        from patcher.show.throughput import trial_line, tuning_lines

        with output.progress() as bar:
            found = ArmLauncher(with_cache_size(job)).tune(
                Timeline(bar), lambda one: bar.say(trial_line(one))
            )
        write_out(out, found)
        output.emit(found, tuning_lines(found)[-1])
        return 0
    with output.progress() as bar:
        planted = plant_gains(job, Timeline(bar))
    write_out(out, planted)
    output.emit(planted, *planted_lines(planted))
    return 5 if planted.wrong else int(not planted.all_found)
