"""A patch: a bundle on disk that says what it replaces, where it may run, and how that is known."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import ValidationError

from bench import (
    Candidate,
    Contract,
    Evaluation,
    MissingError,
    Op,
    Outcome,
    UsageError,
    VerificationError,
)
from bench.environment import device_capability, device_name
from bench.judge.kit import loading
from integrate.manifest import Binary, DeviceKind, Manifest, PatchGuards, Provenance, Target

if TYPE_CHECKING:
    from bench.toolchains import Built

log = logging.getLogger("patcher")

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
    ) -> Patch:
        """Write a bundle.

        Args:
            built: this candidate's build, whose binary goes along where it can be carried.

        Raises:
            UsageError: the evaluation is not of this candidate or not `correct`, the op has no
                patch point for the engine, or the folder holds something else.
            MissingError: the engine is not installed, so its source has no fingerprint.
        """
        if evaluation.digest != candidate.digest or evaluation.outcome is not Outcome.CORRECT:
            raise UsageError(
                f"only a candidate judged correct becomes a patch, this is {evaluation.outcome}",
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
            binary = _binary(op.name, built, device)
            binaries.append(binary)
            contents[binary.file] = built.path.read_bytes()
        manifest = Manifest(
            id=f"{op.name}-{candidate.language}-{candidate.digest[:8]}",
            op=op.name,
            language=candidate.language,
            entry=op.name,
            target=Target(
                engine=engine,
                versions=point.versions,
                point=point.point,
                fingerprint=_fingerprint(engine, point.point),
                made_with=engine_version(engine),
            ),
            contract=op.contract,
            guards=PatchGuards(
                device=device,
                dtypes=tuple(op.contract.dtype_choices()),
                axes=op.contract.guards.axes,
                capabilities=_capabilities(evaluation),
                graph_safe=op.contract.guards.graph_safe,
                pdl=_TAKES_PART.search(candidate.source) is not None,
            ),
            source=source,
            binaries=tuple(binaries),
            files={name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
            evidence=evaluation,
            provenance=Provenance(
                made_by=made_by,
                model=model,
                run=run,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                patcher_version=importlib.metadata.version("patcher"),
            ),
        )
        if folder.exists() and not (folder / MANIFEST).is_file():
            raise UsageError(f"{folder} exists and is no patch", "choose another folder")
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

        Raises:
            UsageError: no bundle there.
            VerificationError: a file is missing, added, changed, a link, or outside the bundle.
        """
        path = folder / MANIFEST
        if not path.is_file() or path.is_symlink():
            raise UsageError(f"{folder} is no patch bundle", f"give a folder with a {MANIFEST}")
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
    def contract(self) -> Contract:
        return self.manifest.contract

    @property
    def evaluation(self) -> Evaluation:
        """The evidence it was made on."""
        return self.manifest.evidence

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
        from bench.toolchains import build, load

        for binary in self.manifest.binaries:
            if (binary.platform, binary.processor) == _here(self.manifest.guards.device):
                try:
                    return loading.load(
                        str(self.folder / binary.file), binary.binding, self.manifest.entry
                    )
                except (ImportError, OSError, AttributeError, RuntimeError) as error:
                    log.warning("%s does not load here (%s): built anew", binary.file, error)
        built = build(self.candidate(), self.contract)
        if not built.ok:
            raise VerificationError(
                f"the source of {self.manifest.id} does not build here",
                f"make the patch again on this machine; the compiler said: {built.log[-500:]}",
            )
        try:
            return load(built, self.manifest.entry)
        except Exception as error:
            raise VerificationError(
                f"{self.manifest.id} does not load here: {type(error).__name__}: {error}",
                "make the patch again on this machine",
            ) from error

    def verify_target(self) -> None:
        """Hold the installed engine against what the patch was made for.

        Raises:
            MissingError: the engine is not installed.
            VerificationError: version out of range, or the replaced code has changed.
        """
        target = self.manifest.target
        version = engine_version(target.engine)
        if not SpecifierSet(target.versions).contains(Version(version), prereleases=True):
            raise VerificationError(
                f"the patch is for {target.engine} {target.versions}, installed is {version}",
                f"install a version in that range, or make the patch again with {version}",
            )
        if _fingerprint(target.engine, target.point) != target.fingerprint:
            raise VerificationError(
                f"{target.point} of {target.engine} {version} differs from that of "
                f"{target.made_with}, which the patch replaces",
                f"make the patch again with {target.engine} {version}",
            )


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
    from integrate.points import find_point

    return find_point(engine, point).fingerprint()


_TAKES_PART = re.compile(r"griddepcontrol|cudaGridDependencySynchronize|launch_pdl|gdc_wait")
"""Words of kernels that wait for the kernel before them by programmatic dependent launch."""


def _binary(entry: str, built: Built, device: str) -> Binary:
    platform_name, processor = _here(device)
    place = re.sub(r"[^A-Za-z0-9.]+", "-", f"{platform_name}-{processor}").strip("-")
    return Binary(
        file=f"binaries/{place}/{entry}.so",
        binding="tvm-ffi",
        platform=platform_name,
        processor=processor,
        command=built.command,
    )


def _here(device: str) -> tuple[str, str]:
    """Platform and processor for which a binary that is built here is."""
    name = f"{platform.system().lower()}-{platform.machine()}"
    if device == "cpu":
        return name, device_name("cpu")
    import torch

    return name, device_capability() if torch.cuda.is_available() else "none"


def _capabilities(evaluation: Evaluation) -> tuple[str, ...]:
    """What the evidence is from: a kernel was judged on one kind of GPU, and may run there."""
    environment = evaluation.environment
    if environment is None or environment.capability is None:
        return ()
    return (environment.capability,)
