"""`manifest.json` of a patch bundle: what it replaces, where it may run, and its evidence."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from patcher.bench import (
    DTYPES,
    AxisGuard,
    Candidate,
    Contract,
    Evaluation,
    Language,
    Outcome,
    Record,
    UsageError,
)
from patcher.integrate.points import present_name

PatchId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,99}$")]
"""Pattern of ids, which name folders of the store and so cannot be paths."""


def patch_id(candidate: Candidate, point: str = "") -> str:
    """The id of a patch with that source.

    Args:
        candidate: the source.
        point: the patch point, if it is not the op's first in the engine.
    """
    name = "-".join(filter(None, (candidate.op, point.replace(".", "_"), candidate.language)))
    return f"{name}-{candidate.digest[:8]}"


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"{name} is none of: {', '.join(DTYPES)}")
    return name


DtypeName = Annotated[str, AfterValidator(_known_dtype)]
DeviceKind = Literal["cpu", "cuda"]
Capability = Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")]
"""Compute capability, such as `9.0` for an H200."""


class Replaced(Record):
    """One function or class that is replaced or relied on, when the patch was made."""

    name: str
    digest: str
    """sha256 of its source text."""
    text: str | None = None
    """Its source text; None if it is long."""


class Target(Record):
    """What is replaced."""

    engine: str
    versions: str
    """PEP 440 specifier of the engine's versions."""
    point: str
    fingerprint: str
    """sha256 of the source text of the replaced code when the patch was made."""
    made_with: str
    """The engine's version when the patch was made."""
    replaced: tuple[Replaced, ...] = ()
    """Parts of the fingerprint, if the adapter uses `source_digest`."""

    @field_validator("point")
    @classmethod
    def _present(cls, point: str, info: ValidationInfo) -> str:
        return present_name(info.data.get("engine", ""), point)


class JudgedShape(Record):
    """A shape with a verdict of its own, and the sizes of an axis at which it is called there."""

    sizes: dict[str, int]
    """Of the other axes."""
    axis: str
    guard: AxisGuard

    def __str__(self) -> str:
        shape = " ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"{self.axis} {self.guard} at {shape}"


class PatchGuards(Record):
    """Where the kernel may be called; elsewhere the engine's own code runs."""

    device: DeviceKind
    dtypes: tuple[dict[str, DtypeName], ...]
    axes: dict[str, AxisGuard] = Field(default_factory=dict)
    shapes: tuple[JudgedShape, ...] = ()
    """At these, their own guard counts in place of the axis's in `axes`."""
    capabilities: tuple[Capability, ...] = ()
    """Compute capabilities that it was judged on; empty: any."""
    tensor_parallel: tuple[int, ...] = ()
    """Supported numbers of workers that share a layer; empty: any."""
    graph_safe: bool
    pdl: bool = False
    """Whether it supports programmatic dependent launch."""


class Binary(Record):
    """A binary that was built where the patch was made."""

    file: str
    binding: Literal["tvm-ffi"]
    """Binding, which unlike pybind11 does not depend on the versions of Python and torch."""
    platform: str
    """`linux-x86_64`."""
    processor: str
    """A compute capability, or the name of the processor that its instructions are for."""
    command: str
    """The compiler and its flags."""


def created_at() -> str:
    """When a bundle is created, as ISO 8601 in UTC: now, or the time in seconds since 1970 that
    `SOURCE_DATE_EPOCH` gives (https://reproducible-builds.org/specs/source-date-epoch), so that
    the same source and evidence give the same bundle, bit by bit.

    Raises:
        UsageError: it is no such time.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        moment = datetime.fromtimestamp(int(given), UTC) if given else datetime.now(UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {given!r}", "give seconds since 1970, or unset it"
        ) from error
    return moment.isoformat(timespec="seconds")


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

    schema_version: Literal[2] = 2
    id: PatchId
    op: str
    language: Language
    entry: str
    target: Target
    contract: Contract
    guards: PatchGuards
    source: str
    """The source file, from which every binary was built."""
    binaries: tuple[Binary, ...] = ()
    files: dict[str, str] = Field(min_length=1)
    """sha256 of every file beside the manifest, by its path in the bundle."""
    evidence: Evaluation
    """The judge's verdict on that source."""
    further: tuple[Evaluation, ...] = ()
    """Verdicts over other sweeps on the same source: correct, but perhaps slower at some sizes, at
    which it is not called."""
    provenance: Provenance

    @property
    def left_out(self) -> list[str]:
        """Sizes in words that the op supports but at which this kernel is not called, since it is
        slower there.
        """
        found = []
        for axis, guard in self.guards.axes.items():
            full = self.contract.guards.axes.get(axis, AxisGuard())
            if guard.minimum != full.minimum:
                found.append(f"{axis} below {guard.minimum}")
            if guard.maximum != full.maximum:
                found.append(f"{axis} above {guard.maximum}")
        return found

    @field_validator("contract")
    @classmethod
    def _present(cls, contract: Contract) -> Contract:
        """The contract with the present names of its patch points, which may be former ones."""
        specs = tuple(
            spec.model_copy(
                update={
                    "point": present_name(spec.engine, spec.point),
                    "takes": {
                        present_name(spec.engine, name): calls for name, calls in spec.takes.items()
                    },
                }
            )
            for spec in contract.patch_points
        )
        return contract.model_copy(update={"patch_points": specs})

    @model_validator(mode="after")
    def _about_one_thing(self) -> Manifest:
        if not self.op == self.entry == self.contract.name == self.evidence.op:
            raise ValueError("op, entry, contract and evidence are about different ops")
        if self.evidence.outcome is not Outcome.CORRECT:
            raise ValueError(f"the evidence says {self.evidence.outcome}")
        for one in (self.evidence, *self.further):
            if not one.right:
                raise ValueError(f"the evidence over {one.sweep} says {one.outcome}")
            if (one.op, one.digest) != (self.op, self.evidence.digest):
                raise ValueError("the verdicts are about different sources")
        named = {self.source, *(binary.file for binary in self.binaries)}
        if named != set(self.files) or len(named) != 1 + len(self.binaries):
            raise ValueError("files are not the source and the binaries")
        return self
