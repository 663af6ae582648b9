"""What was measured, as the agents read it: the sweep against the roofline, and counters."""

from __future__ import annotations

from collections.abc import Callable

from patcher.bench import Evaluation, KernelCounters, Op, Sweep, Timing

MOST_KERNELS = 3
"""Of whose counters a prompt tells, the longest first."""


def timing_table(op: Op, sweep: Sweep, evaluation: Evaluation) -> str:
    """Timings as a Markdown table; bandwidth counts the bytes that any implementation must move.
    Columns of what was not measured are left out."""
    contract, timings = op.contract, evaluation.timings
    points = [contract.point_of(sweep, timing.axes) for timing in timings]
    moved = {id(t): contract.bytes_moved(p) for t, p in zip(timings, points, strict=True)}
    flops = {id(t): contract.flops(p) for t, p in zip(timings, points, strict=True)}
    columns: list[tuple[str, Callable[[Timing], str]]] = [
        ("point", lambda t: " ".join(f"{name}={size}" for name, size in t.axes.items())),
        ("candidate us", lambda t: f"{t.candidate_us:.2f}"),
        ("baseline us", lambda t: f"{t.baseline_us:.2f}"),
        (
            "speedup (95 % interval)",
            lambda t: f"{t.speedup:.3f} ({t.speedup_low:.3f} to {t.speedup_high:.3f})",
        ),
        ("candidate GB/s", lambda t: f"{moved[id(t)] / t.candidate_us / 1e3:.1f}"),
    ]
    if any(flops.values()):
        columns.append(("GFLOP/s", lambda t: f"{flops[id(t)] / t.candidate_us / 1e3:.1f}"))
    if any(timing.sol_pct is not None for timing in timings):
        columns.append(("of light", lambda t: _pct(t.sol_pct)))
    if any(timing.launch_pct is not None for timing in timings):
        columns.append(("of launch floor", lambda t: _pct(t.launch_pct)))
    if any(timing.candidate_cold_us is not None for timing in timings):
        columns += [
            ("cold us", lambda t: _us(t.candidate_cold_us)),
            ("baseline cold us", lambda t: _us(t.baseline_cold_us)),
        ]
    if any(timing.candidate_eager_us is not None for timing in timings):
        columns += [
            ("eager us", lambda t: _us(t.candidate_eager_us)),
            ("baseline eager us", lambda t: _us(t.baseline_eager_us)),
        ]
    rows = [
        "| " + " | ".join(name for name, _ in columns) + " |",
        "| --- |" + " ---: |" * (len(columns) - 1),
    ]
    rows += ["| " + " | ".join(cell(timing) for _, cell in columns) + " |" for timing in timings]
    return "\n".join(rows)


def roofline(op: Op, sweep: Sweep, evaluation: Evaluation) -> str:
    """What the columns mean and how far the speed of light is, in sentences."""
    timings = evaluation.timings
    said = []
    share = evaluation.sol_share
    if share is not None:
        said.append(
            "The speed of light is the time that the contract's bytes and arithmetic take at the "
            "rates measured on this machine. This candidate has a geometric mean of "
            f"{100 * share:.0f} % of it, so no kernel can score more than "
            f"{(evaluation.geomean_speedup or 0.0) / share:.2f}."
        )
    if timings:
        last = op.contract.point_of(sweep, timings[-1].axes)
        moved, flops = op.contract.bytes_moved(last), op.contract.flops(last)
        if moved:
            said.append(
                f"At the last point the contract moves {moved / 1024:,.0f} KiB and computes "
                f"{flops / moved:.2f} operations a byte."
            )
    if any(timing.candidate_cold_us is not None for timing in timings):
        said.append("Cold: with L2 overwritten before each call.")
    if any(timing.candidate_eager_us is not None for timing in timings):
        said.append("Eager: outside of a CUDA graph, with the launch. The score is neither.")
    return " ".join(said)


def counters_table(kernels: tuple[KernelCounters, ...]) -> str:
    """What Nsight Compute counted in the candidate's own kernels, as a Markdown table; empty
    without any."""
    if not kernels:
        return ""
    from patcher.bench.judge.counters import metrics  # it brings the toolchains

    shown = kernels[:MOST_KERNELS]
    names = [kernel.kernel.replace("|", "/")[:80] for kernel in shown]
    rows = [
        "| at the largest timed point, caches flushed | unit | " + " | ".join(names) + " |",
        "| --- | --- |" + " ---: |" * len(shown),
        "| grid x block | | " + " | ".join(f"{k.grid} x {k.block}" for k in shown) + " |",
        "| time | us | " + " | ".join(_us(k.duration_us) for k in shown) + " |",
    ]
    for metric in metrics():
        found = [kernel.values.get(metric.key) for kernel in shown]
        if any(found):
            unit = next(each.unit for each in found if each)
            cells = (f"{each.value:,.4g}" if each else "-" for each in found)
            rows.append(f"| {metric.means} | {unit} | " + " | ".join(cells) + " |")
    if len(kernels) > len(shown):
        rows.append(f"\n{len(kernels) - len(shown)} shorter kernels are left out.")
    return "\n".join(rows)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"
