"""`patcher evaluate`: the judge's word on one source file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import Candidate, Language, Outcome, UsageError, load_op
from patcher.commands.console import (
    Device,
    Json,
    JudgeSpec,
    Output,
    Threads,
    app,
    asked_again,
    examples,
    pick_device,
)

REQUEST_ID = "evaluate"


@app.command()
@examples(
    "patcher evaluate fused_add_rms_norm kernel.cpp",
    "patcher evaluate fused_add_rms_norm kernel.cu --sweep bf16-fp32-weight",
    "patcher evaluate fused_add_rms_norm kernel.py --language triton --json",
    "patcher evaluate fused_add_rms_norm kernel.cu --sanitize --counters",
    "patcher evaluate fused_add_rms_norm kernel.hip",
    "patcher evaluate fused_add_rms_norm kernel.cpp --reward --json",
    "patcher evaluate fused_add_rms_norm kernel.cu --judge exchange:jobs",
)
def evaluate(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    source: Annotated[Path, typer.Argument(help="One source file.")],
    language: Annotated[Language | None, typer.Option(help="Default: by the file's name.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this one, not the strongest.")
    ] = None,
    sweep: Annotated[str | None, typer.Option(help="Which sweep of the op is timed.")] = None,
    device: Device = None,
    pairs: Annotated[int, typer.Option(help="Pairs of timed blocks a point.", min=3)] = 12,
    timeout: Annotated[float, typer.Option(help="Seconds one call may take.", min=0.1)] = 30.0,
    threads: Threads = None,
    tripwires: Annotated[bool, typer.Option(help="Whether the source is looked at.")] = True,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="CUDA: it must pass compute-sanitizer, too.")
    ] = False,
    counters: Annotated[
        bool, typer.Option("--counters", help="CUDA: what Nsight Compute counts in its kernels.")
    ] = False,
    for_reward: Annotated[
        bool,
        typer.Option(
            "--reward",
            help="Judge it against eager and torch.compile (two judgements, twice the time) and "
            "give its reward for training.",
        ),
    ] = False,
    judge: JudgeSpec = None,
    as_json: Json = False,
) -> int:
    """Judge one candidate in processes of its own: is it right, is it faster?

    --reward is data for training: -1 wrong, 1 right, 2 over 5 % faster than eager, 3 than
    torch.compile, too, by the lower ends of the intervals; and the measured speedups.

    Exit code 0: right and faster (a reward of 2 or 3); 1: anything else that was judged; 6: the
    judge is elsewhere and has not answered yet: the same command takes the verdict up. A hip, sycl
    or metal kernel is compiled, and neither run nor timed: its outcome is `compiled` at best.
    """
    from patcher.bench.judge import JudgeSettings
    from patcher.bench.judge.counters import counted, require_ncu
    from patcher.judges import LOCAL, open_judges
    from patcher.judges.reward import judge_for_reward
    from patcher.settings import resolve
    from patcher.show.evaluation import counters_table, print_evaluation

    given = resolve({"judge": judge})
    candidate = Candidate.from_file(load_op(op).name, source, language)
    here = given.judge == LOCAL
    if counters:
        never = candidate.language is Language.CPP or candidate.language.compile_only
        if never or (here and pick_device(device) == "cpu"):
            raise UsageError("--counters is for CUDA kernels on a CUDA device", "drop it")
        if here:
            require_ncu()
    if for_reward and (baseline or counters):
        raise UsageError("--reward has baselines of its own", "drop --baseline and --counters")
    settings = JudgeSettings(
        device=device,
        sweep=sweep,
        baseline=baseline,
        pairs=pairs,
        timeout_s=timeout,
        threads=threads,
        tripwires=tripwires,
        policy=given.tripwires.for_op(candidate.op),
        sanitize=sanitize,
    )
    output = Output(as_json)
    if for_reward:
        with asked_again(), output.progress() as bar:
            result = judge_for_reward(given.judge, candidate, settings, REQUEST_ID, bar)
        if not as_json:
            for each in result.evaluations.values():
                print_evaluation(output.out, each)
        output.emit(result, Text(f"reward {result.reward.value}: {result.reward.why}"))
        return 0 if result.reward.value > 1 else 1
    asked = counters and not here
    with (
        asked_again(),
        output.progress() as bar,
        open_judges(given.judge, settings, REQUEST_ID, bar, counters=asked) as judges,
    ):
        [evaluation] = judges.evaluate([candidate])
    if not as_json:
        print_evaluation(output.out, evaluation)
    if counters and here:
        evaluation = counted(candidate, evaluation, sweep)
    if as_json:
        output.emit(evaluation)
    elif evaluation.counters:
        output.out.print(counters_table(evaluation.counters))
    return 0 if evaluation.outcome is Outcome.CORRECT else 1
