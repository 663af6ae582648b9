"""A profile as tables: the ranking, which is the coverage ledger, and two profiles compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from patcher.hotspot import Hotspot, Profile, ProfileComparison, ledger, shortened
from patcher.hotspot.profile import DeviceProfile
from patcher.visible import visible

TRIAGE = {
    "replace": ("replace", "green"),
    "fuse": ("fuse", "green"),
    "closed": ("closed", "yellow"),
    "configuration": ("configuration", "cyan"),
    "leave": ("leave", "dim"),
}
CHANGES = {"new": "cyan", "gone": "magenta", "faster": "green", "slower": "red", "same": "dim"}
CUT = "\N{HORIZONTAL ELLIPSIS}"
_WIDEST = 50
"""Characters of a name where the width is not known."""
_LEAST_NAME = 24
"""Characters that a name has before columns are left out for it."""
_KIND_MARKS = {"chain": "\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS} chain: ", "kernel": ""}


def profile_tables(
    profile: Profile, top: int | None, wide: bool = False
) -> Iterator[RenderableType]:
    """The ranking, then why, then what it is a ranking of; the same for each of several devices.

    Args:
        profile: the profile.
        top: rows to show; by default those that cover 95 % of the busy time.
        wide: show all columns and whole names.
    """
    covered = {row.rank for row in ledger(profile)} - {None}
    last = top or max((rank for rank in covered if rank is not None), default=0)
    shown = [spot for spot in profile.hotspots if spot.rank <= last]
    layered = bool(profile.layers and profile.steps)
    title = f"{profile.model}: {profile.source}"
    if profile.devices:
        title += f", {len(profile.devices)} devices added up"
    yield RankingTable(title, shown, profile.busy_ns is not None, layered, wide)
    yield _reasons(shown)
    for device in profile.devices:
        rows = [spot for spot in device.hotspots if spot.rank <= last]
        yield RankingTable(_device_title(device), rows, True, layered, wide)
    if profile.devices:
        yield _evenness(profile.devices)
    yield _summary(profile, shown)


def wide_columns(profile: Profile) -> int:
    """The columns of a terminal that whole names need."""
    return 150 + max((len(spot.name) for spot in profile.hotspots), default=0)


@dataclass(frozen=True)
class RankingTable:
    """A ranking that leaves out columns, the least telling first, rather than cut figures."""

    title: str
    spots: list[Hotspot]
    timed: bool
    layered: bool
    wide: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = {name: cells for name, cells in self._columns().items() if any(cells)}
        room = options.max_width
        widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
        for name in ("/layer", "sum", "80 % SOL", "wall", "/step", "of SOL", "mean us"):
            if self._room(widths, room) >= _LEAST_NAME or self.wide:
                break
            if len(widths) > 4:
                widths.pop(name, None)
        table = Table(title=Text(visible(self.title)), title_justify="left")
        for name in widths:
            table.add_column(name, justify="left" if name == "do" else "right", no_wrap=True)
        table.add_column("kernel, chain", no_wrap=True)
        names = self._names(max(self._room(widths, room), 8))
        for at, (spot, name) in enumerate(zip(self.spots, names, strict=True)):
            cells = [
                Text(columns[c][at], style=TRIAGE[spot.triage][1] if c == "do" else "")
                for c in widths
            ]
            table.add_row(*cells, Text(name, "" if spot.kind == "kernel" else "italic"))
        yield table

    @staticmethod
    def _room(widths: dict[str, int], room: int) -> int:
        """Characters left for the name: each column has two spaces and a line."""
        return room - sum(width + 3 for width in widths.values()) - 4

    def _names(self, width: int) -> list[str]:
        kernels = [spot.name for spot in self.spots if spot.kind == "kernel"]
        short = iter(kernels if self.wide else shortened(kernels, width))
        names = [
            next(short) if spot.kind == "kernel" else _KIND_MARKS.get(spot.kind, "") + spot.name
            for spot in self.spots
        ]
        if self.wide:
            return names
        return [name if len(name) <= width else name[: width - 1] + CUT for name in names]

    def _columns(self) -> dict[str, list[str]]:
        """The cells of each column but the name, in order."""
        spots = self.spots
        own = [spot.kind == "kernel" for spot in spots]
        shared = [spot.kind in ("kernel", "chain") for spot in spots]
        sums = accumulate(
            spot.share_pct if is_own else 0.0 for spot, is_own in zip(spots, own, strict=True)
        )
        pairs = list(zip(spots, shared, strict=True))
        return {
            "#": [str(spot.rank) for spot in spots],
            "busy" if self.timed else "share": [
                f"{spot.share_pct:.1f}%" if is_shared else "" for spot, is_shared in pairs
            ],
            "sum": [f"{s:.1f}%" if is_own else "" for s, is_own in zip(sums, own, strict=True)],
            "wall": [f"{spot.wall_pct or 0:.1f}%" if self.timed else "" for spot in spots],
            "/step": ["" if spot.per_step is None else f"{spot.per_step:.3g}" for spot in spots],
            "/layer": [_layers(spot.per_layer) if self.layered else "" for spot in spots],
            "mean us": [
                f"{spot.mean_ns / 1e3:.2f}" if is_shared else "" for spot, is_shared in pairs
            ],
            "of SOL": [_of_peak(spot) for spot in spots],
            "ceiling": [f"+{spot.ceiling_pct:.1f}%" for spot in spots],
            "80 % SOL": [
                "" if spot.reachable_pct is None else f"+{spot.reachable_pct:.1f}%"
                for spot in spots
            ],
            "do": [TRIAGE[spot.triage][0] for spot in spots],
        }


def _of_peak(spot: Hotspot) -> str:
    """The share of the speed of light; without it, the larger share of a peak that was measured."""
    if spot.sol_pct is not None:
        return f"{spot.sol_pct:.0f}%"
    peaks = [(spot.dram_pct, "DRAM"), (spot.sm_pct, "SM")]
    known = [(share, what) for share, what in peaks if share is not None]
    return "" if not known else f"{max(known)[0]:.0f}% {max(known)[1]}"


def _device_title(device: DeviceProfile) -> str:
    gpu = f", {device.gpu.name}" if device.gpu else ""
    return f"device {device.device}{f' = {device.label}' if device.label else ''}{gpu}"


def _evenness(devices: Sequence[DeviceProfile]) -> Table:
    """How evenly the devices worked."""
    table = Table(title="devices", title_justify="left")
    for name in ("device", "steps", "wall ms", "busy", "in collectives", "copies", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in devices:
        wall = device.wall_ns or 1
        idle = device.wall_ns - device.busy_ns - device.memory_ns
        parts = (device.busy_ns, device.collectives_ns, device.memory_ns, idle)
        table.add_row(
            str(device.device),
            str(device.steps or ""),
            f"{device.wall_ns / 1e6:,.3f}",
            *(f"{100 * part / wall:.1f}%" for part in parts),
        )
    return table


def ranking_text(profile: Profile, top: int) -> str:
    """The first rows as plain lines for a pipe or a narrow window, at most 100 columns wide."""
    busy = "share" if profile.busy_ns is None else "busy"
    lines = [f"{'#':>3} {busy:>6} {'mean us':>9} {'ceiling':>8}  {'do':13}  kernel, chain"]
    names = _short([spot.name for spot in profile.hotspots[:top]], "...")
    for spot, short in zip(profile.hotspots, names, strict=False):
        shared = spot.kind in ("kernel", "chain")
        cells = (
            f"{spot.rank:>3}",
            f"{f'{spot.share_pct:.1f}%' if shared else '':>6}",
            f"{f'{spot.mean_ns / 1e3:.2f}' if shared else '':>9}",
            f"{f'+{spot.ceiling_pct:.1f}%':>8}",
            f" {spot.triage:13}",
        )
        lines.append(f"{' '.join(cells)}  {'chain: ' if spot.kind == 'chain' else ''}{short}")
    left = len(profile.hotspots) - top
    if left > 0:
        lines.append(f"{left} smaller rows are in to_pandas()")
    return "\n".join(lines)


def _short(names: Sequence[str], cut: str = CUT) -> list[str]:
    """Names as far as they fit; those of chains and of idle time have no brackets and stay."""
    return [
        name if len(name) <= _WIDEST else short
        for name, short in zip(names, shortened(names, _WIDEST, cut), strict=True)
    ]


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
        each = (profile.wall_ns or 0) / profile.steps / max(len(profile.devices), 1) / 1e3
        phase = f"{profile.phase} " if profile.phase else ""
        plural = "" if profile.steps == 1 else "s"
        text.append(f"; {profile.steps} {phase}step{plural}")
        text.append(f", {each:,.0f} us each" if profile.wall_ns else "")
    if profile.gpu is not None and profile.gpu.name:
        text.append(f"; {profile.gpu.name}")
    if profile.bound is not None:
        text.append(f"\nbound by {profile.bound}: {profile.bound_pct:.1f} % of the wall time")
    if profile.window:
        text.append(f"\nranked: {profile.window}")
    left = len(profile.hotspots) - len(shown)
    if left:
        text.append(f"\n{left} smaller rows are not shown: use --top or --json")
    gain = "end-to-end gain if the row took no time (Amdahl)"
    if profile.ceiling_of == "kernel time":
        gain = (
            "gain in kernel time if the row took no time, not end to end: a summary has no wall "
            "time, of which kernels may be a small part"
        )
    text.append(
        f"\nceiling: {gain}; 80 % SOL: if it ran at 80 % of the speed of light, a chain being one "
        "kernel"
    )
    return text


def compare_table(found: ProfileComparison, top: int) -> Iterator[Table | Text]:
    title = f"{found.before} -> {found.after}, per {found.unit}"
    table = Table(title=title, title_justify="left")
    for name in ("change", "before us", "after us", "delta us", "delta", "launches"):
        table.add_column(name, justify="left" if name == "change" else "right")
    table.add_column("row", no_wrap=True)
    names = _short([row.name for row in found.rows[:top]])
    for row, short in zip(found.rows, names, strict=False):
        table.add_row(
            Text(row.change, style=CHANGES[row.change]),
            f"{row.before_ns / 1e3:,.2f}",
            f"{row.after_ns / 1e3:,.2f}",
            f"{row.delta_ns / 1e3:+,.2f}",
            "" if row.delta_pct is None else f"{row.delta_pct:+.1f}%",
            f"{row.before_launches:.4g} -> {row.after_launches:.4g}",
            Text(_KIND_MARKS.get(row.kind, "") + short),
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
