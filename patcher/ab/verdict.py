"""Measure patches, reconcile the gain with micro gains, and decide."""

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
    keep: Path | None = None,
) -> ABResult:
    """Measure bundles, all installed together, and decide on each by its own evidence.

    Args:
        before: a profile of the stock engine.
        after: a profile of the patched one, which shows how often a kernel is launched.
        keep: as `compare_patches`.

    Raises:
        UsageError: two bundles have the same patch point, or one occurs twice.
        VerificationError: a bundle was changed, or does not match this environment.
    """
    patches = [Patch.load(folder) for folder in patch_folders]
    refuse_one_point_twice(patches)
    measured = compare_patches(job, patch_folders, progress, keep)
    return result_of(patches, measured, before, after)


def result_of(
    patches: Sequence[Patch],
    measured: Sequence[Measurement],
    before: Profile | None = None,
    after: Profile | None = None,
) -> ABResult:
    """Decide on each of several patches that were installed together, by its own evidence; see
    `compare_and_decide`.
    """
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
    """Read the result of a measurement.

    Args:
        file: an `ABResult` as JSON, as `patcher throughput compare --out` writes it; it may be
            compressed by xz.

    Raises:
        UsageError: the file holds no such result.
    """
    try:
        return ABResult.model_validate_json(content(file))
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{file} holds no verdict on patches",
            "give a file with one verdict, from `patcher throughput compare --out FILE`",
        ) from error


def decide_again(
    file: Path,
    patches: Sequence[Patch],
    before: Profile | None = None,
    after: Profile | None = None,
) -> ABResult:
    """Reconcile and decide again on the result of a measurement.

    Args:
        file: see `read_result`.

    Raises:
        UsageError: the file holds no result, or one of other patches.
    """
    kept = read_result(file)
    names = tuple(patch.manifest.id for patch in patches)
    if names != kept.patches:
        raise UsageError(
            f"{file} is for {', '.join(kept.patches)}, not for {', '.join(names)}",
            "give those bundles, in that order",
        )
    for patch, one in zip(patches, kept.measured, strict=True):
        if patch.digest != one.receipt.digest:
            raise UsageError(
                f"another bundle named {patch.manifest.id} was measured",
                "give that bundle, since its evidence and guards are part of the verdict",
            )
    again = result_of(patches, kept.measured, before, after)
    told = {"command": kept.command, "created": kept.created, "took_s": kept.took_s}
    return again.model_copy(update=told)


def refuse_one_point_twice(patches: Sequence[Patch]) -> None:
    """Check that the patches can be installed together.

    Raises:
        UsageError: two have the same patch point, one occurs twice, or one would never run.
    """
    points: dict[tuple[str, str], str] = {}
    for patch in patches:
        target = patch.manifest.target
        other = points.setdefault((target.engine, target.point), patch.manifest.id)
        if other != patch.manifest.id:
            raise UsageError(
                f"{other} and {patch.manifest.id} have the same patch point, {target.point}",
                "compare them one by one, since only one can be installed",
            )
    if len(points) < len(patches):
        raise UsageError("a patch was given twice", "name each once")
    for patch in patches:
        if patch.calls_per_layer() and patch.calls_per_layer(patches) == 0:
            name = patch.manifest.id
            raise UsageError(f"another patch takes all calls of {name}", f"leave {name} out")


def explain(
    measurement: Measurement,
    patch: Patch,
    before: Profile | None = None,
    after: Profile | None = None,
    seen_per_step: float | None = None,
) -> Reconciliation:
    """Whether one kernel's own gain explains the measured gain; see `patched_kernel`."""
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
