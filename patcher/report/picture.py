"""A profile as one picture that stands alone: the step's lanes above the ranked hotspots."""

from __future__ import annotations

from functools import cache
from importlib import resources

from patcher.hotspot import Profile
from patcher.report import charts, views, wording
from patcher.report.bars import bars
from patcher.report.lanes import lanes
from patcher.report.step import read_step, why_not
from patcher.report.svg import Canvas

_MARGIN = 24.0


def plot(profile: Profile, *, width: float = charts.WIDE) -> str:
    """An SVG document, light or dark as its reader prefers.

    Args:
        width: pixels without the margin; below 500 it is laid out for a phone.
    """
    rows, step = views.hotspot_rows(profile), read_step(profile)
    margin = 12.0 if width < 500 else _MARGIN
    parts = [_head(profile, width)]
    parts.append(lanes(step, width) if step else _note(why_not(profile), width))
    parts.append(bars(rows, width))
    gap = 20.0
    canvas = Canvas(width + 2 * margin, sum(part.height + gap for part in parts) - gap + 2 * margin)
    top = margin
    for part in parts:
        canvas.place(part, margin, top)
        top += part.height + gap
    about = f"{len(rows)} hotspots" + (
        f"; {len(step.launches)} launches in a step." if step else "."
    )
    return canvas.document(f"Profile of {wording.clip(profile.model, 120)}", about, _style())


def _head(profile: Profile, width: float) -> Canvas:
    canvas = Canvas(width, 38)
    canvas.text(0, 15, wording.clip(profile.model, int(width / 9.4)), "t title")
    parts = [profile.gpu.name if profile.gpu else None, profile.source]
    facts = ", ".join(part for part in parts if part)
    canvas.text(0, 34, wording.clip(facts, int(width / 6.4)), "t")
    return canvas


def _note(text: str, width: float) -> Canvas:
    """A paragraph, broken where it must be."""
    lines, room = [""], int((width - 24) / 6.4)
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    canvas = Canvas(width, 16 + 18 * len(lines))
    canvas.rect(0, 0, width, canvas.height, "lane", 6)
    for index, line in enumerate(lines):
        canvas.text(12, 20 + 18 * index, line, "t")
    return canvas


@cache
def _style() -> str:
    folder = resources.files("patcher.report")
    return "".join(
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("alone.css", "picture.css")
    )
