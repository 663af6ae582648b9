"""Is it right, is it faster? Workloads, engines, ops, the judge, and the statistics of a
comparison.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from patcher.bench.arguments import (
    MOST_THREADS,
    Count,
    FilePath,
    FilePaths,
    Threads,
    Timeout,
    as_paths,
    check_arguments,
)
from patcher.bench.errors import (
    BudgetError,
    BusyError,
    Interrupted,
    MissingError,
    PatcherError,
    UsageError,
    VerificationError,
    WaitingError,
    relayed,
)
from patcher.bench.judge.evaluation import (
    BaselineTime,
    Check,
    Evaluation,
    KernelCounters,
    Outcome,
    Timing,
    geomean,
)
from patcher.bench.machine.environment import Environment
from patcher.bench.ops.arithmetic import evaluate as arithmetic_value
from patcher.bench.ops.arithmetic import names_in
from patcher.bench.ops.candidate import Candidate, Language, guess_language
from patcher.bench.ops.contract import (
    SIZED,
    AxisGuard,
    Contract,
    PatchPointSpec,
    Point,
    Sweep,
    TensorSpec,
)
from patcher.bench.ops.dtypes import DTYPES, Dtype, dtypes_in
from patcher.bench.ops.header import comment_mark, header_form, header_hint, read_header
from patcher.bench.ops.op import (
    Op,
    SolutionInfo,
    library,
    load_op,
    load_ops,
    op_problems,
    sweep_named,
)
from patcher.bench.ops.op_files import later_points
from patcher.bench.plugins import Plugin, Registry, plugins
from patcher.bench.presets import Preset, preset, presets
from patcher.bench.presets import problems as preset_problems
from patcher.bench.records import (
    MOST_BYTES,
    SCHEMA_VERSION,
    Record,
    content,
    first_error,
    obstacle,
    parse_json,
    parse_toml,
    problem,
    read_source,
    require_file,
    write_atomically,
)
from patcher.bench.stats.comparison import Comparison, Sample, Window
from patcher.bench.workload import DType, Shape, Workload, fit_context, pick_device

if TYPE_CHECKING:
    from patcher.bench.ab.records import Quality, Throughput
    from patcher.bench.stats.compare import compare, pairs_needed, read_samples

_OF_WHOLE_MODELS = {
    "Quality": "patcher.bench.ab.records",
    "Throughput": "patcher.bench.ab.records",
    "compare": "patcher.bench.stats.compare",
    "pairs_needed": "patcher.bench.stats.compare",
    "read_samples": "patcher.bench.stats.compare",
}


def __getattr__(name: str) -> Any:
    """What measures whole models is imported when it is named: judging a kernel needs none of it.

    Raises:
        AttributeError: there is no such name.
    """
    if name in _OF_WHOLE_MODELS:
        return getattr(importlib.import_module(_OF_WHOLE_MODELS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DTYPES",
    "MOST_BYTES",
    "MOST_THREADS",
    "SCHEMA_VERSION",
    "SIZED",
    "AxisGuard",
    "BaselineTime",
    "BudgetError",
    "BusyError",
    "Candidate",
    "Check",
    "Comparison",
    "Contract",
    "Count",
    "DType",
    "Dtype",
    "Environment",
    "Evaluation",
    "FilePath",
    "FilePaths",
    "Interrupted",
    "KernelCounters",
    "Language",
    "MissingError",
    "Op",
    "Outcome",
    "PatchPointSpec",
    "PatcherError",
    "Plugin",
    "Point",
    "Preset",
    "Quality",
    "Record",
    "Registry",
    "Sample",
    "Shape",
    "SolutionInfo",
    "Sweep",
    "TensorSpec",
    "Threads",
    "Throughput",
    "Timeout",
    "Timing",
    "UsageError",
    "VerificationError",
    "WaitingError",
    "Window",
    "Workload",
    "arithmetic_value",
    "as_paths",
    "check_arguments",
    "comment_mark",
    "compare",
    "content",
    "dtypes_in",
    "first_error",
    "fit_context",
    "geomean",
    "guess_language",
    "header_form",
    "header_hint",
    "later_points",
    "library",
    "load_op",
    "load_ops",
    "names_in",
    "obstacle",
    "op_problems",
    "pairs_needed",
    "parse_json",
    "parse_toml",
    "pick_device",
    "plugins",
    "preset",
    "preset_problems",
    "presets",
    "problem",
    "read_header",
    "read_samples",
    "read_source",
    "relayed",
    "require_file",
    "sweep_named",
    "write_atomically",
]
