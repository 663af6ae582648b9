"""The options that make a workload."""

from __future__ import annotations

from typing import Annotated

import typer

from patcher.bench import DType, UsageError
from patcher.commands.console import WORKLOAD
from patcher.workloads import workload_for as workload_for
from patcher.workloads import workload_of as workload_of

Batch = Annotated[
    int | None, typer.Option(help="Sequences decoded together.", min=1, rich_help_panel=WORKLOAD)
]
Batches = Annotated[
    str | None,
    typer.Option(
        "--batch",
        metavar="N[,N...]",
        help="Sequences decoded together; several, as 1,8,64, are captured in one run of the "
        "engine, which is started for the largest.",
        rich_help_panel=WORKLOAD,
    ),
]
Prompt = Annotated[
    int | None, typer.Option("--input-len", help="Prompt tokens.", min=1, rich_help_panel=WORKLOAD)
]
Steps = Annotated[
    int | None, typer.Option("--output-len", help="Decode steps.", min=1, rich_help_panel=WORKLOAD)
]
ElementType = Annotated[
    DType | None,
    typer.Option(
        "--dtype",
        help="Of weights and activations. Default: the preset's; of another model bfloat16 on a "
        "GPU, or float16 if it was published so, and float32 on a CPU.",
        show_default=False,
        rich_help_panel=WORKLOAD,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="random (seeded, spread-out routing), hub or local.", rich_help_panel=WORKLOAD
    ),
]


def batches_of(text: str | None) -> tuple[int, ...]:
    """The batches that `--batch` names, in its order; none if it is not given.

    Raises:
        UsageError: one is no whole number above zero, or is named twice.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--batch {text!r} is no batch", "give whole numbers: --batch 1,8,64")
    batches = tuple(map(int, parts))
    if len(set(batches)) < len(batches):
        raise UsageError(f"--batch {text} names a batch twice", "name each once: --batch 1,8,64")
    return batches
