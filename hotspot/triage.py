"""Decide what to do about a hotspot, by the rules of `advice.toml`."""

from __future__ import annotations

import re
from typing import Any

from patcher.hotspot.bound import Bound
from patcher.hotspot.profile import Hotspot, Triage
from patcher.hotspot.rules import rules


def triage(
    spot: Hotspot, chain: str | None = None, bound: Bound | None = None
) -> tuple[Triage, str]:
    """Decide what to do about a row.

    Args:
        spot: the row.
        chain: name of the fusion chain that holds most of the row's time, if there is one.
        bound: the longest part of the wall time; None in a summary.

    Returns:
        (decision, its reason in one sentence).
    """
    rule = next(rule for rule in rules("advice")["triage"] if _fits(rule, spot, chain, bound))
    whole = "" if spot.wall_pct is not None else " of kernel time"
    return rule["decision"], rule["reason"].format(
        name=spot.name,
        operation=spot.operation,
        share=f"{spot.share_pct:.1f} %",
        wall=f"{spot.wall_pct or 0:.1f} %",
        ceiling=f"+{spot.ceiling_pct:.2g} %{whole}",
        bound=bound.by if bound else "kernels",
        bound_share=f"{bound.pct if bound else 100.0:.1f} %",
        sol=f"{spot.sol_pct or 0:.0f} %",
        op=spot.op or spot.as_one or spot.instead,
        refusal=spot.refusal,
        points=f" ({', '.join(spot.patch_points)})" if spot.patch_points else "",
        gap=f"{spot.gap_ns / max(spot.instances, 1) / 1e3:.1f} us",
        launches=round(sum(v.instances for v in spot.variants) / max(spot.instances, 1)),
        per_layer=" per layer" if (spot.per_layer or 0) >= 0.9 else " each time",
        chain=chain,
    )


def _fits(rule: dict[str, Any], spot: Hotspot, chain: str | None, bound: Bound | None) -> bool:
    if rule.get("kind", spot.kind) != spot.kind or ("kind" not in rule and _without_source(spot)):
        return False
    if "bound" in rule and (bound is None or bound.by != rule["bound"]):
        return False
    texts = (("origin", spot.origin), ("operation", spot.operation), ("name", spot.name))
    if any(key in rule and not re.search(rule[key], text[:4000]) for key, text in texts):
        return False
    required = (
        ("covered", spot.op),
        ("replaced", spot.instead),
        ("refused", spot.refusal or None),
        ("chained", chain),
        ("as_one", spot.as_one),
    )
    if any(rule.get(key) and value is None for key, value in required):
        return False
    bounds = (
        ("wall_pct", spot.wall_pct or 0.0),
        ("ceiling_pct", spot.ceiling_pct),
        ("sol_pct", spot.sol_pct or 0.0),
    )
    return all(
        value >= rule.get(f"min_{key}", value) and value <= rule.get(f"max_{key}", value)
        for key, value in bounds
    )


def _without_source(spot: Hotspot) -> bool:
    return spot.kind in ("idle", "memory")
