"""What test_report_lanes and others share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from patcher.hotspot import Profile
from patcher.hotspot.rank import build_profile
from patcher.hotspot.readers.sqlite import read_sqlite


@cache
def decode() -> Profile:
    data = Path(__file__).parents[1] / "data/nsys/decode.sqlite"
    return build_profile(read_sqlite(data), "gpt-oss-20b")


def without_times() -> Profile:
    """A profile from a summary: no busy time, no wall time, no steps."""
    bare = {"exposed_ns": None, "wall_pct": None, "per_step": None}
    return decode().model_copy(
        update={
            "step": (),
            "steps": None,
            "busy_ns": None,
            "wall_ns": None,
            "hotspots": tuple(
                spot.model_copy(update=bare) for spot in decode().hotspots if spot.kind == "kernel"
            ),
        }
    )
