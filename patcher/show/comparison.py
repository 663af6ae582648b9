"""An A/B for people: its interval, its verdict, and gains that were planted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from patcher.bench import Comparison

if TYPE_CHECKING:  # it imports torch
    from patcher.ab.decision import Decision
    from patcher.bench.ab.planted import PlantedGains

VERDICT_COLOURS = {"accept": "green", "reject": "red", "inconclusive": "yellow"}


def comparison_lines(name: str, comparison: Comparison) -> Text:
    text = Text(f"{name}: ")
    text.append(comparison.verdict, style=f"bold {VERDICT_COLOURS[comparison.verdict]}")
    text.append(
        f"  {comparison.gain_pct:+.2f} % "
        f"[{comparison.gain_low_pct:+.2f}, {comparison.gain_high_pct:+.2f}] at "
        f"{comparison.confidence_pct:.1f} %, margin {comparison.margin_pct:g} %, "
        f"{comparison.pairs} pairs (SD {comparison.pair_sd_pct:.2f} %); "
        f"{comparison.baseline_tokens_per_s:,.1f} -> {comparison.patched_tokens_per_s:,.1f} tok/s"
    )
    if comparison.order_effect_pct is not None:
        text.append(f"; order effect {comparison.order_effect_pct:+.2f} %, removed")
    return text


def planted_lines(gains: PlantedGains) -> list[Text]:
    """Each planted gain, whether it was found, and its interval."""
    lines = []
    for one in gains.planted:
        line = Text(f"planted {one.planted_pct:+.2f} % ({one.delay_us:.0f} us a step): ")
        line.append(one.found, style="bold green" if one.found == "found" else "bold red")
        if one.found == "not found" and one.pairs_needed is not None:
            line.append(f"; at this spread it takes about {one.pairs_needed:,} pairs")
        line.append("" if one.holds else "; its interval does not contain it")
        lines += [line, comparison_lines("  measured", one.comparison)]
    return lines


def decision_lines(decision: Decision, label: str = "verdict") -> list[Text]:
    colour = VERDICT_COLOURS[decision.verdict]
    lines = [Text(f"{label}: {decision.verdict}", style=f"bold {colour}")]
    return lines + [Text(f"  - {reason}") for reason in decision.reasons]
