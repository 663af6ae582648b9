"""The options that make a workload."""

from __future__ import annotations

from typing import Annotated

import typer

from patcher.commands.console import WORKLOAD
from patcher.workloads import workload_for as workload_for
from patcher.workloads import workload_of as workload_of

Batch = Annotated[
    int | None, typer.Option(help="Sequences decoded together.", min=1, rich_help_panel=WORKLOAD)
]
Prompt = Annotated[
    int | None, typer.Option("--input-len", help="Prompt tokens.", min=1, rich_help_panel=WORKLOAD)
]
Steps = Annotated[
    int | None, typer.Option("--output-len", help="Decode steps.", min=1, rich_help_panel=WORKLOAD)
]
Weights = Annotated[
    str,
    typer.Option(
        help="random (seeded, spread-out routing), hub or local.", rich_help_panel=WORKLOAD
    ),
]
