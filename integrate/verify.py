"""Whether a patch fits this environment, and if not, what differs: one line for each question."""

from __future__ import annotations

from collections.abc import Callable

from patcher.bench import (
    SCHEMA_VERSION,
    Evaluation,
    MissingError,
    PatcherError,
    Record,
    VerificationError,
)
from patcher.integrate.binaries import fitting_binary
from patcher.integrate.changes import Change
from patcher.integrate.manifest import Manifest
from patcher.integrate.patch import Patch, SourceChangedError


class FitCheck(Record):
    """One question, and what was found."""

    name: str
    passed: bool
    detail: str
    hint: str = ""
    """What to do, where it did not pass."""
    exit_code: int = 0
    """That the command line ends with for it."""
    changes: tuple[Change, ...] = ()
    """What differs in the code that the patch replaces."""


class Verified(Record):
    """A bundle held against the environment of this process."""

    schema_version: int = SCHEMA_VERSION
    id: str
    digest: str
    checks: tuple[FitCheck, ...]

    @property
    def failure(self) -> FitCheck | None:
        """The first that did not pass."""
        return next((check for check in self.checks if not check.passed), None)


def verify(patch: Patch) -> Verified:
    """Every check of a bundle that `Patch.load` has read, also after one that failed."""
    manifest = patch.manifest
    target = manifest.target
    questions: tuple[tuple[str, Callable[[], str]], ...] = (
        ("files", lambda: _files(patch)),
        ("evidence", lambda: _evidence(patch)),
        ("version", lambda: f"{target.engine} {patch.verify_version()} is in {target.versions}"),
        ("source", patch.verify_source),
        ("device", lambda: verify_device(manifest)),
        ("kernel", lambda: _kernel(patch)),
    )
    return Verified(
        id=manifest.id,
        digest=patch.digest,
        checks=tuple(_ask(name, question) for name, question in questions),
    )


def _ask(name: str, question: Callable[[], str]) -> FitCheck:
    try:
        return FitCheck(name=name, passed=True, detail=question())
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
    """The device that it is for, in words, when it is here.

    Raises:
        MissingError: it is for a GPU, and none is here.
        VerificationError: it was judged on other GPUs.
    """
    guards = manifest.guards
    if guards.device != "cuda" or not guards.capabilities:
        return f"for any {guards.device} device"
    import torch

    if not torch.cuda.is_available():
        raise MissingError(f"{manifest.id} is for a GPU, and none is here", "revert it here")
    found = "{}.{}".format(*torch.cuda.get_device_capability())
    known = ", ".join(guards.capabilities)
    if found not in guards.capabilities:
        raise VerificationError(
            f"{manifest.id} was judged on compute capability {known}, this GPU has {found}",
            "judge it on this GPU (`patcher bundle`)",
        )
    return f"compute capability {found}"


def verify_workers(manifest: Manifest, tensor_parallel: int) -> None:
    """Hold the number of workers that share a layer against the patch's guard.

    Raises:
        VerificationError: it was not made for that many.
    """
    known = manifest.guards.tensor_parallel
    if known and tensor_parallel not in known:
        sizes = ", ".join(map(str, known))
        raise VerificationError(
            f"{manifest.id} is for a tensor parallel size of {sizes}, not {tensor_parallel}",
            "serve with that size, or revert the patch",
        )


def _files(patch: Patch) -> str:
    left_out = [name for name in patch.manifest.files if name not in patch.files]
    told = f"{len(patch.files)} as when the patch was made"
    return f"{told}; left out: {', '.join(left_out)}" if left_out else told


def _evidence(patch: Patch) -> str:
    patch.candidate()
    further = [f"over {one.sweep}: {_in_words(one)}" for one in patch.manifest.further]
    return "; ".join([_in_words(patch.evaluation), *further])


def _in_words(evaluation: Evaluation) -> str:
    where = f" on {evaluation.environment.device}" if evaluation.environment else ""
    if evaluation.geomean_speedup is None:
        return f"{evaluation.outcome}{where}"
    against = f" against {evaluation.baseline}" if evaluation.baseline else ""
    return f"{evaluation.geomean_speedup:.3f}x{against}{where}"


def _kernel(patch: Patch) -> str:
    """How this machine would come by the kernel; nothing is built or loaded."""
    from patcher.bench.toolchains import toolchain

    manifest = patch.manifest
    if binary := fitting_binary(patch.folder, manifest):
        return f"{binary.file} was built for this machine"
    if missing := toolchain(manifest.language).missing():
        carried = [binary for binary in manifest.binaries if binary.file in patch.files]
        known = ", ".join(binary.processor for binary in carried) or "none"
        raise MissingError(
            f"{manifest.id} has no binary for this machine (it has: {known}), and {missing}",
            f"{missing.fix}, or make the patch again on this machine",
        )
    return f"built from {manifest.source} at first use"
