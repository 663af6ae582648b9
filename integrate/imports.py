"""A kernel from outside: what `patcher export` wrote, or a flashinfer-bench dataset, as sources and
op folders like those of `kernels/`. Nothing of it is run here.

A foreign Solution becomes one source: its own text and, under the op's name, a function in our
order of arguments (tensors, then scalars). A foreign Definition becomes an op of its own: its
tensors are only read or only written, its reference is the yardstick. What a person should improve
is in the notes, what cannot be carried over is refused with its reason.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Language,
    Record,
    SolutionInfo,
    UsageError,
    VerificationError,
    load_ops,
)
from patcher.integrate.formats import CARRIED, ExportRecord
from patcher.integrate.formats.foreign_contract import Refused, op_of
from patcher.integrate.formats.foreign_schema import Definition, Solution, Trace
from patcher.integrate.formats.foreign_source import candidate_from
from patcher.integrate.formats.op_folder import op_files, own_op_files


class Imported(Record):
    """What an import wrote."""

    schema_version: int = SCHEMA_VERSION
    folder: str
    """To judge what is in it: `PATCHER_OPS=FOLDER patcher evaluate OP SOURCE`."""
    sources: dict[str, str]
    """The digest of each candidate by its path in the folder."""
    ops: tuple[str, ...]
    """Ops that the library does not have; each has a folder."""
    notes: tuple[str, ...]
    """What was not carried over, or should be looked at."""
    refused: dict[str, str]
    """What was not imported, and why."""


class _Import:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sources: dict[str, str] = {}
        self.ops: list[str] = []
        self.notes: list[str] = []
        self.refused: dict[str, str] = {}

    def put(self, candidate: Candidate, name: str, device: str, summary: str, origin: str) -> None:
        info = SolutionInfo(
            name=name,
            language=candidate.language,
            device="cpu" if device == "cpu" else "cuda",
            summary=summary,
            origin=origin,
        )
        folder = f"{candidate.op}/solutions/{name}"
        told = info.model_dump(mode="json", exclude={"name"})
        self.files[f"{folder}/solution.toml"] = tomlkit.dumps(told).encode()
        self.files[f"{folder}/{candidate.file_name}"] = candidate.source.encode()
        self.sources[f"{folder}/{candidate.file_name}"] = candidate.digest


def import_kernel(path: Path, out: Path) -> Imported:
    """Write the sources and op folders that a path holds.

    Args:
        path: a folder that `patcher export` made, a flashinfer-bench dataset (`definitions/` and
            `solutions/`), or the JSON file of one Definition.
        out: gets what `kernels/` has: `OP/solutions/NAME/`, and `OP/op.toml` for ops that are new.

    Raises:
        UsageError: nothing there can be imported, or a file that would be written exists and is
            another.
        VerificationError: an export was changed, or is of another contract than the library's.
    """
    found = _Import()
    if (path / CARRIED).is_file():
        _own(path, found)
    elif (path / "definitions").is_dir():
        _dataset(path, found)
    elif path.suffix == ".json" and path.is_file():
        definition = _record(Definition, path.read_bytes(), path.name)
        _definition(definition, [], [], found)
    elif (path / "build").is_dir() or (path / "metadata.json").is_file():
        raise UsageError(
            f"{path} is a kernel repository without {CARRIED}, so without contract and reference",
            "only one that `patcher export` made can be imported",
        )
    else:
        raise UsageError(
            f"{path} is neither an export nor a flashinfer-bench dataset",
            f"give a folder with {CARRIED} or definitions/, or the JSON file of a Definition",
        )
    if not found.files:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.refused.items())
        raise UsageError(f"nothing of {path} can be imported", why or "it holds no Definition")
    _write(out, found.files)
    return Imported(
        folder=str(out),
        sources=found.sources,
        ops=tuple(found.ops),
        notes=tuple(found.notes),
        refused=found.refused,
    )


def _own(folder: Path, found: _Import) -> None:
    """An export of ours: the source from the format's own file, the contract from our record."""
    try:
        carried = ExportRecord.model_validate_json((folder / CARRIED).read_bytes())
    except (ValidationError, OSError) as error:
        raise VerificationError(
            f"{CARRIED} of {folder.name} is damaged or of another version", "export it again"
        ) from error
    definition: Definition | None = None
    if carried.format == "flashinfer":
        definition = _one(Definition, folder / "definitions")
        solution = _one(Solution, folder / "solutions")
        texts = {source.path: source.content for source in solution.sources}
        text = texts.get(carried.source, "")
    else:
        file = folder / carried.source
        inside = file.resolve().is_relative_to(folder.resolve()) and file.is_file()
        text = file.read_text(encoding="utf-8", errors="replace") if inside else ""
    candidate = Candidate(op=carried.op, language=carried.language, source=text)
    if candidate.digest != carried.digest:
        raise VerificationError(
            f"{carried.source} is not what was exported",
            "evaluate the changed source by itself, or export it again",
        )
    known = load_ops().get(carried.op)
    if known is None:
        if definition is None:
            found.notes.append(
                f"the library has no op {carried.op} and this format carries no reference: import "
                "the flashinfer export of the same patch, too"
            )
        else:
            found.files |= own_op_files(carried.contract, definition)
            found.ops.append(carried.op)
            found.notes.append(
                f"{carried.op}: inputs.py and baselines.py were not carried; plain ones stand in"
            )
    elif known.contract != carried.contract:
        raise VerificationError(
            f"the library's contract of {carried.op} is not the one that this kernel was judged by",
            "use the patcher that exported it, or evaluate the source by itself",
        )
    device = carried.evidence.environment
    name = f"imported_{carried.digest[:8]}"
    kind = device.device_kind if device else ("cpu" if carried.language is Language.CPP else "cuda")
    found.put(candidate, name, kind, "imported from an export of patcher", "export")
    found.notes.append(
        "the evidence stays in the export: a source is judged again where it is used"
    )


