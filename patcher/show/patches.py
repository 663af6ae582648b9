"""Patches and receipts as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from patcher.integrate import FitCheck, FitReport, Receipt
from patcher.show.listing import ListedPatch

if TYPE_CHECKING:  # it reads profiles, and applying a patch does not
    from patcher.reconciling.proof import Proof


def patches_table(listed: Sequence[ListedPatch]) -> Table:
    table = Table(title="applied patches")
    for name in ("id", "engine", "patch point", "here", "fits", "speedup"):
        table.add_column(name, overflow="fold")
    for one in listed:
        here = Text("on", style="green") if one.on else Text("off", style="dim")
        fits = Text("yes", style="green") if one.fits else Text(one.why_not, style="red")
        named = map(Text, (one.id, one.engine, one.point))  # not rich's markup
        table.add_row(*named, here, fits, Text(one.evidence))
    return table


def verified_lines(found: FitReport) -> Iterator[Text]:
    yield Text(f"{found.id} ({found.digest[:16]})", style="bold")
    for check in found.checks:
        yield from _check_lines(check)


def _check_lines(check: FitCheck) -> Iterator[Text]:
    line = Text("ok   " if check.passed else "fail ", style="green" if check.passed else "red")
    yield line.append(f"{check.name}: {check.detail}", style="default")
    for change in check.changes:
        if change.diff:
            for text in change.diff.splitlines():
                style = {"+": "green", "-": "red"}.get(text[:1], "dim")
                yield Text(f"     {text}", style=style)
        else:
            yield Text(f"     {change.name}: {change.change}")
    if check.hint:
        yield Text(f"     next: {check.hint}")


def receipts_table(receipts: Sequence[Receipt]) -> Table:
    """A row a process and patch; the hosts are named where there are several."""
    table = Table(title="what ran, by process")
    hosts = len({(one.host, one.namespace) for one in receipts}) > 1
    for name in (
        *("patch", "patch point", *(["host"] if hosts else []), "pid", "rank", "layers"),
        *("calls", "in graphs", "fell back", "why"),
    ):
        right = name in ("pid", "rank", "calls", "in graphs", "fell back")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for one in receipts:
        why = [f"{count:,}: {reason}" for reason, count in one.fallbacks.items()]
        table.add_row(
            Text(one.patch_id),
            Text(one.point),
            *([Text(one.host)] if hosts else []),
            str(one.pid),
            "" if one.rank is None else str(one.rank),
            Text("" if one.layers is None else str(one.layers)),
            f"{one.total_calls:,}",
            f"{sum(one.replayed.values()):,}",
            f"{sum(one.fallbacks.values()):,}",
            Text(one.failure, style="red") if one.failure else Text("\n".join(why)),
        )
    return table


def shapes_table(receipts: Sequence[Receipt]) -> Table:
    """Calls by kernel and shape, over all processes."""
    table = Table(title="calls by shape")
    table.add_column("kernel and shape")
    table.add_column("calls", justify="right")
    table.add_column("in graphs", justify="right")
    labels = dict.fromkeys(label for one in receipts for label in one.calls)
    for label in labels:
        calls = sum(one.calls.get(label, 0) for one in receipts)
        graphs = sum(one.replayed.get(label, 0) for one in receipts)
        table.add_row(Text(label), f"{calls:,}", f"{graphs:,}")
    return table


def proof_lines(proof: Proof) -> Iterator[Table | Text]:
    table = Table(title=Text(f"{proof.patch_id}: receipts against {proof.profile}"))
    for name in ("", "role", "launches", "/step", "finding", "kernel"):
        right = name in ("launches", "/step")
        table.add_column(name, justify="right" if right else "left", no_wrap=name == "kernel")
    for row in proof.rows:
        table.add_row(
            Text("ok", style="green") if row.passed else Text("fail", style="red"),
            Text(row.role),
            f"{row.launches:,}",
            "" if row.per_step is None else f"{row.per_step:.4g}",
            Text(row.said),
            Text(row.kernel[:60]),
        )
    yield table
    for problem in proof.problems:
        yield Text(problem, style="red")
