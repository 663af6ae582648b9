"""The kernel library as a table."""

from __future__ import annotations

from rich.table import Table

from patcher.bench import Op


def ops_table(ops: dict[str, Op]) -> Table:
    table = Table(title="kernel library")
    for name in ("op", "operation", "baselines", "solutions", "patch points"):
        table.add_column(name)
    for op in ops.values():
        points = (f"{p.engine} {p.versions}: {p.point}" for p in op.contract.patch_points)
        table.add_row(
            op.name,
            op.contract.operation,
            ", ".join(op.baselines),
            ", ".join(info.name for info, _ in op.solutions()),
            "\n".join(points),
        )
    return table
