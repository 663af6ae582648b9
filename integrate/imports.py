"""Import a kernel that `patcher export` wrote, or a flashinfer-bench dataset, without running it.

The result has the layout of `kernels/`: op folders and sources. A Solution becomes one source: its
own text plus a function with the op's name and our order of arguments (tensors, then scalars). A
Definition becomes an op whose tensors are only read or only written; its reference is the op's.
Notes list what a person should improve; what cannot be imported is refused with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Record,
    SolutionInfo,
    UsageError,
    VerificationError,
    load_ops,
    parse_json,
    problem,
    write_atomically,
)
from patcher.integrate.formats import CARRIED, ExportRecord
from patcher.integrate.formats.foreign_contract import Refused, op_of
from patcher.integrate.formats.foreign_schema import Definition, Solution, Trace
from patcher.integrate.formats.foreign_source import candidate_from
from patcher.integrate.formats.op_folder import op_files, own_op_files
from patcher.integrate.kernelbench.imports import ProblemOptions, import_problems, problem_files
from patcher.integrate.kernelbench.sol_execbench import sol_problems


class ImportResult(Record):
    """The result of an import."""

    schema_version: int = SCHEMA_VERSION
    folder: str
    """The folder that was written. To evaluate a source in it:
    `PATCHER_OPS=FOLDER patcher evaluate OP SOURCE`."""
    sources: dict[str, str]
    """Digest of each candidate by its path in the folder."""
    ops: tuple[str, ...]
    """New ops, which the library lacks; each has a folder."""
    notes: tuple[str, ...]
    """What was lost or should be reviewed, one sentence each."""
    refused: dict[str, str]
    """The reason why something was not imported, by its name."""


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
        document = info.model_dump(mode="json", exclude={"name"})
        self.files[f"{folder}/solution.toml"] = tomlkit.dumps(document).encode()
        self.files[f"{folder}/{candidate.file_name}"] = candidate.source.encode()
        self.sources[f"{folder}/{candidate.file_name}"] = candidate.digest


def import_kernel(
    path: Path,
    out: Path,
    problems: ProblemOptions | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> ImportResult:
    """Import the kernels of an export or of a flashinfer-bench dataset as sources and op folders,
    or KernelBench problems as op folders.

    Args:
        path: a folder that `patcher export` made, a flashinfer-bench dataset (`definitions/` and
            `solutions/`), the JSON file of one Definition, or a KernelBench problem or a folder
            of them.
        out: the folder to write, with the layout of `kernels/`: `OP/solutions/NAME/`, and
            `OP/op.toml` for new ops.
        problems: sizes and precisions of KernelBench problems; each is written once it is traced.
        on_progress: is told stage, done and total as problems are traced.

    Returns:
        What was written, what was refused, and notes.

    Raises:
        UsageError: nothing can be imported, or a different file exists where one would be written.
        VerificationError: an export was changed, or its contract differs from the library's.
    """
    result = _Import()
    if (path / CARRIED).is_file():
        _own(path, result)
    elif (path / "definitions").is_dir():
        _dataset(path, result)
    elif path.suffix == ".json" and path.is_file() and not sol_problems(path):
        definition = _record(Definition, path.read_bytes(), path.name)
        _definition(definition, [], [], result)
    elif found := problem_files(path):
        keep = partial(_write, out)
        traced = import_problems(found, problems or ProblemOptions(), on_progress, keep)
        result.files |= traced.files
        result.ops += traced.ops
        result.notes += traced.notes
        result.refused |= traced.refused
    elif (path / "build").is_dir() or (path / "metadata.json").is_file():
        raise UsageError(
            f"{path} is a kernel repository without {CARRIED}, so it has no contract or reference",
            "import a repository that `patcher export` made",
        )
    else:
        raise UsageError(
            f"{path} is no export, no flashinfer-bench dataset and no problem of KernelBench or "
            "SOL-ExecBench",
            f"give a folder with {CARRIED} or definitions/, the JSON file of a Definition, a "
            "Python file with Model, get_inputs and get_init_inputs, or a folder with "
            "definition.json and workload.jsonl",
        )
    if not result.files:
        why = "; ".join(f"{name}: {reason}" for name, reason in result.refused.items())
        raise UsageError(f"nothing of {path} can be imported", why or "it holds no Definition")
    _write(out, result.files)
    return ImportResult(
        folder=str(out),
        sources=result.sources,
        ops=tuple(result.ops),
        notes=tuple(result.notes),
        refused=result.refused,
    )


def import_model_new(op: str, path: Path, out: Path) -> ImportResult:
    """Import a `ModelNew` file of KernelBench as a candidate of an imported problem.

    Args:
        op: name of the op, in the library or in `$PATCHER_OPS`.
        path: the file.
        out: the folder to write, with the layout of `kernels/`.

    Raises:
        UsageError: the op comes from no problem, the file cannot be read or defines no `ModelNew`,
            or a different file exists where one would be written.
    """
    from patcher.integrate.kernelbench.model_new import candidate_of, source_text

    candidate = candidate_of(op, source_text(path))
    result = _Import()
    name = re.sub(r"\W", "_", path.stem, flags=re.ASCII)
    device = candidate.language.traits.device or "cuda"
    result.put(candidate, name, device, f"a ModelNew of KernelBench for {op}", "KernelBench")
    _write(out, result.files)
    return ImportResult(
        folder=str(out), sources=result.sources, ops=(), notes=tuple(result.notes), refused={}
    )


def _own(folder: Path, result: _Import) -> None:
    """Import an export of patcher: source from the format's own file, contract from our record."""
    try:
        record = ExportRecord.model_validate_json((folder / CARRIED).read_bytes())
    except (ValidationError, OSError) as error:
        raise VerificationError(
            f"{CARRIED} of {folder.name} is damaged or of another version", "export it again"
        ) from error
    definition: Definition | None = None
    if record.format == "flashinfer":
        definition = _one(Definition, folder / "definitions")
        solution = _one(Solution, folder / "solutions")
        texts = {source.path: source.content for source in solution.sources}
        text = texts.get(record.source, "")
    else:
        file = folder / record.source
        inside = file.resolve().is_relative_to(folder.resolve()) and file.is_file()
        text = file.read_text(encoding="utf-8", errors="replace") if inside else ""
    candidate = Candidate(op=record.op, language=record.language, source=text)
    if candidate.digest != record.digest:
        raise VerificationError(
            f"{record.source} is not what was exported",
            "evaluate the changed source alone, or export it again",
        )
    known = load_ops().get(record.op)
    if known is None:
        if definition is None:
            result.notes.append(
                f"the library has no op {record.op} and this format has no reference: import "
                "the flashinfer export of the same patch, too"
            )
        else:
            result.files |= own_op_files(record.contract, definition)
            result.ops.append(record.op)
            result.notes.append(
                f"{record.op}: the export has no inputs.py and baselines.py; generic ones are used"
            )
    elif not known.contract.same_terms(record.contract):
        raise VerificationError(
            f"this kernel was judged by another contract of {record.op} than the library's",
            "use the patcher that exported it, or evaluate the source alone",
        )
    device = record.evidence.environment
    name = f"imported_{record.digest[:8]}"
    kind = (
        device.device_kind
        if device
        else ("cpu" if record.language.traits.device == "cpu" else "cuda")
    )
    result.put(candidate, name, kind, "imported from an export of patcher", "export")
    result.notes.append("the evidence is not imported: judge the source again on this machine")


