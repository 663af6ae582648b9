"""The hotspots of a profile in Markdown: the time of a step, and the triage of each row."""

from __future__ import annotations

from patcher.hotspot import Profile
from patcher.report import views, wording
from patcher.report.markup import code, plain, table
from patcher.report.step import Step, read_step, short, why_not

TOP_HOTSPOTS = 16
_BLOCKS = 20
"""Characters of the longest bar."""


def hotspots(profile: Profile | None) -> str:
    """The section, or nothing where there is no profile; a pull request shows no inline SVG."""
    rows = views.hotspot_rows(profile)
    if profile is None or not rows:
        return ""
    step = read_step(profile)
    parts = ["### Hotspots", _step(step) if step else plain(why_not(profile)), _ranking(rows)]
    chains = [row for row in rows if row.members]
    if chains:
        parts.append("\n".join(_chain(row) for row in chains))
    return "\n\n".join(parts)


def _step(step: Step) -> str:
    launches = sum(len(lane.launches) for lane in step.lanes)
    longest = max([lane.time_us for lane in step.lanes] + [step.gap_us])
    lanes = [(lane.operation, len(lane.launches), lane.time_us) for lane in step.lanes]
    found = [
        [
            plain(name),
            _bar(time, longest),
            wording.percent(100 * time / step.wall_us if step.wall_us else None, 1),
            wording.microseconds(time),
            wording.count(count) if count is not None else "",
        ]
        for name, count, time in [
            *lanes,
            ("idle or copies" if step.copies else "idle", None, step.gap_us),
        ]
    ]
    head = ["Operation", "", "Of the step", "Time", "Launches"]
    about = f"One decode step: {launches} launches in {wording.microseconds(step.wall_us)}."
    return f"{about}\n\n{table(head, found, '  rrr')}"


def _ranking(rows: list[views.HotspotRow]) -> str:
    shown = rows[:TOP_HOTSPOTS]
    longest = max(row.length_pct for row in shown)
    found = [
        [
            str(row.rank),
            _name(row),
            _bar(row.length_pct, longest),
            "" if row.kind in ("idle", "memory") else wording.percent(row.share_pct, 1),
            wording.percent(row.wall_pct, 1),
            wording.count(row.per_step),
            wording.microseconds(row.mean_us),
            wording.ceiling(row.ceiling_pct),
            wording.ceiling(row.reachable_pct),
            f"**{row.triage}**: {plain(wording.clip(row.reason, 160))}" if row.triage else "",
        ]
        for row in shown
    ]
    head = ["#", "Hotspot", "", "Of busy", "Of wall", "Per step", "Mean", "Ceiling", "Reachable"]
    text = table([*head, "Triage"], found, "r  rrrrrr ")
    left = len(rows) - len(shown)
    return f"{text}\n\n{left} smaller rows are left out." if left > 0 else text


def _name(row: views.HotspotRow) -> str:
    if row.kind != "kernel":
        return f"{plain(wording.clip(row.name, 90))} ({row.kind})"
    op = f" by op {code(row.op, 60)}" if row.op else ""
    return code(row.name, 90) + op


def _chain(row: views.HotspotRow) -> str:
    members = ", ".join(code(short(member), 60) for member in row.members)
    gap = f"; {wording.microseconds(row.gap_us)} idle inside" if row.gap_us else ""
    return f"- **{plain(wording.clip(row.name, 90))}**: {members}{gap}"


def _bar(value: float, longest: float) -> str:
    return "\N{FULL BLOCK}" * round(_BLOCKS * value / longest) if longest else ""
