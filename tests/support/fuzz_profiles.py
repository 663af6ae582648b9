"""What holds of every profile, whatever it was read from."""

from __future__ import annotations

import io
import json
import re
from typing import Any

from rich.console import Console

from patcher.hotspot import Profile
from patcher.report import plot
from patcher.show.profile import profile_tables

UNCLEAN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066\ud800-\udfff]")


def check_profile(profile: Profile, *, drawn: bool) -> None:
    """Check that its figures add up and are possible, and where `drawn` what is shown of it."""
    written = profile.model_dump_json()
    _check_figures(profile, json.loads(written, parse_constant=_no_number))
    if drawn:
        screen = io.StringIO()
        Console(width=80, file=screen).print(*profile_tables(profile, 9))
        Console(width=999, file=screen).print(*profile_tables(profile, 9, wide=True))
        for shown in (screen.getvalue(), plot(profile), written):
            assert not UNCLEAN.search(shown)


def _check_figures(profile: Profile, written: dict[str, Any]) -> None:
    assert profile.total_kernel_ns == sum(kernel.total_ns for kernel in profile.kernels)
    assert all(kernel.instances > 0 and kernel.total_ns >= 0 for kernel in profile.kernels)
    rows = [spot for spot in profile.hotspots if spot.kind == "kernel"]
    if profile.busy_ns is not None and profile.wall_ns is not None:
        assert 0 <= profile.busy_ns <= profile.total_kernel_ns
        assert profile.busy_ns + (profile.memory_ns or 0) <= profile.wall_ns
        assert sum(spot.exposed_ns or 0 for spot in rows) == profile.busy_ns
    assert sum(spot.instances for spot in rows) == sum(k.instances for k in profile.kernels)
    for name in ("total_kernel_ns", "busy_ns", "wall_ns"):
        parts = [getattr(device, name) for device in profile.devices]
        assert not parts or sum(parts) == getattr(profile, name)
    for spot in written["hotspots"]:
        shares = [spot[name] for name in ("share_pct", "wall_pct", "sol_pct") if spot[name]]
        assert all(0 <= share <= 100.001 for share in shares), shares
        assert spot["ceiling_pct"] >= 0


def _no_number(said: str) -> None:
    raise AssertionError(f"{said} in a profile")