def _dataset(folder: Path, result: _Import) -> None:
    """Import every Definition with its Solutions; Workloads and Traces only supply sizes."""
    solutions = _all(Solution, folder / "solutions", result)
    traces = _lines(folder / "workloads", result) + _lines(folder / "traces", result)
    definitions = _all(Definition, folder / "definitions", result)
    names = {definition.name for definition in definitions}
    for definition in definitions:
        _definition(
            definition,
            [each for each in solutions if each.definition == definition.name],
            [each for each in traces if each.definition == definition.name],
            result,
        )
    for solution in solutions:
        if solution.definition not in names:
            result.refused[solution.name] = f"its Definition {solution.definition} is missing"


def _definition(
    definition: Definition, solutions: list[Solution], traces: list[Trace], result: _Import
) -> None:
    try:
        op = op_of(definition, [trace.workload for trace in traces])
    except Refused as reason:
        result.refused[definition.name] = str(reason)
        for solution in solutions:
            result.refused[solution.name] = f"its Definition is refused: {reason}"
        return
    name = op.contract.name
    known = load_ops().get(name)
    if known is not None and not known.contract.same_terms(op.contract):
        result.refused[definition.name] = f"the library has another op {name}"
        return
    if name in result.ops:
        result.refused[definition.name] = f"another Definition is called {name}, too"
        return
    if known is None:
        result.files |= op_files(op.contract, definition)
        result.ops.append(name)
    result.notes += [f"{name}: {note}" for note in op.notes]
    if traces:
        result.notes.append(
            f"{name}: the sweep has the sizes and scalars of {len(traces)} workloads and Traces; "
            "their evaluations and identities are not imported"
        )
    for solution in solutions:
        try:
            candidate, notes = candidate_from(solution, definition, op.contract)
        except Refused as reason:
            result.refused[solution.name] = str(reason)
            continue
        hardware = [each.lower() for each in solution.spec.target_hardware]
        device = (
            "cpu" if hardware == ["cpu"] or candidate.language.traits.device == "cpu" else "cuda"
        )
        folder = re.sub(r"[^A-Za-z0-9_-]", "_", solution.name)
        if f"{name}/solutions/{folder}/{candidate.file_name}" in result.files:
            result.refused[solution.name] = f"another Solution is called {folder}, too"
            continue
        summary = solution.description or f"imported from flashinfer-bench: {solution.name}"
        result.put(candidate, folder, device, summary, solution.author)
        result.notes += [f"{solution.name}: {note}" for note in notes]


