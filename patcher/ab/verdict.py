"""Patches measured, held against their micro gains, and decided on by their own evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from patcher.ab.compare import compare_patches
from patcher.ab.decision import decide
from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.ab.result import ABResult
from patcher.bench import UsageError, content
from patcher.bench.ab.phases import ABProgress
from patcher.hotspot import Profile
from patcher.integrate import Patch
from patcher.reconciling.patch_kernel import patched_kernel
from patcher.reconciling.proof import seen_per_step
from patcher.reconciling.reconcile import PatchedKernel, Reconciliation, reconcile


def compare_and_decide(
    job: ABJob,
    patch_folders: Sequence[Path],
    progress: ABProgress,
    before: Profile | None = None,
    after: Profile | None = None,
) -> ABResult:
    """Measure bundles, all in together, and decide on each by its own evidence.

    Args:
        before: a profile of the engine as it comes.
        after: of the patched one; how often a kernel is launched is read off it.

    Raises:
        UsageError: two bundles for one patch point, or one twice.
        VerificationError: a bundle was changed, or does not fit this environment.
    """
    patches = [Patch.load(folder) for folder in patch_folders]
    refuse_one_point_twice(patches)
    measured = compare_patches(job, patch_folders, progress)
    return result_of(patches, measured, before, after)


def result_of(
    patches: Sequence[Patch],
    measured: Sequence[Measurement],
    before: Profile | None = None,
    after: Profile | None = None,
) -> ABResult:
    """Patches that were in together, each decided on by its own evidence; see
    `compare_and_decide`."""
    kernels = [
        _kernel(
            one,
            patch,
            before,
            seen_per_step(patch, one.receipt, after, before, patches) if after else None,
            patches,
        )
        for patch, one in zip(patches, measured, strict=True)
    ]
    reconciliation = reconcile(kernels, measured[0].throughput, before, after)
    return ABResult(
        patches=tuple(patch.manifest.id for patch in patches),
        measured=tuple(measured),
        reconciliation=reconciliation,
        decisions=tuple(
            decide(one, patch.evaluation, reconciliation)
            for patch, one in zip(patches, measured, strict=True)
        ),
    )


def read_result(file: Path) -> ABResult:
    """What was measured once.

    Args:
        file: an `ABResult` as JSON, as `patcher throughput compare --out` writes it; it may be
            compressed by xz.

    Raises:
        UsageError: the file is none.
    """
    try:
        return ABResult.model_validate_json(content(file))
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{file} holds no verdict on patches",
            "give the file that `patcher throughput compare --out FILE` wrote, of one verdict",
        ) from error


def decide_again(
    file: Path,
    patches: Sequence[Patch],
    before: Profile | None = None,
    after: Profile | None = None,
) -> ABResult:
    """What was measured once, held against the micro gains and decided on anew.

    Args:
        file: see `read_result`.

    Raises:
        UsageError: the file is none, or of other patches.
    """
    kept = read_result(file)
    names = tuple(patch.manifest.id for patch in patches)
    if names != kept.patches:
        raise UsageError(
            f"{file} is of {', '.join(kept.patches)}, not of {', '.join(names)}",
            "give those bundles, in that order",
        )
    for patch, one in zip(patches, kept.measured, strict=True):
        if patch.digest != one.receipt.digest:
            raise UsageError(
                f"another bundle of the name {patch.manifest.id} was measured",
                "give that one: its evidence and guards are part of the verdict",
            )
    again = result_of(patches, kept.measured, before, after)
    told = {"command": kept.command, "created": kept.created, "took_s": kept.took_s}
    return again.model_copy(update=told)


def refuse_one_point_twice(patches: Sequence[Patch]) -> None:
    """Raises:
    UsageError: two are for one patch point, one was given twice, or one would never run.
    """
    points: dict[tuple[str, str], str] = {}
    for patch in patches:
        target = patch.manifest.target
        other = points.setdefault((target.engine, target.point), patch.manifest.id)
        if other != patch.manifest.id:
            raise UsageError(
                f"{other} and {patch.manifest.id} are for one patch point, {target.point}",
                "compare them one by one; only one can be in",
            )
    if len(points) < len(patches):
        raise UsageError("a patch was given twice", "name each once")
    for patch in patches:
        if patch.calls_per_layer(patches) == 0:
            name = patch.manifest.id
            raise UsageError(f"another patch takes all calls of {name}", f"leave {name} out")


def explain(
    measurement: Measurement,
    patch: Patch,
    before: Profile | None = None,
    after: Profile | None = None,
    seen_per_step: float | None = None,
) -> Reconciliation:
    """Whether one kernel's own gain explains what was measured; see `patched_kernel`."""
    kernel = _kernel(measurement, patch, before, seen_per_step)
    return reconcile([kernel], measurement.throughput, before, after)


def _kernel(
    measurement: Measurement,
    patch: Patch,
    before: Profile | None,
    seen_per_step: float | None,
    together: Sequence[Patch] = (),
) -> PatchedKernel:
    receipt = measurement.receipt
    return patched_kernel(
        patch,
        measurement.throughput,
        receipt.calls,
        replayed=bool(receipt.replayed) if receipt.calls else None,
        before=before,
        seen_per_step=seen_per_step,
        together=together,
    )
