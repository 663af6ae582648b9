"""The kernel library as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from patcher.bench import Contract, Op, UsageError


def ops_table(ops: dict[str, Op], contracts: Iterable[Contract]) -> Table:
    """One row for each op; its contract names its patch points."""
    table = Table(title="kernel library")
    for name in ("op", "operation", "baselines", "solutions", "patch points"):
        table.add_column(name)
    for op, contract in zip(ops.values(), contracts, strict=True):
        points = (f"{p.engine} {p.versions}: {p.point}" for p in contract.patch_points)
        table.add_row(
            op.name, op.contract.operation, _baselines(op), _solutions(op), "\n".join(points)
        )
    return table


def _baselines(op: Op) -> str:
    """Their names; else what is wrong with their file, which leaves other ops in the table."""
    try:
        return ", ".join(op.baselines)
    except UsageError as error:
        return error.message


def _solutions(op: Op) -> str:
    try:
        return ", ".join(info.name for info, _ in op.solutions())
    except UsageError as error:
        return error.message
