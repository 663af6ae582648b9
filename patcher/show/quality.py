"""Quality and clocks of an end-to-end A/B, for people."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from patcher.bench import Quality, Throughput
from patcher.bench.ab.records import LogitError, TaskScore
from patcher.bench.ab.window_clocks import arm_clocks, dropped, power_capped


def quality_lines(quality: Quality) -> list[Text | Table]:
    """Verdict, then each rung with the floor it is held against."""
    style = "green" if quality.passed else "red"
    lines: list[Text | Table] = [Text(f"quality: {quality.reason}", style=style)]
    if quality.floor is None or quality.between is None:  # recorded before there was one
        return lines
    lines.append(_logits_table(quality, quality.floor, quality.between))
    if _is_zero(quality.floor):
        lines.append(Text("  two runs of the baseline are bit-identical, so the A/A floor is zero"))
    flips = quality.between.flips
    told = f"  greedy picks differ at {flips} of {quality.positions} positions"
    if quality.prompts is not None:
        told += f" after {quality.prompts}"
    if flips and quality.worst_flip_margin is not None:
        told += (
            f": {quality.near_tie_flips} near ties, largest margin "
            f"{quality.worst_flip_margin:.3g} of {quality.flip_allowance:.3g} allowed"
        )
    lines.append(Text(told))
    if quality.near_ties is not None:
        share = 100 * quality.near_ties / quality.positions
        lines.append(
            Text(
                f"  the baseline's two largest logits are as near as their errors at "
                f"{quality.near_ties} of {quality.positions} positions ({share:.1f} %): near ties"
            )
        )
    lines.append(_task_line(quality.task, quality.task_refusal))
    return lines


def clock_lines(throughput: Throughput) -> list[Text]:
    """Locked or monitored, and the pairs that were dropped for it."""
    lines = [Text(f"clocks: {throughput.clocks}")]
    if reasons := dropped(throughput.windows):
        told = ", ".join(f"{count} {why}" for why, count in reasons.items())
        lines.append(Text(f"  pairs dropped because of their clocks: {told}", style="yellow"))
    if power_capped(throughput.windows):
        told = ", ".join(f"{arm} {mhz:.0f}" for arm, mhz in arm_clocks(throughput.windows).items())
        lines.append(
            Text(
                f"  this workload runs at the GPU's power cap; mean SM clock in MHz: {told}",
                "yellow",
            )
        )
    return lines


def _logits_table(quality: Quality, floor: LogitError, between: LogitError) -> Table:
    table = Table(title=f"logits at {quality.positions} positions, against {quality.reference}")
    for name in ("", "RMSE", "largest", "mean KL", "99 % KL", "largest KL"):
        table.add_column(name, justify="left" if name == "" else "right")

    def row(name: str, *figures: float | None) -> None:
        table.add_row(name, *("-" if each is None else f"{each:.3g}" for each in figures))

    row(
        "baseline",
        quality.baseline_rmse,
        quality.baseline_max_error,
        quality.baseline_mean_kl,
        quality.baseline_p99_kl,
        quality.baseline_max_kl,
    )
    if quality.alone is not None:
        one = quality.alone
        figures = one.rmse, one.max_error, one.mean_kl, one.p99_kl, one.max_kl
        row("baseline, each sequence alone", *figures)
    row(
        "patched",
        quality.patched_rmse,
        quality.patched_max_error,
        quality.patched_mean_kl,
        quality.patched_p99_kl,
        quality.patched_max_kl,
    )
    for name, error in (("baseline again - baseline", floor), ("patched - baseline", between)):
        row(name, error.rmse, error.max_error, error.mean_kl, error.p99_kl, error.max_kl)
    return table


def _is_zero(error: LogitError) -> bool:
    return error.max_error == 0 and error.flips == 0


def _task_line(task: TaskScore | None, refusal: str | None) -> Text:
    if task is None:
        return Text(f"  no task score: {refusal or 'not measured'}")
    interval = f"[{task.difference_low_pct:+.1f}, {task.difference_high_pct:+.1f}] points"
    style = "" if task.passed else "red"
    return Text(f"  task: {task.reason}; patched - baseline {interval}", style=style)
