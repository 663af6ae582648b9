"""What contract, receipts and profiles know of one patch's kernel, put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from patcher.bench import Sweep, Throughput, presets, sweep_named
from patcher.hotspot import Profile
from patcher.integrate import Patch
from patcher.reconciling.launches import step_launches
from patcher.reconciling.proof import is_of
from patcher.reconciling.reconcile import PatchedKernel
from patcher.reconciling.used_lengths import used_lengths


def patched_kernel(
    patch: Patch,
    throughput: Throughput,
    calls: Mapping[str, int],
    *,
    replayed: bool | None = None,
    before: Profile | None = None,
    seen_per_step: float | None = None,
    together: Iterable[Patch] = (),
) -> PatchedKernel:
    """What is known of one patch's kernel.

    Args:
        calls: of the A/B's receipt, by kernel and shape.
        replayed: whether they ran in CUDA graphs.
        before: a profile of the engine as it comes, for its layers where the model is no preset.
        seen_per_step: launches of the patched kernel in a step of a profile, see `ProofRow`.
        together: all patches that were in, some of which take calls from others.
    """
    evaluation, contract = patch.evaluation, patch.contract
    sweep = sweep_named(contract, evaluation.sweep)
    return PatchedKernel(
        evaluation=evaluation,
        launches=step_launches(
            evaluation.op,
            throughput,
            calls,
            axis=(sweep or contract.sweeps[0]).axis,
            contract=_calls_per_step(patch.calls_per_layer(together), throughput, before),
            profile=seen_per_step,
        ),
        dtypes=_dtypes(sweep),
        further=tuple(
            (one, _dtypes(sweep_named(contract, one.sweep))) for one in patch.manifest.further
        ),
        replayed=replayed,
        pdl=patch.manifest.guards.pdl,
        working_axes=contract.working_axes(),
        used=used_lengths(contract, throughput.workload),
        owns=is_of(patch),
    )


def _dtypes(sweep: Sweep | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sweep.dtypes.values())) if sweep else ()


def _calls_per_step(
    calls_per_layer: int | None, throughput: Throughput, profile: Profile | None
) -> float | None:
    """Of one layer, times the model's layers; None if there is no such number."""
    workload, known = throughput.workload, presets()
    layers = known[workload.model].layers if workload.model in known else None
    layers = layers or (profile.layers if profile else None)
    return float(calls_per_layer * layers) if calls_per_layer and layers else None
