"""A patch: a bundle on disk that says what it replaces, where it may run, and how that is known."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import ValidationError

from patcher.bench import (
    Candidate,
    Contract,
    Evaluation,
    MissingError,
    Op,
    Outcome,
    PatchPointSpec,
    UsageError,
    VerificationError,
)
from patcher.integrate.binaries import describe_binary, load_kernel
from patcher.integrate.changes import Change, replaced, what_changed
from patcher.integrate.manifest import DeviceKind, Manifest, PatchGuards, Provenance, Target
from patcher.integrate.narrow import worth_calling

if TYPE_CHECKING:
    from patcher.bench.toolchains import Built

MANIFEST = "manifest.json"


class Patch:
    """A bundle folder, verified."""

    kind: ClassVar[str] = "patch"

    def __init__(self, folder: Path, manifest: Manifest, digest: str) -> None:
        self.folder, self.manifest, self.digest = folder, manifest, digest

    @classmethod
    def create(
        cls,
        folder: Path,
        op: Op,
        candidate: Candidate,
        evaluation: Evaluation,
        *,
        engine: str,
        made_by: str,
        model: str | None = None,
        run: str | None = None,
        built: Built | None = None,
        tensor_parallel: tuple[int, ...] = (),
        further: tuple[Evaluation, ...] = (),
    ) -> Patch:
        """Write a bundle, guarded to where the judge did not find the kernel slower.

        Args:
            built: this candidate's build, whose binary goes along where it can be carried.
            tensor_parallel: numbers of workers with which it may run; none: any.
            further: verdicts on this candidate over other sweeps, right there and not slower at
                every size.

        Raises:
            UsageError: an evaluation is not of this candidate or not `correct`, the op has no
                patch point for the engine, or the folder holds something else.
            MissingError: the engine is not installed, so its source has no fingerprint.
        """
        for one in (evaluation, *further):
            known = one.right if one is not evaluation else one.outcome is Outcome.CORRECT
            if one.digest != candidate.digest or not known:
                raise UsageError(
                    f"only a candidate judged correct becomes a patch, this is {one.outcome}",
                    "see `patcher evaluate`",
                )
        points = [point for point in op.contract.patch_points if point.engine == engine]
        if not points:
            raise UsageError(
                f"{op.name} has no patch point in {engine}", f"see `patcher ops show {op.name}`"
            )
        point = points[0]
        on_gpu = evaluation.environment and evaluation.environment.device_kind == "cuda"
        device: DeviceKind = "cuda" if on_gpu else "cpu"
        source = f"sources/{candidate.file_name}"
        contents = {source: candidate.source.encode()}
        binaries = []
        if built is not None and built.path is not None and built.binding == "tvm-ffi":
            binary = describe_binary(op.name, built, device)
            binaries.append(binary)
            contents[binary.file] = built.path.read_bytes()
        fingerprint = _fingerprint(engine, point.point)
        manifest = Manifest(
            id=f"{op.name}-{candidate.language}-{candidate.digest[:8]}",
            op=op.name,
            language=candidate.language,
            entry=op.name,
            target=Target(
                engine=engine,
                versions=point.versions,
                point=point.point,
                fingerprint=str(fingerprint),
                made_with=engine_version(engine),
                replaced=replaced(fingerprint),
            ),
            contract=op.contract,
            guards=PatchGuards(
                device=device,
                dtypes=tuple(op.contract.dtype_choices()),
                axes=worth_calling(op.contract, (evaluation, *further)),
                capabilities=_capabilities(evaluation),
                tensor_parallel=tensor_parallel,
                graph_safe=op.contract.guards.graph_safe,
                pdl=_TAKES_PART.search(candidate.source) is not None,
            ),
            source=source,
            binaries=tuple(binaries),
            files={name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
            evidence=evaluation,
            further=further,
            provenance=Provenance(
                made_by=made_by,
                model=model,
                run=run,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                patcher_version=importlib.metadata.version("patcher"),
            ),
        )
        if folder.exists() and not (folder / MANIFEST).is_file():
            raise UsageError(f"{folder} exists and is not a patch", "choose another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".patch-") as scratch:
            staged = Path(scratch) / "patch"
            for name, content in contents.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).write_bytes(content)
            text = manifest.model_dump_json(indent=1) + "\n"
            (staged / MANIFEST).write_text(text, encoding="utf-8")
            if folder.exists():
                folder.rename(Path(scratch) / "replaced")
            staged.rename(folder)
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Patch:
        """Read a bundle and hold every file against its digest.

        Binaries may be left out: the kernel is built from source then, which must be there.

        Raises:
            UsageError: no bundle there.
            VerificationError: the source is missing, or a file is added, changed, a link, or
                outside the bundle.
        """
        path = folder / MANIFEST
        if not path.is_file() or path.is_symlink():
            raise UsageError(f"{folder} is not a patch bundle", f"give a folder with a {MANIFEST}")
        text = path.read_bytes()
        try:
            manifest = Manifest.model_validate_json(text)
        except ValidationError as error:
            raise VerificationError(
                f"the manifest of {folder.name} is damaged or of another version", _AGAIN
            ) from error
        for name, digest in manifest.files.items():
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts:
                raise VerificationError(f"the manifest names {name}, outside the bundle", _AGAIN)
            file = folder / name
            if name != manifest.source and not os.path.lexists(file):
                continue
            if file.is_symlink() or not file.is_file():
                raise VerificationError(f"{name} is missing from the patch", _AGAIN)
            if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                raise VerificationError(f"{name} was changed after the patch was made", _AGAIN)
        for root, folders, files in os.walk(folder):
            for name in [*folders, *files]:
                item = Path(root) / name
                inside = item.relative_to(folder).as_posix()
                known = inside == MANIFEST or inside in manifest.files
                if item.is_symlink() or not (known or item.is_dir()):
                    raise VerificationError(f"{inside} does not belong to the patch", _AGAIN)
        return cls(folder, manifest, hashlib.sha256(text).hexdigest())

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files of the manifest that are in the folder: all but the binaries that
        were left out."""
        return tuple(name for name in self.manifest.files if (self.folder / name).is_file())

    @property
    def contract(self) -> Contract:
        return self.manifest.contract

    @property
    def point(self) -> PatchPointSpec | None:
        """Where it goes, as its contract says."""
        target = self.manifest.target
        return next(
            (
                one
                for one in self.contract.patch_points
                if (one.engine, one.point) == (target.engine, target.point)
            ),
            None,
        )

    def calls_per_layer(self, together: Iterable[Patch] = ()) -> int | None:
        """By the contract, less what the points of patches that are in together with it take."""
        own = self.point
        if own is None:
            return None
        others = [other.point for other in together if other is not self]
        return own.calls_per_layer - sum(
            other.takes.get(own.point, 0)
            for other in others
            if other is not None and other.engine == own.engine
        )

    @property
    def evaluation(self) -> Evaluation:
        """The evidence it was made on."""
        return self.manifest.evidence

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """All of it: of each sweep that was judged."""
        return (self.manifest.evidence, *self.manifest.further)

    def candidate(self) -> Candidate:
        """The source, as it was judged.

        Raises:
            VerificationError: the source is not the one that the evidence is about.
        """
        source = (self.folder / self.manifest.source).read_text(encoding="utf-8")
        found = Candidate(op=self.manifest.op, language=self.manifest.language, source=source)
        if found.digest != self.evaluation.digest:
            raise VerificationError("the patch's evidence is about another source", _AGAIN)
        return found

    def kernel(self) -> Callable[..., object]:
        """The kernel, callable: a binary that was built for this machine, else built from source.

        Raises:
            MissingError: it must be built, and its compiler is not here.
            UsageError: the cache folder cannot be written.
            VerificationError: it does not build or load here.
        """
        return load_kernel(self.folder, self.manifest, self.candidate())

    def verify_target(self) -> None:
        """Hold the installed engine against what the patch was made for.

        Raises:
            MissingError: the engine is not installed.
            VerificationError: version out of range, or the replaced code has changed.
        """
        self.verify_version()
        self.verify_source()

    def verify_version(self) -> str:
        """The engine's installed version, when it is in the patch's range; see `verify_target`."""
        target = self.manifest.target
        version = engine_version(target.engine)
        if not SpecifierSet(target.versions).contains(Version(version), prereleases=True):
            raise VerificationError(
                f"the patch is for {target.engine} {target.versions}, installed is {version}",
                f"install a version in that range, or build the patch again with {version}",
            )
        return version

    def verify_source(self) -> str:
        """What is replaced, in words, when it is as it was; see `verify_target`."""
        target = self.manifest.target
        now = _fingerprint(target.engine, target.point)
        if now != target.fingerprint:
            version = engine_version(target.engine)
            found = what_changed(target, now)
            told = f": {', '.join(f'{one.name} {_WORDS[one.change]}' for one in found)}"
            raise SourceChangedError(
                f"{target.point} of {target.engine} {version} differs from that of "
                f"{target.made_with}, which the patch replaces{told if found else ''}",
                f"make the patch again with {target.engine} {version}",
                tuple(found),
            )
        names = ", ".join(part.name for part in target.replaced)
        return f"{target.point} as it was in {target.made_with}{f': {names}' if names else ''}"


