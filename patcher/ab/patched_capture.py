"""Profile an engine with patches, to compare its step with that of the stock engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from patcher.ab.launcher import refuse_other_engines
from patcher.ab.verdict import refuse_one_point_twice
from patcher.bench import VerificationError, Workload
from patcher.bench.engines import in_process
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
    """Profile the workload with these patches enabled; see `patcher.hotspot.capture`.

    Args:
        folder: where the captured files stay, with the receipts.
        scratch: an empty folder for the patches' store.

    Returns:
        The profile, and for each patch its number of calls in words. A starting engine also calls
        kernels, so receipts count more calls than the profiled steps.

    Raises:
        UsageError: a patch is for another engine, or two have the same patch point.
        VerificationError: a patch was changed, does not match this environment, or did not run.
        PatcherError: as `patcher.hotspot.capture`.
    """
    refuse_other_engines(workload, patches)
    refuse_one_point_twice(patches)
    receipts = folder / "receipts"
    shutil.rmtree(receipts, ignore_errors=True)  # of an earlier capture
    variables = patch_environment(patches, scratch, receipts)
    first = ""
    if not in_process(workload.engine):
        # needed in a checkout, where no entry point leads to the engine's plugin
        first = f"from patcher.integrate import await_engine; await_engine({workload.engine!r})"
    else:
        variables["PYTHONPATH"] = startup_python_path(engine_environment()["PYTHONPATH"])
    profile = capture(workload, folder, progress, variables=variables, first=first)
    found = read_receipts(receipts)
    seen = profile if workload.device == "cuda" else None
    return profile, tuple(ran(patch, found, seen, patches) for patch in patches)


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
