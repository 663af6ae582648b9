"""A patch: a bundle on disk that says what it replaces, where it may run, and how that is known."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import Field, ValidationError, model_validator

from bench import (
    Candidate,
    Contract,
    Evaluation,
    Language,
    MissingError,
    Op,
    Outcome,
    Record,
    UsageError,
    VerificationError,
)

MANIFEST = "manifest.json"

PatchId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,99}$")]
"""Names a folder of the store, so it can be no path."""
DtypeName = Annotated[str, Field(pattern="^(float32|float16|bfloat16)$")]


class Target(Record):
    """What is replaced."""

    engine: str
    versions: str
    """PEP 440 specifier of the engine."""
    point: str
    fingerprint: str
    """sha256 of the source text of what is replaced, as it was when the patch was made."""
    made_with: str
    """The engine's version when the patch was made."""


class PatchGuards(Record):
    """Where the kernel may be called; elsewhere the engine's own code runs."""

    device: str
    dtypes: tuple[dict[str, DtypeName], ...]
    hidden_multiple_of: int = Field(ge=1)
    hidden_max: int | None
    graph_safe: bool


class Provenance(Record):
    made_by: str
    model: str | None
    """The language model that wrote the source."""
    run: str | None
    created: str
    """ISO 8601, UTC."""
    patcher_version: str


class Manifest(Record):
    """`manifest.json` of a bundle."""

    schema_version: Literal[1] = 1
    id: PatchId
    op: str
    language: Language
    entry: str
    target: Target
    contract: Contract
    guards: PatchGuards
    files: dict[str, str] = Field(min_length=1, max_length=1)
    """sha256 of every file beside the manifest, by its path in the bundle: the one source."""
    evidence: Evaluation
    """The judge's word, which is about that source."""
    provenance: Provenance

    @model_validator(mode="after")
    def _about_one_thing(self) -> Manifest:
        if not self.op == self.entry == self.contract.name == self.evidence.op:
            raise ValueError("op, entry, contract and evidence are about different ops")
        if self.evidence.outcome is not Outcome.CORRECT:
            raise ValueError(f"the evidence says {self.evidence.outcome}")
        return self


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
    ) -> Patch:
        """Write a bundle.

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
        device = evaluation.environment.device_kind if evaluation.environment else "cpu"
        source = f"sources/{candidate.file_name}"
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
                hidden_multiple_of=op.contract.guards.hidden_multiple_of,
                hidden_max=op.contract.guards.hidden_max,
                graph_safe=op.contract.guards.graph_safe,
            ),
            files={source: hashlib.sha256(candidate.source.encode()).hexdigest()},
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
            (staged / source).parent.mkdir(parents=True)
            (staged / source).write_text(candidate.source, encoding="utf-8")
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
        [name] = self.manifest.files
        source = (self.folder / name).read_text(encoding="utf-8")
        found = Candidate(op=self.manifest.op, language=self.manifest.language, source=source)
        if found.digest != self.evaluation.digest:
            raise VerificationError("the patch's evidence is about another source", _AGAIN)
        return found

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
    if engine == "transformers":
        from integrate.transformers import POINTS

        if point in POINTS:
            return POINTS[point].fingerprint()
    raise UsageError(f"no adapter for {point} of {engine}", "see CONTRIBUTING.md, Add an engine")
