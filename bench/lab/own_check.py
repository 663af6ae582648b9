"""KernelBench's own check of a candidate, in the sandbox: the problem's file draws its weights and
its input five times, and `allclose` at 1e-4 compares `Model` with `ModelNew`.

The candidate runs in the process that compares, as there: what this check says is no verdict.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from patcher.bench import Candidate, PatcherError, Record, UsageError
from patcher.bench.sandbox import plain_file
from patcher.bench.toolchains import build
from patcher.bench.toolchains.compilers import run_compiler
from patcher.integrate.kernelbench.model_new import model_new, record_of, source_text
from patcher.judges.languages import device_kind

CHECK_S = 600.0
SCRIPT = """import json, runpy, sys
import torch

problem, device = sys.argv[1:]
theirs = runpy.run_path(problem)
why = ""
try:
    ours = runpy.run_path("answer.py")
    init = theirs["get_init_inputs"]()
    for trial in range(5):
        modules = []
        for kind in (theirs["Model"], ours["ModelNew"]):
            torch.manual_seed(trial)
            modules.append(kind(*init).to(device))
        torch.manual_seed(trial)
        inputs = [x.to(device) if torch.is_tensor(x) else x for x in theirs["get_inputs"]()]
        with torch.no_grad():
            right, found = (module(*inputs) for module in modules)
        if right.shape != found.shape:
            why = "another shape"
        elif not torch.allclose(right, found, atol=1e-4, rtol=1e-4):
            why = f"off by {float((right - found).abs().max()):.3g}"
        if why:
            break
except Exception as error:
    why = f"{type(error).__name__}: {error}"
with open("verdict.json", "w") as file:
    json.dump({"accepted": not why, "why": why[:300]}, file)
"""


class OwnCheck(Record):
    """What KernelBench's check says."""

    accepted: bool | None
    """None: it was not run."""
    why: str = ""


def own_check(candidate: Candidate, problem: Path) -> OwnCheck:
    """Check a candidate of an imported op at the sizes that it was imported with.

    Args:
        problem: the file that the op was imported from.
    """
    try:
        return _checked(candidate, problem)
    except PatcherError as error:
        return OwnCheck(accepted=None, why=error.message)


def _checked(candidate: Candidate, problem: Path) -> OwnCheck:
    contract, record = record_of(candidate.op)
    device = device_kind(candidate.language)
    if device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"a {candidate.language} kernel needs a GPU", "check it where it ran")
    with tempfile.TemporaryDirectory(prefix="patcher-own-check-") as scratch:
        work = Path(scratch)
        file = work / problem.name
        file.write_text(with_changes(source_text(problem), record.changed), encoding="utf-8")
        binding = None
        if not candidate.language.in_python:
            built = build(candidate, contract)
            if built.path is None:
                return OwnCheck(accepted=False, why="it does not compile")
            shutil.copyfile(built.path, work / "kernel.so")
            binding = built.binding
        answer = model_new(candidate, file, binding)
        (work / "answer.py").write_text(answer, encoding="utf-8")
        (work / "check.py").write_text(SCRIPT, encoding="utf-8")
        program = [sys.executable, "-P", "check.py", file.name, device]
        code, log = run_compiler(program, work, CHECK_S, device=device)
        verdict = plain_file(work / "verdict.json", 10_000)
        if code != 0 or verdict is None:
            last = (log.strip().splitlines() or [f"exit code {code}"])[-1]
            return OwnCheck(accepted=False, why=f"its process ended: {last[:300]}")
        try:
            return OwnCheck.model_validate(json.loads(verdict))
        except ValueError:
            return OwnCheck(accepted=False, why="its process wrote no verdict")


def with_changes(text: str, changed: dict[str, str]) -> str:
    """A problem's text with the sizes that its import changed.

    Raises:
        UsageError: the record of the import cannot be read so.
    """
    tree = ast.parse(text)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            said = changed.get(statement.targets[0].id)
            if said is not None:
                before, arrow, after = said.partition(" -> ")
                if not arrow or before != ast.unparse(statement.value):
                    raise UsageError("the problem changed since it was imported", "import it again")
                statement.value = ast.parse(after, mode="eval").body
    return ast.unparse(tree) if changed else text
