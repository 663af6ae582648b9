"""`patcher bundle`: a judged candidate becomes a patch bundle, a folder or one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.text import Text

from patcher.bench import (
    Candidate,
    Evaluation,
    Language,
    Outcome,
    UsageError,
    comment_mark,
    content,
    header_hint,
    load_op,
    problem,
)
from patcher.commands.console import Engine, Json, Output, Threads, app, examples
from patcher.visible import visible


@app.command()
@examples(
    "patcher bundle fused_add_rms_norm kernel.cu norm-patch --sweep bf16-fp32-weight",
    "patcher bundle fused_add_rms_norm kernel.cu norm-patch.zip --tensor-parallel 1,2",
    "patcher bundle moe_route candidate.cu P --engine vllm --evaluation evaluation.json",
    "patcher bundle linear candidate.cu P --engine vllm --sweep layers --sweep bf16",
    "patcher bundle linear candidate.cu P --engine vllm --point lm_head --sweep head",
)
def bundle(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    source: Annotated[Path, typer.Argument(help="One source file.")],
    target: Annotated[
        Path, typer.Argument(help="Where the patch bundle goes: a folder, or one .zip file.")
    ],
    language: Annotated[
        Language | None, typer.Option(help="Default: from the file's suffix.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="A sweep of the op that is timed; may be repeated.")
    ] = None,
    engine: Engine = "transformers",
    point: Annotated[
        str | None,
        typer.Option(help="The patch point, where the op has several; default: the first."),
    ] = None,
    tensor_parallel: Annotated[
        str | None,
        typer.Option(help="Tensor-parallel sizes that it may run at, as `1,2`; default: any."),
    ] = None,
    judged: Annotated[
        list[Path] | None,
        typer.Option(
            "--evaluation",
            help="The judge's verdict on this very source, as a run keeps it beside the "
            "candidate: it is not judged again. May be repeated, each of another sweep.",
        ),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Evaluate a kernel and, if it is correct and faster, package it as a patch.

    Where it is slower at some sizes of a sweep, the engine keeps its own code, and calls the kernel
    at the longest run of sizes where it is not. The kernel must be faster on the first sweep, which
    the patch is known by. On a further sweep it may be slower at some sizes, not at all of them.
    """
    from patcher.api.bundle import make_bundle, require_bundle
    from patcher.bench import judge
    from patcher.settings import resolve
    from patcher.show.evaluation import print_evaluation

    workers = worker_counts(tensor_parallel)
    candidate = Candidate.from_file(load_op(op).name, source, language)
    require_bundle(target, candidate.op, engine, point)
    output = Output(as_json)
    if judged:
        evaluations = [verdict_on(candidate, path) for path in judged]
        sweeps = [one.sweep for one in evaluations]
        if len(set(sweeps)) < len(sweeps):
            raise UsageError("two verdicts are of the same sweep", "give one of each")
    else:
        policy, evaluations = resolve().tripwires.for_op(candidate.op), []
        with output.progress() as bar:
            chosen: list[str | None] = [*dict.fromkeys(sweep)] if sweep else [None]
            for name in chosen:
                settings = judge.JudgeSettings(sweep=name, threads=threads, policy=policy)
                evaluations.append(judge.evaluate(candidate, settings, bar))
    for one in evaluations:
        faster = one.outcome is Outcome.CORRECT
        if not faster and one is not evaluations[0] and one.right:
            faster = any(timing.speedup_high >= 1 for timing in one.timings)
        if not faster:
            if as_json:
                output.emit(one)
            else:
                print_evaluation(output.out, one)
            return 1
    manifest = make_bundle(
        target,
        candidate,
        evaluations,
        engine=engine,
        made_by="patcher bundle",
        tensor_parallel=workers,
        point=point,
    )
    told = [
        (f"over {one.sweep}: " if len(evaluations) > 1 else "")
        + f"{one.geomean_speedup:.3f}x against {one.baseline}"
        for one in evaluations
    ]
    lines = [Text(f"{manifest.id} in {target}: {'; '.join(told)}")]
    if manifest.left_out:
        slow = ", ".join(manifest.left_out)
        lines.append(Text(f"the engine's own code runs at {slow}: it is faster there"))
    lines += [Text(f"by a verdict of its own: {one}") for one in manifest.guards.shapes]
    lines += [
        Text(visible(f"over {one.sweep}: {one.lower_grade}: {one.grade_reason}"))
        for one in evaluations
        if one.lower_grade
    ]
    output.emit(manifest, *lines)
    mark = comment_mark(candidate.language.in_python)
    if hint := header_hint(source.read_text(encoding="utf-8"), mark):
        output.err.print(Text(hint))
    return 0


def verdict_on(candidate: Candidate, path: Path) -> Evaluation:
    """What was judged before.

    Raises:
        UsageError: that is no verdict, or one on another source.
    """
    try:
        found = Evaluation.model_validate_json(content(path))
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{path} is not a verdict: {problem(error)}",
            "give the evaluation.json that a run keeps, or what `patcher evaluate --json` printed",
        ) from error
    if (found.op, found.digest) != (candidate.op, candidate.digest):
        raise UsageError(
            f"{path} is a verdict on another source (of {found.op})",
            "give the one that lies beside the candidate, or leave --evaluation out",
        )
    return found


def worker_counts(text: str | None) -> tuple[int, ...]:
    """`1,2` as numbers; none where nothing is said.

    Raises:
        UsageError: not such a list.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--tensor-parallel {text!r} is not a list of numbers", "say 1,2")
    return tuple(sorted({int(part) for part in parts}))
