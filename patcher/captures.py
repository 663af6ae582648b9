"""Profiles captured on this machine: of one batch or several, stock or with patches."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from patcher.bench import VerificationError, Workload
from patcher.bench.engines import in_process
from patcher.bench.machine.environment import engine_environment
from patcher.hotspot import Profile, capture_batches
from patcher.places import places_in

if TYPE_CHECKING:  # a stock capture needs nothing of patches
    from patcher.integrate import Patch, Receipt


def capture_here(
    workloads: Sequence[Workload],
    keep: Path | None,
    bundles: Sequence[Path],
    progress: Callable[[str], None],
) -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    """Profile workloads that differ in batch alone in one run of the engine, with these patches.

    Args:
        keep: folder for the captured files; None: they are removed.

    Returns:
        The profile of each workload, and for each patch in words how often it ran. A starting
        engine also calls kernels, so receipts count more calls than the profiled steps.

    Raises:
        UsageError: a patch is for another engine, or two have the same patch point.
        VerificationError: a patch was changed, does not match this environment, or did not run.
        PatcherError: as `patcher.hotspot.capture_batches`.
    """
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = keep or scratch / "capture"
        folder.mkdir(parents=True, exist_ok=True)
        if not bundles:
            places = places_in(workloads[0].model, workloads[0].engine)
            return capture_batches(workloads, folder, progress, places=places), ()
        from patcher.integrate import open_bundle

        patches = [stack.enter_context(open_bundle(bundle)) for bundle in bundles]
        return _patched(workloads, patches, folder, scratch / "store", progress)


def _patched(
    workloads: Sequence[Workload],
    patches: Sequence[Patch],
    folder: Path,
    store: Path,
    progress: Callable[[str], None],
) -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    from patcher.ab.launcher import refuse_other_engines
    from patcher.ab.verdict import refuse_one_point_twice
    from patcher.integrate import patch_environment, read_receipts, startup_python_path

    workload = workloads[0]
    refuse_other_engines(workload, patches)
    refuse_one_point_twice(patches)
    receipts = folder / "receipts"
    shutil.rmtree(receipts, ignore_errors=True)  # of an earlier capture
    variables, first = patch_environment(patches, store, receipts), ""
    if not in_process(workload.engine):
        # needed in a checkout, where no entry point leads to the engine's plugin
        first = f"from patcher.integrate import await_engine; await_engine({workload.engine!r})"
    else:
        variables["PYTHONPATH"] = startup_python_path(engine_environment()["PYTHONPATH"])
    places = places_in(workload.model, workload.engine)
    profiles = capture_batches(
        workloads, folder, progress, variables=variables, first=first, places=places
    )
    found = read_receipts(receipts)
    shown = dict(zip((one.batch for one in workloads), profiles, strict=True))
    if workload.device != "cuda":  # a CPU's rows are operators, which name no kernel
        shown = {}
    return profiles, tuple(line for one in patches for line in ran_in(one, found, shown, patches))


def ran_in(
    patch: Patch,
    receipts: Sequence[Receipt],
    profiles: dict[int, Profile],
    together: Sequence[Patch],
) -> list[str]:
    """The number of calls of a patch, in words, for each of the profiles that show kernels.

    Args:
        profiles: by batch; empty where they show none.
        together: all patches that were in.

    Raises:
        VerificationError: it did not run, or in the profiled steps of no batch. A patch that runs
            up to some batch alone is told to have run at these.
    """
    if not profiles:
        return [ran(patch, receipts, None, together)]
    said, refused = [], []
    for batch, profile in profiles.items():
        at = f"batch {batch}: " if len(profiles) > 1 else ""
        try:
            said.append(at + ran(patch, receipts, profile, together))
        except VerificationError as error:
            refused.append(error)
            said.append(at + error.message)
    if len(refused) == len(profiles):
        raise refused[0]
    return said


def ran(
    patch: Patch, receipts: Sequence[Receipt], gpu: Profile | None, together: Sequence[Patch]
) -> str:
    """The number of calls of a patch, in words; `gpu` is the profile if it shows kernels.

    Raises:
        VerificationError: it did not run, or not in the profiled steps.
    """
    from patcher.reconciling.proof import prove

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
