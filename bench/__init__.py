"""Is it right, is it faster? Workloads, engines, ops, the judge, and the statistics of a
comparison.
"""

from bench.candidate import Candidate, Language, guess_language
from bench.comparison import Comparison, Quality, Sample, Throughput, Window
from bench.contract import AxisGuard, Contract, PatchPointSpec, Point, Sweep, TensorSpec
from bench.errors import (
    BudgetError,
    MissingError,
    PatcherError,
    UsageError,
    VerificationError,
    WaitingError,
    relayed,
)
from bench.evaluation import (
    Check,
    Environment,
    Evaluation,
    KernelCounters,
    Outcome,
    Timing,
    geomean,
)
from bench.op import Op, SolutionInfo, library, load_op, load_ops
from bench.records import SCHEMA_VERSION, Record
from bench.stats import compare, pairs_needed, read_samples
from bench.workload import Preset, Shape, Workload, preset, presets

__all__ = [
    "SCHEMA_VERSION",
    "AxisGuard",
    "BudgetError",
    "Candidate",
    "Check",
    "Comparison",
    "Contract",
    "Environment",
    "Evaluation",
    "KernelCounters",
    "Language",
    "MissingError",
    "Op",
    "Outcome",
    "PatchPointSpec",
    "PatcherError",
    "Point",
    "Preset",
    "Quality",
    "Record",
    "Sample",
    "Shape",
    "SolutionInfo",
    "Sweep",
    "TensorSpec",
    "Throughput",
    "Timing",
    "UsageError",
    "VerificationError",
    "WaitingError",
    "Window",
    "Workload",
    "compare",
    "geomean",
    "guess_language",
    "library",
    "load_op",
    "load_ops",
    "pairs_needed",
    "preset",
    "presets",
    "read_samples",
    "relayed",
]
