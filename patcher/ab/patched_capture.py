"""Profile an engine with patches, to compare its step with that of the stock engine."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.bench import VerificationError
from patcher.hotspot import Profile
from patcher.integrate import Patch, Receipt
from patcher.reconciling.proof import prove


def ran(
    patch: Patch, receipts: Sequence[Receipt], gpu: Profile | None, together: Sequence[Patch]
) -> str:
    """The number of calls of a patch, in words; `gpu` is the profile if it shows kernels.

    Raises:
        VerificationError: it did not run, or not in the profiled steps.
    """
    name = patch.manifest.id
    own = [one for one in receipts if one.patch_id == name]
    calls = sum(one.total_calls for one in own)
    fallbacks = sum(sum(one.fallbacks.values()) for one in own)
    told = f"{name} ran {calls:,} times since the engine's start, {fallbacks:,} calls fell back"
    launches = None
    if gpu is not None:
        rows = prove(receipts, gpu, patch, together=together).rows
        launches = sum(row.launches for row in rows if row.role == "new")
        told += f"; {launches:,} launches in the profiled steps"
    if not calls or launches == 0:
        raise VerificationError(
            f"the patch did not run in this profile: {told}",
            "see `patcher verify`, and the shapes that its guards allow",
        )
    return told
