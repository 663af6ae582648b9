"""Hardware counters of a candidate's kernels by Nsight Compute, as input for the next candidate.

The candidate is called a few times to warm up (just-in-time compilers, autotuning), and then under
the profiler. Caches are flushed before each kernel and clocks are not locked (ncu's
`--clock-control none`), so verdicts never use these values.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import statistics
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from patcher.bench.errors import MissingError, UsageError
from patcher.bench.judge import tools
from patcher.bench.judge.evaluation import Counter, Evaluation, KernelCounters
from patcher.bench.machine.installed import find_ncu
from patcher.bench.ops.candidate import Candidate
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import load_op
from patcher.bench.records import Record
from patcher.bench.toolchains import Built, build

WARM, CALLS = 3, 3
_DURATION = "gpu__time_duration.sum"
_MOST_LAUNCHES = 60
_ROUNDS = 6
"""Most attempts: ncu stops at an unknown metric, and is then run again without it."""
_UNKNOWN = re.compile(r"==ERROR== Failed to find metric (?:regex:\^?)?([\w.]+)")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3}){1,8}|\d{1,25})(?:\.\d{1,25})?(?:[eE][+-]?\d\d?)?")
_DENIED = "ERR_NVGPUCTRPERM"


class Metric(Record):
    """One metric to collect."""

    key: str
    """Key in `KernelCounters.values`."""
    means: str
    """What the metric says."""
    names: tuple[str, ...]
    """Names of the metric in versions of ncu, tried in order."""


@cache
def metrics() -> tuple[Metric, ...]:
    """The metrics of `counters.toml`."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return tuple(Metric.model_validate(each) for each in tomllib.loads(text)["metrics"])


def counters(
    candidate: Candidate,
    built: Built,
    point: Point,
    *,
    device: str = "cuda",
    libraries: bool = False,
    limit_s: float = tools.LIMIT_S,
    memory_bytes: int = 16 << 30,
) -> list[KernelCounters]:
    """Collect counters of the kernels that a call launches.

    Args:
        candidate: the source.
        built: its build.
        point: axes and dtypes of the call.
        device: `cuda`.
        libraries: include kernels of libraries (PyTorch, cuBLAS, ...), labelled.
        limit_s: time limit in seconds.
        memory_bytes: limit on host memory in bytes.

    Returns:
        One record per kernel and size, by descending total time; empty if no kernel qualifies.

    Raises:
        MissingError: ncu is not installed, or cannot or may not read counters on this machine.
        UsageError: the candidate fails under ncu.
    """
    ncu = require_ncu()
    op = load_op(candidate.op)
    calls = (tools.Call.of(op, point, seed=0),)
    job = tools.ToolJob(device, built, op.name, calls, warm=WARM, repeat=CALLS)
    wanted = {metric.key: metric.names for metric in metrics()}
    for turn in range(_ROUNDS):
        names = [names[0] for names in wanted.values() if names]
        ran = tools.run(ncu, _options(names), job, limit_s=limit_s, memory_bytes=memory_bytes)
        unknown = set(_UNKNOWN.findall(f"{ran.log}\n{ran.printed}"))
        fewer = {
            key: names[1:] if names and _is_named(names[0], unknown) else names
            for key, names in wanted.items()
        }
        if fewer != wanted and turn + 1 < _ROUNDS:
            wanted = fewer
            continue
        kernels = read(ran.log, {names[0]: key for key, names in wanted.items() if names})
        if not kernels:
            _explain(ran)
        chosen = [kernel for kernel in kernels if libraries or kernel.library is None]
        return sorted(chosen, key=lambda kernel: -(kernel.duration_us or 0) * kernel.launches)
    raise AssertionError("a round always ends it")


def counted(candidate: Candidate, evaluation: Evaluation, sweep: str | None = None) -> Evaluation:
    """Add counters at the largest sweep point to the evaluation of a correct candidate."""
    if not evaluation.right:
        return evaluation
    op = load_op(candidate.op)
    point = op.sweep("cuda", sweep).points()[-1]
    kernels = counters(candidate, build(candidate, op.contract), point)
    return evaluation.model_copy(update={"counters": tuple(kernels)})


