"""From kernels to hotspots: share, op of the library, and what replacing it could give."""

from __future__ import annotations

from collections.abc import Iterable

from bench import load_ops
from hotspot.classify import classify
from hotspot.names import normalise, printable
from hotspot.profile import Hotspot, KernelStat, Profile, ProfileWarning


def kernel_stat(
    name: str,
    instances: int,
    total_ns: int,
    whole_ns: int,
    median_ns: float | None = None,
    min_ns: int | None = None,
    max_ns: int | None = None,
) -> KernelStat:
    """One kernel's row, classified; its share is of `whole_ns`."""
    name = printable(name)
    origin, operation = classify(name)
    return KernelStat(
        name=name,
        origin=origin,
        operation=operation,
        instances=instances,
        total_ns=total_ns,
        mean_ns=total_ns / instances,
        median_ns=median_ns,
        min_ns=min_ns,
        max_ns=max_ns,
        share_pct=100 * total_ns / whole_ns if whole_ns else 0.0,
    )


def build_profile(
    model: str,
    source: str,
    kernels: Iterable[KernelStat],
    busy_ns: int | None,
    steps: int | None,
    warnings: Iterable[ProfileWarning] = (),
) -> Profile:
    """Rank kernels into a profile, largest first."""
    ranked = sorted(kernels, key=lambda kernel: (-kernel.total_ns, kernel.name))
    return Profile(
        model=model,
        source=source,
        total_kernel_ns=sum(kernel.total_ns for kernel in ranked),
        busy_ns=busy_ns,
        steps=steps,
        warnings=tuple(warnings),
        kernels=tuple(ranked),
        hotspots=tuple(_hotspot(rank, k, steps) for rank, k in enumerate(ranked, 1)),
    )


def _hotspot(rank: int, kernel: KernelStat, steps: int | None) -> Hotspot:
    share = min(kernel.share_pct / 100, 1.0)
    return Hotspot(
        rank=rank,
        name=kernel.name,
        share_pct=kernel.share_pct,
        origin=kernel.origin,
        operation=kernel.operation,
        op=covering_op(kernel.name),
        ceiling_pct=100 * share / (1 - share) if share < 0.999 else 99900.0,
        instances=kernel.instances,
        mean_ns=kernel.mean_ns,
        per_step=kernel.instances / steps if steps else None,
    )


def covering_op(name: str) -> str | None:
    """The op of the library whose symbols match this kernel."""
    spelled = normalise(name)
    return next((op.name for op in load_ops().values() if op.contract.matches(spelled)), None)
