"""A step's ledger as tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from patcher.hotspot import StepLedger, shortened
from patcher.hotspot.step_record import KernelAnswer

STATUS_STYLES = {
    "closed": "green",
    "infeasible": "yellow",
    "untried": "cyan",
    "unexplained": "red",
    "yes": "green",
    "no": "dim",
    "unknown": "red",
}
_NAME = 26
"""Characters of a kernel's name in the table, and of a neighbour's in a reason."""


def ledger_tables(ledger: StepLedger, title: str) -> Iterator[RenderableType]:
    """The roles against their floors, the kernels with their answers, then why, and the total."""
    yield _roles(ledger, title)
    yield _reasons([(row.title, row.status, row.reason) for row in ledger.roles])
    names = shortened([kernel.name for kernel in ledger.kernels], _NAME)
    yield _kernels(ledger, names)
    yield _answers("faster", [(k.faster, k.faster_reason) for k in ledger.kernels])
    yield _answers("fusible", [(k.fusible, _beside(ledger, k)) for k in ledger.kernels])
    yield Text("\n".join(ledger.sentences()))


def batches_table(ledgers: Sequence[StepLedger]) -> Table:
    """The steps of one model at several batches beside each other."""
    table = Table(title="the step at each batch", title_justify="left")
    for name in ("batch", "step us", "floor us", "of light", "launches"):
        table.add_column(name, justify="right", no_wrap=True)
    for ledger in ledgers:
        table.add_row(
            str(ledger.batch),
            f"{ledger.step_ns / 1e3:,.0f}",
            "" if ledger.floor_ns is None else f"{ledger.floor_ns / 1e3:,.0f}",
            "" if ledger.sol_pct is None else f"{ledger.sol_pct:.0f}%",
            f"{ledger.launches:.0f}",
        )
    return table


def _roles(ledger: StepLedger, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("role", "MB", "floor us", "us", "gap us", "of floor", "gap"):
        left = name in ("role", "gap")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in ledger.roles:
        table.add_row(
            row.title,
            f"{row.bytes / 1e6:,.0f}" if row.bytes else "",
            "" if row.floor_ns is None else f"{row.floor_ns / 1e3:,.0f}",
            f"{row.measured_ns / 1e3:,.0f}",
            "" if row.gap_ns is None else f"{row.gap_ns / 1e3:,.0f}",
            "" if row.sol_pct is None else f"{row.sol_pct:.0f}%",
            Text(row.status, style=STATUS_STYLES[row.status]),
        )
    gap = None if ledger.floor_ns is None else ledger.step_ns - ledger.floor_ns
    table.add_section()
    table.add_row(
        "step",
        f"{ledger.bytes / 1e6:,.0f}",
        "" if ledger.floor_ns is None else f"{ledger.floor_ns / 1e3:,.0f}",
        f"{ledger.step_ns / 1e3:,.0f}",
        "" if gap is None else f"{gap / 1e3:,.0f}",
        "" if ledger.sol_pct is None else f"{ledger.sol_pct:.0f}%",
        "",
    )
    return table


def _kernels(ledger: StepLedger, names: Sequence[str]) -> Table:
    table = Table(title="kernels of 0.5 % of the step and more", title_justify="left")
    for name in ("#", "step", "us", "runs", "faster?", "fusible?", "kernel"):
        left = name in ("faster?", "fusible?", "kernel")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for number, (kernel, name) in enumerate(zip(ledger.kernels, names, strict=True), 1):
        table.add_row(
            str(number),
            f"{kernel.share_pct:.1f}%",
            f"{kernel.step_ns / 1e3:,.0f}",
            f"{kernel.launches:.3g}",
            Text(kernel.faster, style=STATUS_STYLES[kernel.faster]),
            Text(kernel.fusible, style=STATUS_STYLES[kernel.fusible]),
            Text(name),
        )
    return table


def _answers(question: str, said: Sequence[tuple[str, str]]) -> Table:
    numbers: dict[tuple[str, str], list[str]] = {}
    for number, answer in enumerate(said, 1):
        numbers.setdefault(answer, []).append(str(number))
    return _reasons(
        [(f"{question}? {', '.join(each)}", *answer) for answer, each in numbers.items()]
    )


def _reasons(said: Sequence[tuple[str, str, str]]) -> Table:
    """One sentence a line, alike sentences once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for what, status, reason in said:
        groups.setdefault((status, reason), []).append(what)
    table = Table(show_header=False, box=None)
    for (status, reason), each in groups.items():
        style = STATUS_STYLES[status]
        table.add_row(Text.assemble(f"{', '.join(each)}: ", (status, style), f": {reason}"))
    return table


def _beside(ledger: StepLedger, kernel: KernelAnswer) -> str:
    """The reason with the kernels that it would be one with: by number, if they have one."""
    if not kernel.neighbours:
        return kernel.fusible_reason
    numbers = {each.name: number for number, each in enumerate(ledger.kernels, 1)}
    group = [*kernel.neighbours, *([kernel.name] if kernel.in_chain else [])]
    listed = sorted(numbers[name] for name in group if name in numbers)
    others = sorted(name for name in group if name not in numbers)
    named = [*map(str, listed), *shortened(others, _NAME)]
    return f"{kernel.fusible_reason}: {', '.join(named)}"
