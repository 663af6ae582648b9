"""What contract, receipts and profiles know of one patch's kernel, put together."""

from __future__ import annotations

from collections.abc import Mapping

from bench import Contract, Evaluation, Throughput, presets
from hotspot import Profile
from patcher.reconciling.launches import step_launches
from patcher.reconciling.reconcile import PatchedKernel


def patched_kernel(
    evaluation: Evaluation,
    contract: Contract,
    throughput: Throughput,
    calls: Mapping[str, int],
    *,
    replayed: bool | None = None,
    before: Profile | None = None,
    seen_per_step: float | None = None,
    pdl: bool = False,
) -> PatchedKernel:
    """What is known of one patch's kernel.

    Args:
        calls: of the A/B's receipt, by kernel and shape.
        replayed: whether they ran in CUDA graphs.
        before: a profile of the engine as it comes, for its layers where the model is no preset.
        seen_per_step: launches of the patched kernel in a step of a profile, see `ProofRow`.
        pdl: whether its kernel takes part in programmatic dependent launch, as its manifest says.
    """
    sweep = next((one for one in contract.sweeps if one.name == evaluation.sweep), None)
    return PatchedKernel(
        evaluation=evaluation,
        launches=step_launches(
            evaluation.op,
            throughput,
            calls,
            axis=(sweep or contract.sweeps[0]).axis,
            contract=_calls_per_step(contract, throughput, before),
            profile=seen_per_step,
        ),
        dtypes=tuple(dict.fromkeys(sweep.dtypes.values())) if sweep else (),
        replayed=replayed,
        pdl=pdl,
    )


def _calls_per_step(
    contract: Contract, throughput: Throughput, profile: Profile | None
) -> float | None:
    """Of one layer, by the op's patch point, times the model's layers."""
    workload, known = throughput.workload, presets()
    layers = known[workload.model].layers if workload.model in known else None
    layers = layers or (profile.layers if profile else None)
    for point in contract.patch_points:
        if point.engine == workload.engine and layers:
            return float(point.calls_per_layer * layers)
    return None
