"""Convert numbers, units and metrics of Nsight Compute to `Counters`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from patcher.bench import UsageError
from patcher.hotspot.profile import Counters
from patcher.hotspot.readers.cells import EUROPEAN

FIX = (
    "LC_ALL=C ncu --import REPORT.ncu-rep --page raw --csv --print-units base > counters.csv; to "
    "measure: LC_ALL=C ncu --set full --export REPORT PROGRAM"
)
_DURATION = "gpu__time_duration.sum"
_DRAM = "dram__bytes.sum"
_DRAM_PARTS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_DRAM_RATE = "dram__bytes.sum.per_second"
_DRAM_PCT = (
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
_SM_PCT = ("sm__throughput.avg.pct_of_peak_sustained_elapsed",)
_CYCLES = "smsp__cycles_elapsed.avg"
DETAILS = {
    # label of the details page, and whether its unit is percent: "Memory Throughput" occurs twice
    ("Duration", False): _DURATION,
    ("Memory Throughput", False): _DRAM_RATE,
    ("DRAM Throughput", True): _DRAM_PCT[0],
    ("SOL DRAM", True): _DRAM_PCT[0],
    ("Compute (SM) Throughput", True): _SM_PCT[0],
    ("Compute (SM) [%]", True): _SM_PCT[0],
    ("SOL SM", True): _SM_PCT[0],
}
_SCALAR = {
    # operations of one thread per instruction; a half instruction works on two values, as in
    # ncu's own metrics such as derived__smsp__sass_thread_inst_executed_op_hfma_pred_on_x4
    **{"fadd": 1, "fmul": 1, "ffma": 2},
    **{"dadd": 1, "dmul": 1, "dfma": 2},
    **{"hadd": 2, "hmul": 2, "hfma": 4},
}
_SCALAR_METRIC = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
_TENSOR = re.compile(r"sm__ops_path_tensor_src_(\w+)\.sum")
_SCALAR_ARCHITECTURES = range(7, 10)
"""Major compute capabilities. Blackwell (10) adds an FFMA on two values, whose count is unknown."""
_WANTED = {
    _DURATION,
    _DRAM,
    *_DRAM_PARTS,
    _DRAM_RATE,
    *_DRAM_PCT,
    *_SM_PCT,
    _CYCLES,
    *(_SCALAR_METRIC.format(op) for op in _SCALAR),
    *(_SCALAR_METRIC.format(op) + ".per_cycle_elapsed" for op in _SCALAR),
}

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_TIMES = {"n": 1.0, "u": 1e3, "μ": 1e3, "µ": 1e3, "m": 1e6, "": 1e9}
_TIME = re.compile(r"([nuμµm]?)(?:s|sec|second)s?")
_BYTES = re.compile(r"([KMGTP]?)bytes?")
_BYTE_RATE = re.compile(r"([KMGTP]?)bytes?/(?:s|sec|second)")
_COUNT = re.compile(r"([KMGTP]?)(?:inst|cycle|inst/cycle|)")
_PERCENT = re.compile("()%")

_ABSENT = frozenset(["", "n/a", "nan", "-nan", "inf", "-inf", "no data", "(!) nan", "(!) n/a"])
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d{1,25})(?:\.\d{1,25})?(?:[eE][+-]?\d{1,2})?")
_POINT_GROUPS = re.compile(r"-?\d{1,3}\.\d{3}")
"""Such as `117.344`: in the C locale ncu writes two or six decimals, never three."""
_ENGLISH = re.compile(
    r"-?(?:\d{1,3}(?:,\d{3}){2,}(?:\.\d+)?|\d{1,3}(?:,\d{3})+\.\d+|\d+\.(?:\d\d?|\d{4,}))"
)


class Cell(NamedTuple):
    """A value and its unit as text."""

    text: str
    unit: str


def is_wanted(metric: str) -> bool:
    """Whether `measured` uses the metric."""
    return metric in _WANTED or _TENSOR.fullmatch(metric) is not None


def check_locale(written: Iterable[str], used: Iterable[str], name: str) -> None:
    """Refuse numbers of a locale in which the point separates thousands.

    Args:
        written: numbers that only show the locale.
        used: numbers that become counters.
        name: the file's name.

    Raises:
        UsageError: a number has such a format, or one of `used` is ambiguous.
    """
    english = False
    doubtful: str | None = None
    for group, decides in ((written, False), (used, True)):
        for text in group:
            if EUROPEAN.fullmatch(text):
                raise UsageError(f"{name} has numbers of another locale ({text[:40]})", FIX)
            english = english or _ENGLISH.fullmatch(text) is not None
            if decides and doubtful is None and _POINT_GROUPS.fullmatch(text):
                doubtful = text
    if doubtful and not english:
        message = f"{name} does not show whether {doubtful} has thousands or decimals"
        raise UsageError(message, FIX)


def measured(cells: dict[str, Cell], capability: str, name: str) -> Counters:
    """The counters of one launch; only fields with a measurement are set."""
    read = _Reader(cells, name)
    values: dict[str, float | None] = {
        "duration_ns": read.value(_DURATION, _TIME, _TIMES),
        "dram_bytes": _dram_bytes(read),
        "flops": _flops(read, capability),
        "dram_throughput_pct": read.percent(_DRAM_PCT),
        "sm_throughput_pct": read.percent(_SM_PCT),
    }
    known = {key: value for key, value in values.items() if value is not None}
    return Counters.model_validate({"launches": 1, **known})


class _Reader:
    """Values of one launch in base units: ns, bytes, bytes per second, percent, counts."""

    def __init__(self, cells: dict[str, Cell], name: str) -> None:
        self.cells = cells
        self._name = name

    def value(self, metric: str, units: re.Pattern[str], scale: dict[str, float]) -> float | None:
        cell = self.cells.get(metric)
        if cell is None or cell.text.strip().lower() in _ABSENT:
            return None
        if not _NUMBER.fullmatch(cell.text):
            raise UsageError(f"{self._name}: {metric} is {cell.text[:40]!r}, not a number", FIX)
        unit = units.fullmatch(cell.unit)
        if unit is None:
            message = f"{self._name}: {metric} has the unknown unit {cell.unit[:20]!r}"
            raise UsageError(message, FIX)
        number = float(cell.text.replace(",", "")) * scale[unit[1]]
        if number < 0:
            raise UsageError(f"{self._name}: {metric} is negative", FIX)
        return number

    def percent(self, metrics: tuple[str, ...]) -> float | None:
        values = (self.value(metric, _PERCENT, _PREFIXES) for metric in metrics)
        return next((value for value in values if value is not None), None)

    def count(self, metric: str) -> float | None:
        return self.value(metric, _COUNT, _PREFIXES)


def _dram_bytes(read: _Reader) -> float | None:
    whole = read.value(_DRAM, _BYTES, _PREFIXES)
    if whole is not None:
        return whole
    parts = [read.value(metric, _BYTES, _PREFIXES) for metric in _DRAM_PARTS]
    if parts[0] is not None and parts[1] is not None:
        return parts[0] + parts[1]
    rate = read.value(_DRAM_RATE, _BYTE_RATE, _PREFIXES)
    duration = read.value(_DURATION, _TIME, _TIMES)
    return rate * duration * 1e-9 if rate is not None and duration is not None else None


def _flops(read: _Reader, capability: str) -> float | None:
    """Floating-point operations of all paths; None if those of any path are unknown."""
    major = re.match(r"(\d{1,2})\.", capability)
    if major is None or int(major[1]) not in _SCALAR_ARCHITECTURES:
        return None
    total = 0.0
    for operation, weight in _SCALAR.items():
        executed = _executed(read, _SCALAR_METRIC.format(operation))
        if executed is None:
            return None
        total += weight * executed
    paths = [path for path in read.cells if _TENSOR.fullmatch(path)]
    if not any("_fp16" in path for path in paths):
        return None  # whether the kernel used tensor cores is unknown
    for path in paths:
        operations = read.count(path)
        if operations is None:
            return None
        if operations and ("_int" in path or path.endswith("sparsity_on.sum")):
            return None  # integer operations, or skipped products
        total += operations
    return total


def _executed(read: _Reader, metric: str) -> float | None:
    """Executed thread instructions; `--set full` reports them only per cycle."""
    whole = read.count(metric)
    if whole is not None:
        return whole
    per_cycle, cycles = read.count(f"{metric}.per_cycle_elapsed"), read.count(_CYCLES)
    return per_cycle * cycles if per_cycle is not None and cycles is not None else None
