"""`patcher bundle`: a judged candidate becomes a patch bundle, a folder or one file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.text import Text

from bench import Candidate, Evaluation, Language, Outcome, UsageError, load_op
from patcher.commands.console import Engine, Json, Output, Threads, app, examples

if TYPE_CHECKING:  # every other command starts without the patches
    from integrate import Manifest


@app.command()
@examples(
    "patcher bundle fused_add_rms_norm kernel.cu norm-patch --sweep bf16-fp32-weight",
    "patcher bundle fused_add_rms_norm kernel.cu norm-patch.zip --tensor-parallel 1,2",
    "patcher bundle moe_route candidate.cu P --engine vllm --evaluation evaluation.json",
)
def bundle(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    source: Annotated[Path, typer.Argument(help="One source file.")],
    target: Annotated[
        Path, typer.Argument(help="Where the patch bundle goes: a folder, or one .zip file.")
    ],
    language: Annotated[Language | None, typer.Option(help="Default: by the file's name.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Which sweep of the op is timed.")] = None,
    engine: Engine = "transformers",
    tensor_parallel: Annotated[
        str | None,
        typer.Option(help="Workers that may share a layer, as `1,2`; default: any number."),
    ] = None,
    judged: Annotated[
        Path | None,
        typer.Option(
            "--evaluation",
            help="The judge's verdict on this very source, as a run keeps it beside the "
            "candidate: it is not judged again.",
        ),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Judge a candidate and, if it is right and faster, make it a patch bundle.

    At sizes at either end of the sweep where it is slower, the engine's own code goes on running.
    """
    from bench import judge
    from patcher.settings import resolve
    from patcher.show.tables import print_evaluation

    workers = worker_counts(tensor_parallel)
    candidate = Candidate.from_file(load_op(op).name, source, language)
    output = Output(as_json)
    if judged is not None:
        evaluation = verdict_on(candidate, judged)
    else:
        with output.progress() as bar:
            settings = judge.JudgeSettings(
                sweep=sweep, threads=threads, policy=resolve().tripwires.for_op(candidate.op)
            )
            evaluation = judge.evaluate(candidate, settings, bar)
    if evaluation.outcome is not Outcome.CORRECT:
        if as_json:
            output.emit(evaluation)
        else:
            print_evaluation(output.out, evaluation)
        return 1
    manifest = make_bundle(target, candidate, evaluation, engine=engine, tensor_parallel=workers)
    speedup = f"{evaluation.geomean_speedup:.3f}x against {evaluation.baseline}"
    lines = [Text(f"{manifest.id} in {target}: {speedup}")]
    if manifest.left_out:
        slow = ", ".join(manifest.left_out)
        lines.append(Text(f"the engine's own code runs at {slow}: it is faster there"))
    output.emit(manifest, *lines)
    return 0


def verdict_on(candidate: Candidate, path: Path) -> Evaluation:
    """What was judged before.

    Raises:
        UsageError: that is no verdict, or one on another source.
    """
    try:
        found = Evaluation.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{path} is no verdict: {str(error).splitlines()[0]}",
            "give the evaluation.json that a run keeps, or what `patcher evaluate --json` printed",
        ) from error
    if (found.op, found.digest) != (candidate.op, candidate.digest):
        raise UsageError(
            f"{path} is a verdict on another source (of {found.op})",
            "give the one that lies beside the candidate, or leave --evaluation out",
        )
    return found


def make_bundle(
    target: Path,
    candidate: Candidate,
    evaluation: Evaluation,
    *,
    engine: str,
    tensor_parallel: tuple[int, ...],
) -> Manifest:
    """Write it with its prebuilt binary; see `Patch.create` for what is raised."""
    from bench.toolchains import build
    from integrate import Patch, is_archive, pack

    op = load_op(candidate.op)
    built = build(candidate, op.contract)
    with tempfile.TemporaryDirectory() as scratch:
        packed = is_archive(target)
        patch = Patch.create(
            Path(scratch) / "patch" if packed else target,
            op,
            candidate,
            evaluation,
            engine=engine,
            made_by="patcher bundle",
            built=built,
            tensor_parallel=tensor_parallel,
        )
        if packed:
            pack(patch, target)
        return patch.manifest


def worker_counts(text: str | None) -> tuple[int, ...]:
    """`1,2` as numbers; none where nothing is said.

    Raises:
        UsageError: not such a list.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--tensor-parallel {text!r} is no list of numbers", "say 1,2")
    return tuple(sorted({int(part) for part in parts}))
