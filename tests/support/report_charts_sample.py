"""What test_report_charts and others share."""

from __future__ import annotations

import re

from patcher.report.svg import Canvas


def inside(canvas: Canvas) -> str:
    """Every coordinate of the drawing is finite and inside its box."""
    drawing = canvas.render("x", "title", "description", "wide")
    assert "nan" not in drawing
    assert "inf" not in drawing
    for name, limit in (("x", canvas.width), ("y", canvas.height)):
        for value in re.findall(rf' (?:c?{name}|{name}[12])="(-?[\d.]+)"', drawing):
            assert -1 <= float(value) <= limit + 1
    return drawing
