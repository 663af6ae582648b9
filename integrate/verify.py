"""Check whether a patch fits this environment; each check has one line of detail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from patcher.bench import (
    SCHEMA_VERSION,
    Evaluation,
    MissingError,
    PatcherError,
    Record,
    VerificationError,
)
from patcher.integrate.binaries import fitting_binary
from patcher.integrate.changes import Change, SourceChangedError
from patcher.integrate.manifest import Manifest
from patcher.integrate.patch import Patch
from patcher.integrate.places import calls_in_step, of_model


class FitCheck(Record):
    """One check of a patch against this environment."""

    name: str
    """`files`, `evidence`, `version`, `source`, `device`, `kernel` or `model`."""
    passed: bool
    detail: str
    """The result in one sentence."""
    hint: str = ""
    """The next step after a failure."""
    exit_code: int = 0
    """Exit code of the command line after a failure."""
    changes: tuple[Change, ...] = ()
    """Changes in the code that the patch replaces."""


class FitReport(Record):
    """All checks of a patch against this environment."""

    schema_version: int = SCHEMA_VERSION
    id: str
    """The patch's id."""
    digest: str
    """Digest of the patch's manifest."""
    checks: tuple[FitCheck, ...]

    @property
    def failure(self) -> FitCheck | None:
        """The first failed check; None if all passed."""
        return next((check for check in self.checks if not check.passed), None)


def verify(patch: Patch, model: Mapping[str, Any] | None = None) -> FitReport:
    """Run all checks of a loaded patch, even after a failed one.

    Args:
        patch: the bundle; `Patch.load` has verified its files.
        model: the config.json of a model, which must have layers of the role that is patched.
    """
    manifest = patch.manifest
    target = manifest.target
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("files", lambda: _files(patch)),
        ("evidence", lambda: _evidence(patch)),
        ("version", lambda: f"{target.engine} {patch.verify_version()} is in {target.versions}"),
        ("source", patch.verify_source),
        ("device", lambda: verify_device(manifest)),
        ("kernel", lambda: _kernel(patch)),
        *((("model", lambda: _model(patch, model)),) if model is not None else ()),
    )
    return FitReport(
        id=manifest.id,
        digest=patch.digest,
        checks=tuple(_run(name, check) for name, check in checks),
    )


def _run(name: str, check: Callable[[], str]) -> FitCheck:
    try:
        return FitCheck(name=name, passed=True, detail=check())
    except PatcherError as error:
        return FitCheck(
            name=name,
            passed=False,
            detail=error.message,
            hint=error.hint,
            exit_code=error.exit_code,
            changes=error.changes if isinstance(error, SourceChangedError) else (),
        )


def verify_device(manifest: Manifest) -> str:
    """A description of the patch's device, which must be present.

    Raises:
        MissingError: the patch needs a GPU, and there is none.
        VerificationError: the patch was judged on other GPUs.
    """
    guards = manifest.guards
    if guards.device != "cuda" or not guards.capabilities:
        return f"for any {guards.device} device"
    import torch

    if not torch.cuda.is_available():
        raise MissingError(
            f"{manifest.id} needs a GPU, and this machine has none", "revert it on this machine"
        )
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    known = ", ".join(guards.capabilities)
    if capability not in guards.capabilities:
        raise VerificationError(
            f"{manifest.id} was judged on compute capability {known}, this GPU has {capability}",
            "judge it on this GPU (`patcher bundle`)",
        )
    return f"compute capability {capability}"


def verify_workers(manifest: Manifest, tensor_parallel: int) -> None:
    """Check that the patch supports the number of workers that share a layer.

    Raises:
        VerificationError: the patch does not support that number.
    """
    known = manifest.guards.tensor_parallel
    if known and tensor_parallel not in known:
        sizes = ", ".join(map(str, known))
        raise VerificationError(
            f"{manifest.id} supports a tensor parallel size of {sizes}, not {tensor_parallel}",
            "serve with that size, or revert the patch",
        )


def _model(patch: Patch, model: Mapping[str, Any]) -> str:
    """What the patch point says of a model; other engines look for their layers in a built one."""
    from patcher.integrate.activation import guards_of  # it checks by what is here

    target = patch.manifest.target
    says = of_model(target.engine, target.point, lambda: model)
    if says is None:
        return f"{target.point} of {target.engine} looks for its layers when a model is built"
    calls = calls_in_step(target.engine, target.point, model, guards_of(patch.manifest))
    often = "an unknown number of times until it is loaded" if calls is None else str(calls)
    return f"{says}; a step of decode calls them {often}"


def _files(patch: Patch) -> str:
    missing = [name for name in patch.manifest.files if name not in patch.files]
    unchanged = f"{len(patch.files)} unchanged since the patch was made"
    return f"{unchanged}; left out: {', '.join(missing)}" if missing else unchanged


def _evidence(patch: Patch) -> str:
    patch.candidate()
    further = [f"over {one.sweep}: {_in_words(one)}" for one in patch.manifest.further]
    return "; ".join([_in_words(patch.evaluation), *further])


def _in_words(evaluation: Evaluation) -> str:
    where = f" on {evaluation.environment.device}" if evaluation.environment else ""
    if evaluation.geomean_speedup is None:
        return f"{evaluation.outcome}{where}"
    against = f" against {evaluation.baseline}" if evaluation.baseline else ""
    graded = f"; {evaluation.lower_grade}" if evaluation.lower_grade else ""
    return f"{evaluation.geomean_speedup:.3f}x{against}{where}{graded}"


def _kernel(patch: Patch) -> str:
    """How this machine would get the kernel; nothing is built or loaded."""
    from patcher.bench.toolchains import toolchain

    manifest = patch.manifest
    if binary := fitting_binary(patch.folder, manifest):
        return f"{binary.file} was built for this machine"
    if missing := toolchain(manifest.language).missing():
        present = [binary for binary in manifest.binaries if binary.file in patch.files]
        known = ", ".join(binary.processor for binary in present) or "none"
        raise MissingError(
            f"{manifest.id} has no binary for this machine (it has: {known}), and {missing}",
            f"{missing.fix}, or make the patch again on this machine",
        )
    return f"built from {manifest.source} at first use"