class SourceChangedError(VerificationError):
    """What a patch replaces is not what it was made for."""

    def __init__(self, message: str, hint: str, changes: tuple[Change, ...]) -> None:
        super().__init__(message, hint)
        self.changes = changes


_WORDS = {"changed": "changed", "gone": "is gone", "new": "is relied on now"}
_AGAIN = "get the patch again from where it was made"


def engine_version(engine: str) -> str:
    """The engine's installed version.

    Raises:
        MissingError: it is not installed.
    """
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        raise MissingError(f"{engine} is not installed", f"pip install {engine}") from None


def _fingerprint(engine: str, point: str) -> str:
    from patcher.integrate.points import find_point

    try:
        return find_point(engine, point).fingerprint()
    except (ImportError, AttributeError) as error:
        raise VerificationError(
            f"{point} is not in {engine} {engine_version(engine)}: {error}",
            f"use a version of {engine} that has it",
        ) from error


_TAKES_PART = re.compile(r"griddepcontrol|cudaGridDependencySynchronize|launch_pdl|gdc_wait")
"""Words of kernels that wait for the kernel before them by programmatic dependent launch."""


def _capabilities(evaluation: Evaluation) -> tuple[str, ...]:
    """What the evidence is from: a kernel was judged on one kind of GPU, and may run there."""
    environment = evaluation.environment
    if environment is None or environment.capability is None:
        return ()
    return (environment.capability,)
