"""A profile of an engine with patches in it: the step that a report holds against the stock one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from patcher.ab.launcher import refuse_other_engines
from patcher.ab.verdict import refuse_one_point_twice
from patcher.bench import VerificationError, Workload
from patcher.bench.machine.environment import engine_environment
from patcher.hotspot import Profile, capture
from patcher.integrate import Patch, Receipt, patch_environment, read_receipts, startup_python_path
from patcher.reconciling.proof import prove


def capture_patched(
    workload: Workload,
    patches: Sequence[Patch],
    folder: Path,
    scratch: Path,
    progress: Callable[[str], None],
) -> tuple[Profile, tuple[str, ...]]:
    """Profile the workload with these patches switched on; see `patcher.hotspot.capture`.

    Args:
        folder: where the captured files stay, the receipts beside them.
        scratch: an empty folder for the patches' store.

    Returns:
        the profile, and for each patch in words how often it ran; an engine that starts calls
        kernels, too, and so the receipts count more than the profiled steps.

    Raises:
        UsageError: a patch is for another engine, or two are for one point.
        VerificationError: a patch was changed, does not fit here, or did not run.
        PatcherError: as `patcher.hotspot.capture`.
    """
    refuse_other_engines(workload, patches)
    refuse_one_point_twice(patches)
    receipts = folder / "receipts"
    shutil.rmtree(receipts, ignore_errors=True)  # of an earlier capture
    variables = patch_environment(patches, scratch, receipts)
    first = ""
    if workload.engine == "vllm":
        # also from a checkout, where no entry point leads to the plugin
        first = "from patcher.integrate import await_engine; await_engine('vllm')"
    else:
        variables["PYTHONPATH"] = startup_python_path(engine_environment()["PYTHONPATH"])
    profile = capture(workload, folder, progress, variables=variables, first=first)
    found = read_receipts(receipts)
    seen = profile if workload.device == "cuda" else None
    return profile, tuple(ran(patch, found, seen, patches) for patch in patches)


def ran(
    patch: Patch, receipts: Sequence[Receipt], gpu: Profile | None, together: Sequence[Patch]
) -> str:
    """How often a patch ran, in words; `gpu`: the profile, where it shows kernels.

    Raises:
        VerificationError: it did not run, or not in the profiled steps.
    """
    name = patch.manifest.id
    own = [one for one in receipts if one.patch_id == name]
    calls = sum(one.total_calls for one in own)
    fallbacks = sum(sum(one.fallbacks.values()) for one in own)
    told = f"{name} ran {calls:,} times since the engine began to start, {fallbacks:,} fell back"
    launches = None
    if gpu is not None:
        rows = prove(receipts, gpu, patch, together=together).rows
        launches = sum(row.launches for row in rows if row.role == "new")
        told += f"; {launches:,} launches in the profiled steps"
    if not calls or launches == 0:
        raise VerificationError(
            f"this profile is not of the patched engine: {told}",
            "see `patcher verify`, and which shapes its guards take",
        )
    return told