def _dataset(folder: Path, found: _Import) -> None:
    """Every Definition of a dataset with its Solutions; Traces only say what sizes to sweep."""
    solutions = _all(Solution, folder / "solutions", found)
    traces = _lines(folder / "workloads", found) + _lines(folder / "traces", found)
    definitions = _all(Definition, folder / "definitions", found)
    names = {definition.name for definition in definitions}
    for definition in definitions:
        _definition(
            definition,
            [each for each in solutions if each.definition == definition.name],
            [each for each in traces if each.definition == definition.name],
            found,
        )
    for solution in solutions:
        if solution.definition not in names:
            found.refused[solution.name] = f"its Definition {solution.definition} is not here"


def _definition(
    definition: Definition, solutions: list[Solution], traces: list[Trace], found: _Import
) -> None:
    try:
        op = op_of(definition, [trace.workload for trace in traces])
    except Refused as reason:
        found.refused[definition.name] = str(reason)
        for solution in solutions:
            found.refused[solution.name] = f"its Definition is refused: {reason}"
        return
    name = op.contract.name
    known = load_ops().get(name)
    if known is not None and known.contract != op.contract:
        found.refused[definition.name] = f"the library has another op {name}"
        return
    if name in found.ops:
        found.refused[definition.name] = f"another Definition is called {name}, too"
        return
    if known is None:
        found.files |= op_files(op.contract, definition)
        found.ops.append(name)
    found.notes += [f"{name}: {note}" for note in op.notes]
    if traces:
        found.notes.append(
            f"{name}: of {len(traces)} workloads and Traces, sizes and scalars gave the sweep; "
            "evaluations are no evidence here, identities are not kept"
        )
    for solution in solutions:
        try:
            candidate, notes = candidate_from(solution, definition, op.contract)
        except Refused as reason:
            found.refused[solution.name] = str(reason)
            continue
        hardware = [each.lower() for each in solution.spec.target_hardware]
        device = "cpu" if hardware == ["cpu"] or candidate.language is Language.CPP else "cuda"
        folder = re.sub(r"[^A-Za-z0-9_-]", "_", solution.name)
        if f"{name}/solutions/{folder}/{candidate.file_name}" in found.files:
            found.refused[solution.name] = f"another Solution is called {folder}, too"
            continue
        summary = solution.description or f"imported from flashinfer-bench: {solution.name}"
        found.put(candidate, folder, device, summary, solution.author)
        found.notes += [f"{solution.name}: {note}" for note in notes]


def _one(kind: Any, folder: Path) -> Any:
    found = _all(kind, folder)
    if len(found) != 1:
        raise VerificationError(
            f"the export has {len(found)} {kind.__name__}s, not one",
            f"to import a whole dataset, leave {CARRIED} out",
        )
    return found[0]


def _all(kind: Any, folder: Path, found: _Import | None = None) -> list[Any]:
    """Every JSON file below; one that is not of its kind is refused by name, or (without `found`)
    an error.
    """
    records = []
    for path in sorted(folder.rglob("*.json")):
        try:
            records.append(_record(kind, path.read_bytes(), path.name))
        except UsageError as error:
            if found is None:
                raise
            found.refused[path.name] = error.message
    return records


def _lines(folder: Path, found: _Import) -> list[Trace]:
    records = []
    for path in sorted(folder.rglob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if line.strip():
                try:
                    records.append(_record(Trace, line, f"{path.name}:{number}"))
                except UsageError as error:
                    found.refused[f"{path.name}:{number}"] = error.message
    return records


def _record(kind: Any, text: bytes, name: str) -> Any:
    try:
        return kind.model_validate(json.loads(text))
    except (ValidationError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).splitlines()[:3])[:300]
        raise UsageError(
            f"{name} is no {kind.__name__} of flashinfer-bench 0.1.2: {problem}",
            "patcher drops no field that it does not know: remove the field, or update patcher",
        ) from error


def _write(out: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = out / name
        if path.exists() and (not path.is_file() or path.read_bytes() != content):
            raise UsageError(f"{path} exists and is another", "choose another --out")
    try:
        for name, content in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}", "choose another --out") from error
