"""Import KernelBench problems as ops, and `ModelNew` files as their candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from patcher.bench import UsageError, load_ops
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.columns import PRECISIONS, PrecisionColumn, as_given
from patcher.integrate.kernelbench.contract import op_of
from patcher.integrate.kernelbench.op_files import op_files
from patcher.integrate.kernelbench.problem import (
    may_be_problem,
    read_problem,
    size_names,
)
from patcher.integrate.kernelbench.sol_execbench import (
    is_sol,
    read_sol_problem,
    sol_problems,
    sol_size_names,
)
from patcher.integrate.kernelbench.tracing import trace, trace_own


@dataclass(frozen=True)
class ProblemOptions:
    """How problems are imported."""

    precisions: tuple[str, ...] = ("fp32",)
    """Columns, of `PRECISIONS`; each is an op of its own."""
    scale: int = 1
    """Divides the top-level sizes of a file that stay at least 16."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Other values of top-level sizes, by name."""


@dataclass
class Problems:
    """What an import of problems gives."""

    files: dict[str, bytes] = field(default_factory=dict)
    ops: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    notes_by_text: dict[str, list[str]] = field(default_factory=dict)
    """What a note is of: problems, or the ops of a column."""
    refused: dict[str, str] = field(default_factory=dict)


def problem_files(path: Path) -> list[Path]:
    """The problem files at a path: the file, or those of a folder and the folders below it. Those
    that cannot be read are among them, so that they are refused by name."""
    if of_sol := sol_problems(path):
        return of_sol
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    plain = [each for each in found if each.is_file() or not each.exists()]  # no pipes
    return [each for each in plain if each.suffix == ".py" and may_be_problem(each)]


def own_problem_op(path: Path, precision: str, origin: str) -> tuple[str, dict[str, bytes]]:
    """The op of a problem file that this process wrote, which is traced without the sandbox.

    Args:
        path: the file; its code runs here.
        precision: of `PRECISIONS`.
        origin: who wrote it, for the op's texts.

    Returns:
        Name of the op, and its files by path.

    Raises:
        Refused: it cannot be an op; the message is the reason.
    """
    column = _column(precision)
    problem = read_problem(path, 1, {}).model_copy(update={"origin": origin})
    traced = trace_own(path)
    op = op_of(problem, traced, column)
    return op.contract.name, op_files(problem, traced, op, column)


def import_problems(
    paths: list[Path],
    options: ProblemOptions,
    on_progress: Callable[[str, int, int], None] | None = None,
    keep: Callable[[dict[str, bytes]], None] | None = None,
) -> Problems:
    """Trace each problem in the sandbox and write it as one op per precision.

    Args:
        paths: the problem files.
        options: sizes and precisions.
        on_progress: is told each problem before it is traced.
        keep: is given the files of each problem once it is traced.

    Raises:
        UsageError: an unknown precision, or a size that no file has.
    """
    from patcher.bench.sandbox.policy import sandbox_description

    columns = [_column(name) for name in options.precisions]
    if any(is_sol(path) for path in paths) and options.precisions != ProblemOptions.precisions:
        raise UsageError(
            "a problem of SOL-ExecBench has dtypes of its own", "leave out --precision"
        )
    _require_names(paths, options.sizes)
    result = Problems()
    names = [path.name for path in paths]
    for done, path in enumerate(paths):
        # levels may have files of one name
        label = path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
        label = path.parent.name if is_sol(path) else label
        if on_progress:
            on_progress(f"trace ({path.stem})", done, len(paths))
        known = set(result.files)
        try:
            _one(path, columns, options, result)
        except Refused as reason:
            result.refused[label] = str(reason)
        if keep:
            keep({name: data for name, data in result.files.items() if name not in known})
    said = {column.said for column in columns}
    result.notes = [
        f"{len(names)} op{'s' * (len(names) > 1)}: {note}"
        if note in said
        else f"{', '.join(names)}: {note}"
        for note, names in result.notes_by_text.items()
    ]
    result.notes.append(f"the files ran in the sandbox only: {sandbox_description()[1]}")
    return result


def sizes_of(sizes: list[str]) -> dict[str, int]:
    """`NAME=SIZE` options as a table.

    Raises:
        UsageError: one has another form.
    """
    found = {}
    for each in sizes:
        name, _, size = each.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--size {each} is not NAME=SIZE", "as in --size batch_size=64")
        found[name] = int(size)
    return found


def _require_names(paths: list[Path], sizes: Mapping[str, int]) -> None:
    if not sizes:
        return
    known = list(
        dict.fromkeys(
            name
            for path in paths
            for name in (sol_size_names if is_sol(path) else size_names)(path)
        )
    )
    if unknown := [name for name in sizes if name not in known]:
        told = f"the names there: {', '.join(known)}" if known else "leave --size out"
        raise UsageError(f"no problem file gives {unknown[0]!r} a value at its top level", told)


def _column(name: str) -> PrecisionColumn:
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}", f"choose of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _one(
    path: Path, columns: list[PrecisionColumn], options: ProblemOptions, result: Problems
) -> None:
    read = read_sol_problem if is_sol(path) else read_problem
    problem = read(path, options.scale, options.sizes)
    traced = trace(problem)
    if is_sol(path):
        kinds = [each.dtype for each in traced.tensors] + [each.dtype for each in traced.outputs]
        columns = [as_given(kinds)]
    for column in columns:
        op = op_of(problem, traced, column)
        name = op.contract.name
        if name in result.ops:
            raise Refused(f"another problem is called {name}, too")
        known = load_ops().get(name)
        if known is not None and not known.contract.same_terms(op.contract):
            raise Refused(f"the library has another op {name}")
        result.files |= op_files(problem, traced, op, column)
        result.ops.append(name)
        for note in op.notes:
            problems = result.notes_by_text.setdefault(note, [])
            if problem.name not in problems:
                problems.append(problem.name)
        result.notes_by_text.setdefault(column.said, []).append(name)
