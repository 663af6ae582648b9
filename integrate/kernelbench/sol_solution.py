"""A candidate of a SOL-ExecBench problem as its Solution (`docs/solution.md` there)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from patcher.bench import Candidate, Language, UsageError
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.model_new import record_of
from patcher.integrate.kernelbench.problem import defined_names
from patcher.integrate.kernelbench.sol_execbench import (
    DEFINITION,
    SOL,
    definition_at,
    shown_name,
)
from patcher.integrate.kernelbench.sol_records import SolDefinition
from patcher.integrate.kernelbench.texts import AnswerFile, written_file

LANGUAGES = {
    Language.TORCH: "pytorch",
    Language.TRITON: "triton",
    Language.CUTEDSL: "cute_dsl",
}
FILE = "kernel.py"


class SolutionFile(AnswerFile):
    """The result of an export to SOL-ExecBench."""

    definition: str
    """The problem that it answers."""


def write_solution(op: str, source: Path, problem: Path, out: Path) -> SolutionFile:
    """Write a candidate as the JSON file of a Solution.

    Args:
        op: as the problem was imported.
        source: the candidate's file.
        problem: its Definition's file, or the folder that has it.
        out: a new file.

    Raises:
        UsageError: the language has no form there, it is another problem, or `out` exists.
    """
    candidate = Candidate.from_file(op, source)
    path = problem / DEFINITION if problem.is_dir() else problem
    try:
        definition = definition_at(path)
    except (Refused, OSError) as error:
        raise UsageError(f"cannot read {path}: {error}", f"give its {DEFINITION}") from error
    text = json.dumps(solution_of(candidate, definition), indent=1) + "\n"
    written_file(out, text)
    return SolutionFile(path=str(out), op=op, definition=definition.name, digest=candidate.digest)


def solution_of(candidate: Candidate, definition: SolDefinition) -> dict[str, Any]:
    """The Solution: the source, and a function with the Definition's names and order.

    Raises:
        UsageError: as `write_solution`.
    """
    contract, record = record_of(candidate.op)
    if not contract.source.startswith(SOL) or record.file != shown_name(definition):
        raise UsageError(
            f"{candidate.op} was imported from {record.file}, not from {definition.name}",
            "give that problem's folder with --problem",
        )
    if candidate.language not in LANGUAGES:
        raise UsageError(
            f"a Solution in {candidate.language} binds itself by PyTorch, which ours do not",
            f"give one in {', '.join(LANGUAGES)}",
        )
    tensors = [name for name, each in definition.inputs.items() if each.shape is not None]
    arguments = [each["tensor"] for each in record.arguments]
    known = dict(zip(arguments, tensors, strict=True))
    known |= dict(zip([each.name for each in contract.written], definition.outputs, strict=True))
    if left := [each.name for each in contract.tensors if each.name not in known]:
        raise UsageError(f"{left[0]} is a constant of the problem", "give another kernel")
    every = {**definition.inputs, **definition.outputs}
    passed = [
        known[each.name] + ("" if every[known[each.name]].shape else ".reshape(1)")
        for each in contract.tensors
    ]
    entry = "run_solution" if "run" in defined_names(candidate.source) else "run"
    given = ", ".join([*definition.inputs, *definition.outputs])
    text = candidate.source.rstrip("\n") + (
        f"\n\n\ndef {entry}({given}):\n    {candidate.op}({', '.join(passed)})\n"
    )
    return {
        "name": f"patcher_{candidate.op}_{candidate.digest[:8]}",
        "definition": definition.name,
        "author": "patcher",
        "description": "Judged by patcher; numbers are those of its workloads.",
        "spec": {
            "languages": [LANGUAGES[candidate.language]],
            "target_hardware": ["LOCAL"],
            "entry_point": f"{FILE}::{entry}",
            "destination_passing_style": True,
            "dependencies": [],
        },
        "sources": [{"path": FILE, "content": text}],
    }
