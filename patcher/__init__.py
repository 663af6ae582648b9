"""Find where decode spends its time, judge faster kernels, patch them in, and take them back.

    import patcher

    p = patcher.profile("decode.nsys-rep")
    v = patcher.evaluate("fused_add_rms_norm", "kernel.cu")
    patcher.bundle(v, "kernel.cu", "norm.zip")
    with patcher.patched(model, "norm.zip") as receipt:
        model.generate(**inputs)
    t = patcher.throughput("gpt-oss-tiny", patches=["norm.zip"])
    r = patcher.optimize("fused_add_rms_norm", language="cuda", model="anthropic")

Nothing is imported before it is used: a served engine imports `patcher.integrate` through here.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patcher.api.bundle import bundle
    from patcher.api.evaluate import EvaluationResult, evaluate
    from patcher.api.optimize import RunReport, optimize, read_run
    from patcher.api.patched import PatchReceipt, patched
    from patcher.api.profile import ProfileResult, profile
    from patcher.api.recorded import recorded
    from patcher.api.throughput import ThroughputResult, throughput
    from patcher.bench import (
        BudgetError,
        MissingError,
        PatcherError,
        UsageError,
        VerificationError,
        WaitingError,
    )

    __version__: str

_LAZY = {
    "EvaluationResult": "patcher.api.evaluate",
    "PatchReceipt": "patcher.api.patched",
    "ProfileResult": "patcher.api.profile",
    "RunReport": "patcher.api.optimize",
    "ThroughputResult": "patcher.api.throughput",
    "bundle": "patcher.api.bundle",
    "evaluate": "patcher.api.evaluate",
    "optimize": "patcher.api.optimize",
    "patched": "patcher.api.patched",
    "profile": "patcher.api.profile",
    "read_run": "patcher.api.optimize",
    "recorded": "patcher.api.recorded",
    "throughput": "patcher.api.throughput",
    "BudgetError": "patcher.bench",
    "MissingError": "patcher.bench",
    "PatcherError": "patcher.bench",
    "UsageError": "patcher.bench",
    "VerificationError": "patcher.bench",
    "WaitingError": "patcher.bench",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is used for the first time."""
    import importlib

    if name == "__version__":
        import importlib.metadata

        found: Any = importlib.metadata.version("patcher")
    elif name in _LAZY:
        try:
            found = getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            from patcher.extras import missing_package

            raise missing_package(error, name) from error
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "BudgetError",
    "EvaluationResult",
    "MissingError",
    "PatchReceipt",
    "PatcherError",
    "ProfileResult",
    "RunReport",
    "ThroughputResult",
    "UsageError",
    "VerificationError",
    "WaitingError",
    "__version__",
    "bundle",
    "evaluate",
    "optimize",
    "patched",
    "profile",
    "read_run",
    "recorded",
    "throughput",
]