def require_ncu() -> Path:
    """Path of ncu.

    Raises:
        MissingError: ncu is not installed.
    """
    ncu = find_ncu()
    if ncu is None:
        raise MissingError(
            "Nsight Compute (ncu), which reads counters, is not here",
            "install it (it is part of the CUDA toolkit), put ncu on PATH, or set PATCHER_NCU",
        )
    return ncu


def read(text: str, keys: dict[str, str]) -> list[KernelCounters]:
    """Parse ncu's raw page in base units (`--page raw --csv --print-units base`).

    Args:
        text: ncu's output. An invalid or truncated page gives the rows that could be parsed.
        keys: our keys by ncu's names of the metrics.

    Returns:
        One record per kernel and size, with the mean over its launches.
    """
    launches: dict[tuple[str, str, str], list[dict[str, tuple[float, str]]]] = {}
    for row in _rows(text):
        cells = {name: value for name, (cell, unit) in row.items() if (value := _value(cell, unit))}
        name, grid, block = (row.get(key, ("", ""))[0] for key in _IDENTITY)
        if name:
            launches.setdefault((name, grid, block), []).append(cells)
    merged = []
    for (name, grid, block), each in launches.items():
        values = {}
        for metric, key in keys.items():
            known = [cells[metric] for cells in each if metric in cells]
            if known:
                mean = statistics.fmean(value for value, _ in known)
                values[key] = Counter(value=mean, unit=known[0][1], metric=metric)
        times = [cells[_DURATION][0] for cells in each if _DURATION in cells]
        merged.append(
            KernelCounters(
                kernel=name[:2000],
                library=tools.library_of(name),
                grid=grid,
                block=block,
                launches=len(each),
                duration_us=statistics.fmean(times) / 1e3 if times else None,
                values=values,
            )
        )
    return merged


_IDENTITY = ("Kernel Name", "Grid Size", "Block Size")


def _rows(text: str) -> Iterable[dict[str, tuple[str, str]]]:
    """Yield each launch as (cell, unit) by column."""
    start = re.search(r'^"ID","Process ID",', text, re.MULTILINE)
    if start is None:
        return
    rows = csv.reader(io.StringIO(text[start.start() :], newline=""))
    try:
        header, units = next(rows), next(rows)
        if len(units) != len(header):
            return
        for row in itertools.islice(rows, 2 * _MOST_LAUNCHES):
            if len(row) == len(header) and row[0].isdigit():
                yield {
                    name: (cell, unit) for name, cell, unit in zip(header, row, units, strict=True)
                }
    except (csv.Error, StopIteration):
        return


def _value(cell: str, unit: str) -> tuple[float, str] | None:
    """Value and unit of a cell; None if it is no number (`n/a`, a list). Durations are in ns."""
    return (float(cell.replace(",", "")), unit) if _NUMBER.fullmatch(cell) else None


def _is_named(name: str, unknown: set[str]) -> bool:
    """Whether ncu reported this metric as unknown, by its full name or without suffixes."""
    return any(name == each or name.startswith(f"{each.rstrip('.')}.") for each in unknown)


def _options(names: list[str]) -> list[str]:
    return [
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--metrics",
        ",".join([_DURATION, *names]),
        "--profile-from-start",
        "off",
        "--replay-mode",
        "kernel",
        "--target-processes",
        "application-only",
        "--launch-count",
        str(_MOST_LAUNCHES),
        "--clock-control",
        "none",
        "--cache-control",
        "all",
    ]


def _explain(ran: tools.Ran) -> None:
    """Raise the reason why there are no counters; return if no kernel was launched."""
    output = f"{ran.log}\n{ran.printed}"
    if _DENIED in output:
        raise MissingError(
            f"the driver lets only administrators read counters ({_DENIED})",
            "as root: echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' > "
            "/etc/modprobe.d/nvidia-profiling.conf, then reload the driver or reboot",
        )
    errors = re.findall(r"^==ERROR== (.+)", output, re.MULTILINE)
    own = [error for error in errors if not error.startswith("The application returned")]
    if own:
        raise MissingError(
            f"ncu does not work here: {tools.without_paths(own[0])[:300]}", "see `patcher doctor`"
        )
    if ran.ok and ran.code == 0:
        return
    raise UsageError(f"the candidate fails under ncu: {ran.why()}", "evaluate it without counters")
