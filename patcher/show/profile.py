"""A profile as tables: the ranking, which is the coverage ledger, and two profiles compared."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from patcher.hotspot import Hotspot, Profile, ProfileComparison, ledger

TRIAGE = {
    "replace": ("replace", "green"),
    "fuse": ("fuse", "green"),
    "closed": ("closed", "yellow"),
    "configuration": ("configuration", "cyan"),
    "leave": ("leave", "dim"),
}
CHANGES = {"new": "cyan", "gone": "magenta", "faster": "green", "slower": "red", "same": "dim"}
_WIDEST = 50
_KIND_MARKS = {"chain": "\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS} chain: ", "kernel": ""}


def profile_tables(profile: Profile, top: int | None) -> Iterator[Table | Text]:
    """The ranking, then why, then what it is a ranking of."""
    covered = {row.rank for row in ledger(profile)} - {None}
    last = top or max((rank for rank in covered if rank is not None), default=0)
    shown = [spot for spot in profile.hotspots if spot.rank <= last]
    yield _ranking(profile, shown)
    yield _reasons(shown)
    yield _summary(profile, shown)


def _ranking(profile: Profile, shown: list[Hotspot]) -> Table:
    timed = profile.busy_ns is not None
    table = Table(title=f"{profile.model}: {profile.source}", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("busy" if timed else "share", justify="right")
    table.add_column("sum", justify="right")
    if timed:
        table.add_column("wall", justify="right")
    table.add_column("/step", justify="right")
    if profile.layers and profile.steps:
        table.add_column("/layer", justify="right")
    table.add_column("mean us", justify="right")
    table.add_column("of SOL", justify="right")
    table.add_column("ceiling", justify="right")
    table.add_column("80 % SOL", justify="right")
    table.add_column("do")
    table.add_column("kernel, chain", no_wrap=True)
    reached = 0.0
    for spot in shown:
        own = spot.kind == "kernel"
        reached += spot.share_pct if own else 0.0
        cells = [
            str(spot.rank),
            f"{spot.share_pct:.1f}%" if spot.kind in ("kernel", "chain") else "",
        ]
        cells += [f"{reached:.1f}%" if own else ""]
        cells += [f"{spot.wall_pct or 0:.1f}%"] if timed else []
        cells += [
            "" if spot.per_step is None else f"{spot.per_step:.3g}",
            *([_layers(spot.per_layer)] if profile.layers and profile.steps else []),
            f"{spot.mean_ns / 1e3:.2f}" if own or spot.kind == "chain" else "",
            "" if spot.sol_pct is None else f"{spot.sol_pct:.0f}%",
            f"+{spot.ceiling_pct:.1f}%",
            "" if spot.reachable_pct is None else f"+{spot.reachable_pct:.1f}%",
        ]
        word, style = TRIAGE[spot.triage]
        name = Text(_KIND_MARKS.get(spot.kind, "") + _short(spot.name), "" if own else "italic")
        table.add_row(*cells, Text(word, style=style), name, style=None)
    return table


def ranking_text(profile: Profile, top: int) -> str:
    """The first rows as plain lines for a pipe or a narrow window, at most 100 columns wide."""
    busy = "share" if profile.busy_ns is None else "busy"
    lines = [f"{'#':>3} {busy:>6} {'mean us':>9} {'ceiling':>8}  {'do':13}  kernel, chain"]
    for spot in profile.hotspots[:top]:
        shared = spot.kind in ("kernel", "chain")
        cells = (
            f"{spot.rank:>3}",
            f"{f'{spot.share_pct:.1f}%' if shared else '':>6}",
            f"{f'{spot.mean_ns / 1e3:.2f}' if shared else '':>9}",
            f"{f'+{spot.ceiling_pct:.1f}%':>8}",
            f" {spot.triage:13}",
        )
        name = ("chain: " if spot.kind == "chain" else "") + _short(spot.name, "...")
        lines.append(f"{' '.join(cells)}  {name}")
    left = len(profile.hotspots) - top
    if left > 0:
        lines.append(f"{left} smaller rows are in to_pandas()")
    return "\n".join(lines)


def _short(name: str, cut: str = "\N{HORIZONTAL ELLIPSIS}") -> str:
    """As much as tells it apart; the whole name is in the JSON."""
    name = name.removeprefix("void ")
    return name if len(name) <= _WIDEST else name[: _WIDEST - len(cut)] + cut


def _layers(per_layer: float | None) -> str:
    return "" if per_layer is None or per_layer < 0.1 else f"{per_layer:.2g}"


def _reasons(shown: list[Hotspot]) -> Table:
    """One sentence a row, alike sentences once."""
    said: dict[tuple[str, str], list[int]] = {}
    for spot in shown:
        said.setdefault((spot.triage, spot.reason), []).append(spot.rank)
    table = Table(title="why", title_justify="left", show_header=False, box=None)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for (triage, reason), ranks in said.items():
        word, style = TRIAGE[triage]
        table.add_row(", ".join(map(str, ranks)), Text(word, style=style), Text(reason))
    return table


def _summary(profile: Profile, shown: list[Hotspot]) -> Text:
    text = Text()
    instances = sum(kernel.instances for kernel in profile.kernels)
    text.append(f"{profile.total_kernel_ns:,} ns over {instances:,} kernels")
    if profile.busy_ns is not None:
        rows = sum(spot.exposed_ns or 0 for spot in profile.hotspots if spot.kind == "kernel")
        text.append(f"; busy {profile.busy_ns:,} ns, which the kernel rows add up to ({rows:,} ns)")
    if profile.wall_ns is not None:
        text.append(f"; wall {profile.wall_ns:,} ns")
    if profile.steps:
        step = f", {profile.wall_ns / profile.steps / 1e3:,.0f} us each" if profile.wall_ns else ""
        text.append(f"; {profile.steps} steps{step}")
    if profile.gpu is not None:
        text.append(f"; {profile.gpu.name}")
    if profile.window:
        text.append(f"\nranked: {profile.window}")
    left = len(profile.hotspots) - len(shown)
    if left:
        text.append(f"\n{left} smaller rows are not shown: use --top or --json")
    text.append(
        "\nceiling: end-to-end gain if the row took no time (Amdahl); 80 % SOL: if it ran at 80 % "
        "of the speed of light, a chain being one kernel"
    )
    return text


def compare_table(found: ProfileComparison, top: int) -> Iterator[Table | Text]:
    title = f"{found.before} -> {found.after}, per {found.unit}"
    table = Table(title=title, title_justify="left")
    for name in ("change", "before us", "after us", "delta us", "delta", "launches"):
        table.add_column(name, justify="left" if name == "change" else "right")
    table.add_column("row", no_wrap=True)
    for row in found.rows[:top]:
        table.add_row(
            Text(row.change, style=CHANGES[row.change]),
            f"{row.before_ns / 1e3:,.2f}",
            f"{row.after_ns / 1e3:,.2f}",
            f"{row.delta_ns / 1e3:+,.2f}",
            "" if row.delta_pct is None else f"{row.delta_pct:+.1f}%",
            f"{row.before_launches:.4g} -> {row.after_launches:.4g}",
            Text(_KIND_MARKS.get(row.kind, "") + _short(row.name)),
        )
    yield table
    yield _totals(found)
    for op in found.ops:
        yield Text(op.said, style="green" if op.patched and op.gone else "")


def _totals(found: ProfileComparison) -> Text:
    busy = f"busy {found.before_busy_ns / 1e3:,.1f} -> {found.after_busy_ns / 1e3:,.1f} us"
    change = 100 * (found.after_busy_ns / found.before_busy_ns - 1) if found.before_busy_ns else 0.0
    text = Text(f"{busy} ({change:+.2f} %)")
    if found.before_wall_ns and found.after_wall_ns:
        change = 100 * (found.after_wall_ns / found.before_wall_ns - 1)
        text.append(
            f"; wall {found.before_wall_ns / 1e3:,.1f} -> {found.after_wall_ns / 1e3:,.1f} us "
            f"({change:+.2f} %)"
        )
    return text
