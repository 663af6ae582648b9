"""Trainings and evaluations of models for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from patcher.training.evaluate import ModelEvaluation
    from patcher.training.folder import TrainingSummary


def training_line(summary: TrainingSummary) -> Text:
    """Where a training stands."""
    last = summary.last
    if last is None:
        return Text(f"{summary.folder}: nothing trained")
    value = f"loss {last.loss:.3f}" if last.reward is None else f"reward {last.reward:+.2f}"
    return Text(
        f"{summary.folder}: {summary.updates} of {summary.asked} updates; last {value}; "
        f"adapter in {summary.adapter}"
    )


def evaluation_table(found: ModelEvaluation) -> tuple[Text, Table]:
    """What was evaluated, and its shares."""
    table = Table("share", "95 % interval", *(["difference"] if found.differences else []))
    for name, share in found.shares.items():
        gaps = [str(found.differences[name])] if found.differences else []
        table.add_row(name.replace("_", " "), str(share), *gaps)
    said = f"{len(found.tasks)} tasks, {found.samples} samples each; {found.lost} lost"
    return Text(said), table
