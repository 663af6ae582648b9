"""`patcher evaluate`: the judge's word on one source file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import Language, Outcome, UsageError
from patcher.commands.console import (
    Device,
    Json,
    JudgeSpec,
    Output,
    Threads,
    app,
    asked_again,
    examples,
    finite,
)


@app.command()
@examples(
    "patcher evaluate fused_add_rms_norm kernel.cpp",
    "patcher evaluate fused_add_rms_norm kernel.cu --sweep bf16-fp32-weight",
    "patcher evaluate fused_add_rms_norm kernel.py --language triton --json",
    "patcher evaluate fused_add_rms_norm kernel.cu --sanitize --counters",
    "patcher evaluate fused_add_rms_norm kernel.hip",
    "patcher evaluate rms_norm kernel.cpp --recorded norm.safetensors",
    "patcher evaluate fused_add_rms_norm kernel.cpp --reward --json",
    "patcher evaluate fused_add_rms_norm kernel.cu --judge exchange:jobs",
    "patcher evaluate fused_add_rms_norm kernel.cu --judge ray:10.0.0.1:6379",
)
def evaluate(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    source: Annotated[Path, typer.Argument(help="One source file.")],
    language: Annotated[
        Language | None, typer.Option(help="Default: from the file's suffix.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this baseline, not the strongest one.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="The sweep of the op that is timed; with other sizes, NAME@AXIS=SIZE,..."
        ),
    ] = None,
    device: Device = None,
    pairs: Annotated[int, typer.Option(help="Pairs of timed blocks per point.", min=3)] = 12,
    timeout: Annotated[
        float, typer.Option(help="Seconds one call may take.", min=0.1, callback=finite)
    ] = 30.0,
    threads: Threads = None,
    tripwires: Annotated[bool, typer.Option(help="Search the source for known tricks.")] = True,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="CUDA: it must also pass compute-sanitizer.")
    ] = False,
    counters: Annotated[
        bool,
        typer.Option("--counters", help="CUDA: show Nsight Compute's counters of its kernels."),
    ] = False,
    for_reward: Annotated[
        bool,
        typer.Option(
            "--reward",
            help="Judge it against eager and torch.compile (two judgements, twice the time) and "
            "give its reward for training.",
        ),
    ] = False,
    recorded: Annotated[
        Path | None,
        typer.Option(
            help="It must also be right on these calls of an engine; see `patcher ops observe`."
        ),
    ] = None,
    judge: JudgeSpec = None,
    as_json: Json = False,
) -> int:
    """Judge one kernel in its own processes: is it correct, and is it faster?

    --reward gives data for training: -1 wrong, 1 correct, 2 over 5 % faster than eager, 3 also over
    5 % faster than torch.compile, each by the lower end of its interval.

    Exit code 0: correct and faster (a reward of 2 or 3); 1: any other verdict; 6: the judge is on
    another machine and has not answered yet; run the same command again. A hip, sycl or metal
    kernel is only compiled: its best outcome is `compiled`.
    """
    from patcher.api.judge_request import REQUEST_ID, JudgeRequest
    from patcher.show.evaluation import counters_table, print_evaluation

    if for_reward and (baseline or counters):
        raise UsageError("--reward has baselines of its own", "drop --baseline and --counters")
    request = JudgeRequest.of(
        op,
        source,
        language,
        judge=judge,
        baseline=baseline,
        sweep=sweep,
        device=device,
        pairs=pairs,
        timeout_s=timeout,
        threads=threads,
        tripwires=tripwires,
        sanitize=sanitize,
        counters=counters,
        recorded=recorded,
    )
    output = Output(as_json)
    if for_reward:
        from patcher.judges.reward import judge_for_reward

        with asked_again(), output.progress() as bar:
            result = judge_for_reward(
                request.judge, request.candidate, request.settings, REQUEST_ID, bar
            )
        if not as_json:
            for each in result.evaluations.values():
                print_evaluation(output.out, each)
        output.emit(result, Text(f"reward {result.reward.value}: {result.reward.why}"))
        return 0 if result.reward.value > 1 else 1
    with asked_again(), output.progress() as bar:
        evaluation = request.evaluate(bar)
    if as_json:
        output.emit(evaluation)
    else:
        print_evaluation(output.out, evaluation)
        if evaluation.counters:
            output.out.print(counters_table(evaluation.counters))
    return 0 if evaluation.outcome is Outcome.CORRECT else 1
