"""What test_elsewhere and others share."""

from __future__ import annotations

from report_sample import comparison

from patcher.ab.other_workloads import OtherPoint, OtherWorkloads


def at(gain: float, half: float = 0.3, pairs: int = 12) -> OtherWorkloads:
    point = OtherPoint(batch=64, context=4096, comparison=comparison(gain, half, pairs))
    return OtherWorkloads(points=(point,))
