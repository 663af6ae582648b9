"""Subtract two runs: one of N tokens minus one of M tokens leaves N - M decode steps."""

from __future__ import annotations

from patcher.bench import UsageError
from patcher.hotspot.names import normalise
from patcher.hotspot.profile import ProfileWarning
from patcher.hotspot.recording import Recording, SummaryRow


def subtract(longer: Recording, shorter: Recording) -> Recording:
    """Subtract the kernels of the shorter run from those of the longer one.

    Loading, warm-up and graph capture run equally often in both, so they cancel.

    Raises:
        UsageError: nothing is left, or the second run is the longer one.
    """
    fewer = _by_name(shorter)
    rows = []
    less = 0
    for name, row in _by_name(longer).items():
        known = fewer.get(name, SummaryRow(row.name, 0, 0))
        instances, total = row.instances - known.instances, row.total_ns - known.total_ns
        if instances > 0 and total > 0:
            rows.append(SummaryRow(row.name, instances, total))
        elif instances < 0:
            less += 1
    if not rows or less > len(rows):
        raise UsageError(
            f"{longer.source} does not hold more work than {shorter.source}",
            "pass the run with more tokens to --from and the one with fewer to --minus",
        )
    note = (
        f"the difference of two runs: {longer.source} minus {shorter.source}; it has no times, so "
        "busy time and idle time are unknown"
    )
    warnings = (*longer.warnings, ProfileWarning(kind="difference", message=note))
    return Recording(
        source=f"{longer.source} minus {shorter.source}",
        rows=tuple(rows),
        gpu=longer.gpu,
        warnings=warnings,
    )


def _by_name(recording: Recording) -> dict[str, SummaryRow]:
    """Rows by normalised name, since two sources may spell a kernel differently."""
    rows: dict[str, SummaryRow] = {}
    for row in _rows(recording):
        key = normalise(row.name)
        known = rows.get(key, SummaryRow(row.name, 0, 0))
        rows[key] = SummaryRow(
            known.name, known.instances + row.instances, known.total_ns + row.total_ns
        )
    return rows


def _rows(recording: Recording) -> tuple[SummaryRow, ...]:
    if recording.launches is None:
        return recording.rows
    from patcher.hotspot.stats import of_launches

    kernels = of_launches(recording.launches, recording.launches.end - recording.launches.start)
    return tuple(SummaryRow(k.name, k.instances, k.total_ns) for k in kernels)
