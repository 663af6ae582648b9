"""A patch: a bundle on disk with a kernel, its target, its guards and its evidence."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import ValidationError

from patcher.bench import (
    Candidate,
    Contract,
    Evaluation,
    Op,
    Outcome,
    PatchPointSpec,
    UsageError,
    VerificationError,
)
from patcher.integrate.binaries import describe_binary, load_kernel
from patcher.integrate.changes import SourceChangedError, replaced, what_changed
from patcher.integrate.engine import engine_version, patch_point, source_fingerprint
from patcher.integrate.manifest import (
    DeviceKind,
    Manifest,
    PatchGuards,
    Provenance,
    Target,
    created_at,
    patch_id,
)
from patcher.integrate.narrow import judged_shapes, worth_calling
from patcher.integrate.points import Fingerprint, verify_calls

if TYPE_CHECKING:
    from patcher.bench.toolchains import Built

MANIFEST = "manifest.json"


class Patch:
    """A verified bundle folder."""

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
        point_name: str | None = None,
    ) -> Patch:
        """Write a bundle whose guards exclude sizes at which the judge found the kernel slower.

        Args:
            folder: the folder to write; it is new or holds an earlier patch.
            op: the op that the candidate implements.
            candidate: the kernel's source.
            evaluation: the judge's verdict on the candidate.
            engine: the engine to patch.
            made_by: who or what wrote the kernel.
            model: the language model that wrote it, if one did.
            run: the run that produced it, if one did.
            built: the candidate's build; its binary is included if it is a tvm-ffi library.
            tensor_parallel: supported numbers of workers; empty for any.
            further: correct verdicts on this candidate over other sweeps.
            point_name: the patch point; by default the op's first in that engine.

        Returns:
            The patch, loaded from the folder.

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
        from patcher.integrate.points import naming

        point = patch_point(op, engine, point_name)
        capability = evaluation.environment and evaluation.environment.capability
        on_gpu = evaluation.environment and evaluation.environment.device_kind == "cuda"
        device: DeviceKind = "cuda" if on_gpu else "cpu"
        source = f"sources/{candidate.file_name}"
        contents = {source: candidate.source.encode()}
        binaries = []
        if built is not None and built.path is not None and built.binding == "tvm-ffi":
            binary = describe_binary(op.name, built, device)
            binaries.append(binary)
            contents[binary.file] = built.path.read_bytes()
        fingerprint = source_fingerprint(engine, point.point)
        axes = worth_calling(op.contract, (evaluation, *further))
        manifest = Manifest(
            id=patch_id(candidate, "" if point == patch_point(op, engine) else point.point),
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
            contract=naming(op.contract, point),
            guards=PatchGuards(
                device=device,
                dtypes=tuple(op.contract.dtype_choices()),
                axes=axes,
                shapes=judged_shapes(op.contract, (evaluation, *further), axes),
                # the kernel may run only on what it was judged on
                capabilities=(capability,) if capability else (),
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
                created=created_at(),
                patcher_version=importlib.metadata.version("patcher"),
            ),
        )
        require_free(folder)
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
        """Read a bundle and compare every file with its digest.

        Binaries may be missing, since the kernel can be built from source; the source may not.

        Raises:
            UsageError: the folder is not a bundle.
            VerificationError: the source is missing, or a file was added or changed, is a link, or
                lies outside the bundle.
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
        """The manifest's files that are in the folder; binaries may be missing."""
        return tuple(name for name in self.manifest.files if (self.folder / name).is_file())

    @property
    def contract(self) -> Contract:
        """The op's contract when the patch was made."""
        return self.manifest.contract

    @property
    def point(self) -> PatchPointSpec | None:
        """The contract's description of its patch point; None if the contract has none."""
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
        """Calls per layer by the contract, minus those that other patches take over.

        Args:
            together: the patches that are installed together with this one.

        Returns:
            The number of calls; None if the contract does not describe the patch point.
        """
        own = self.point
        if own is None:
            return None
        others = [other.point for other in together if other is not self]
        taken = sum(
            other.takes.get(own.point, 0)
            for other in others
            if other is not None and other.engine == own.engine
        )
        return max(0, own.calls_per_layer - taken)  # several may be for the same calls

    @property
    def evaluation(self) -> Evaluation:
        """The verdict that the patch is based on."""
        return self.manifest.evidence

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The verdicts over all sweeps, the main one first."""
        return (self.manifest.evidence, *self.manifest.further)

    def candidate(self) -> Candidate:
        """The source that was judged.

        Raises:
            VerificationError: the evidence is about another source.
        """
        source = (self.folder / self.manifest.source).read_text(encoding="utf-8")
        candidate = Candidate(op=self.manifest.op, language=self.manifest.language, source=source)
        if candidate.digest != self.evaluation.digest:
            raise VerificationError("the patch's evidence is about another source", _AGAIN)
        return candidate

    def kernel(self) -> Callable[..., object]:
        """Load the kernel: a binary that fits this machine, or one built from source.

        Raises:
            MissingError: the kernel must be built, but its compiler is not installed.
            UsageError: the cache folder cannot be written.
            VerificationError: the kernel does not build or load on this machine.
        """
        return load_kernel(self.folder, self.manifest, self.candidate())

    def verify_target(self) -> None:
        """Check that the installed engine is what the patch was made for.

        Raises:
            MissingError: the engine is not installed.
            VerificationError: its version is out of range, the replaced code has changed, or the
                op's arguments have.
        """
        verify_calls(self.contract)
        self.verify_version()
        self.verify_source()

    def verify_version(self) -> str:
        """The engine's installed version; it must be in the patch's range (see `verify_target`)."""
        target = self.manifest.target
        version = engine_version(target.engine)
        if not SpecifierSet(target.versions).contains(Version(version), prereleases=True):
            raise VerificationError(
                f"the patch supports {target.engine} {target.versions}, but {version} is installed",
                f"install a version in that range, or make the patch again with {version}",
            )
        return version

    def verify_source(self) -> str:
        """A description of the replaced code, which must be unchanged, or be that of a version for
        which the adapter was written (see `verify_target`).
        """
        target = self.manifest.target
        now = source_fingerprint(target.engine, target.point)
        unread = now.unread if isinstance(now, Fingerprint) else None
        if unread is not None and not unread:
            return f"{target.point} as its adapter knows it"
        if unread or now != target.fingerprint:
            version = engine_version(target.engine)
            changes = what_changed(target, now)
            detail = f": {', '.join(f'{one.name} {_WORDS[one.change]}' for one in changes)}"
            again = f"make the patch again with {target.engine} {version}"
            raise SourceChangedError(
                f"{target.point} of {target.engine} {version} differs from that of "
                f"{target.made_with}, which the patch replaces{detail if changes else ''}",
                "update patcher, or serve with a version that it knows" if unread else again,
                tuple(changes),
            )
        names = ", ".join(part.name for part in target.replaced)
        return f"{target.point} as it was in {target.made_with}{f': {names}' if names else ''}"


_WORDS = {"changed": "changed", "gone": "is gone", "new": "is relied on now"}
_AGAIN = "get the patch again from its source"


def require_free(folder: Path) -> None:
    """Refuse to write a patch over something else.

    Raises:
        UsageError: the folder exists and is not a patch.
    """
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise UsageError(f"{folder} exists and is not a patch", "choose another folder")


_TAKES_PART = re.compile(r"griddepcontrol|cudaGridDependencySynchronize|launch_pdl|gdc_wait")
"""Matches kernels that wait for their predecessor by programmatic dependent launch."""