def _one(kind: Any, folder: Path) -> Any:
    records = _all(kind, folder)
    if len(records) != 1:
        raise VerificationError(
            f"the export has {len(records)} {kind.__name__}s, not one",
            f"to import a whole dataset, remove {CARRIED}",
        )
    return records[0]


def _all(kind: Any, folder: Path, result: _Import | None = None) -> list[Any]:
    """Read every JSON file in a folder; a malformed one is refused, or an error without `found`."""
    records = []
    for path in sorted(folder.rglob("*.json")):
        try:
            records.append(_record(kind, path.read_bytes(), path.name))
        except UsageError as error:
            if result is None:
                raise
            result.refused[path.name] = error.message
    return records


def _lines(folder: Path, result: _Import) -> list[Trace]:
    records = []
    for path in sorted(folder.rglob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if line.strip():
                try:
                    records.append(_record(Trace, line, f"{path.name}:{number}"))
                except UsageError as error:
                    result.refused[f"{path.name}:{number}"] = error.message
    return records


def _record(kind: Any, text: bytes, name: str) -> Any:
    try:
        return kind.model_validate(parse_json(text))
    except ValueError as error:
        raise UsageError(
            f"{name} is not a {kind.__name__} of flashinfer-bench 0.1.2: {problem(error):.300}",
            "remove the unknown field, or update patcher",
        ) from error


def _write(out: Path, files: dict[str, bytes]) -> None:
    """Write each file whole, a contract last, so that a kill leaves no half of an op."""
    try:
        for name, content in files.items():
            path = out / name
            if path.exists() and (not path.is_file() or path.read_bytes() != content):
                raise UsageError(f"{path} exists and differs", "choose another --out")
        for name in sorted(files, key=lambda name: name.endswith("/op.toml")):
            write_atomically(out / name, files[name])
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}", "choose another --out") from error
