"""KernelBench's own check of a candidate, in the sandbox: the problem's file draws its weights and
its input five times, and `allclose` at 1e-4 compares `Model` with `ModelNew`.

With a checkout of KernelBench it is its `eval_kernel_against_ref`, from that folder, on a GPU: once
within its tolerance of today, and once within 1e-2, that of its first versions. Without one it is a
check of the same form, which a CPU can run. Nothing of KernelBench's code is here.

The candidate runs in the process that compares, as there: what this check says is no verdict.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch

from patcher.bench import Candidate, Language, PatcherError, Record, UsageError
from patcher.bench.sandbox import plain_file
from patcher.bench.toolchains import build
from patcher.bench.toolchains.compilers import run_compiler
from patcher.integrate.kernelbench.model_new import model_new, record_of, source_text
from patcher.integrate.kernelbench.problem import assigned
from patcher.judges.languages import device_kind

CHECK_S = 600.0
SCRIPT = """import json, runpy, sys
import torch
from torch.utils._pytree import tree_leaves

problem, device = sys.argv[1:]
theirs = runpy.run_path(problem)
why = ""
try:
    ours = runpy.run_path("answer.py")
    init, words = theirs["get_init_inputs"](), {}
    if len(init) == 2 and isinstance(init[0], list) and isinstance(init[1], dict):
        init, words = init
    for trial in range(5):
        modules = []
        for kind in (theirs["Model"], ours["ModelNew"]):
            torch.manual_seed(trial)
            modules.append(kind(*init, **words).to(device))
        torch.manual_seed(trial)
        inputs = [x.to(device) if torch.is_tensor(x) else x for x in theirs["get_inputs"]()]
        with torch.no_grad():
            rights, founds = (tree_leaves(module(*inputs)) for module in modules)
        if [each.shape for each in rights] != [each.shape for each in founds]:
            why = "another shape"
        for right, found in zip(rights, founds):
            if not why and not torch.allclose(right, found, atol=1e-4, rtol=1e-4):
                why = f"off by {float((right - found).abs().max()):.3g}"
        if why:
            break
except Exception as error:
    why = f"{type(error).__name__}: {error}"
with open("verdict.json", "w") as file:
    json.dump({"accepted": not why, "why": why[:300]}, file)
"""


THEIRS = """import importlib, json, sys, types
import torch


class Unused(types.ModuleType):
    # of a package that is not here, and that asks models or shows progress
    def __getattr__(self, name):
        if name.startswith("__"):  # such as __file__, which inspect reads of every module
            raise AttributeError(name)
        return lambda *given, **named: None


sys.path.insert(0, "theirs")
for name in ("dotenv", "tqdm", "openai", "litellm", "requests"):
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = Unused(name)
from kernelbench import eval as theirs

problem, backend = sys.argv[1:]
texts = [open(name).read() for name in (problem, "answer.py")]


def say(tolerance):
    if tolerance is not None:
        theirs.get_tolerance_for_precision = lambda precision: tolerance
    found = theirs.eval_kernel_against_ref(
        *texts,
        num_correct_trials=5,
        measure_performance=False,
        backend=backend,
        device=torch.device("cuda:0"),
        precision=torch.float32,
    )
    if found is None:
        return None, "it gave no answer"
    accepted = bool(found.compiled and found.correctness)
    words = {name: str(found.metadata[name]) for name in WORDS if name in found.metadata}
    return accepted, "" if accepted else ", ".join(words.values())[:300] or "refused"


WORDS = ("compilation_error", "runtime_error", "correctness_issue", "max_difference")
accepted, why = say(None)
loose, loose_why = say(1e-2)
with open("verdict.json", "w") as file:
    json.dump({"accepted": accepted, "why": why, "loose": loose, "loose_why": loose_why}, file)
"""


class OwnCheck(Record):
    """What KernelBench's check says."""

    accepted: bool | None
    """None: it was not run."""
    why: str = ""
    loose: bool | None = None
    """Within 1e-2, where KernelBench's code was asked."""
    loose_why: str = ""
    by: Literal["form", "kernelbench"] = "form"
    """A check of the same form, or KernelBench's own code."""


def own_check(candidate: Candidate, problem: Path, checkout: Path | None = None) -> OwnCheck:
    """Check a candidate of an imported op at the sizes that it was imported with.

    Args:
        problem: the file that the op was imported from.
        checkout: KernelBench's repository, whose code checks; None: a check of the same form.
    """
    try:
        said = _checked(candidate, problem, checkout)
    except PatcherError as error:
        said = OwnCheck(accepted=None, why=error.message)
    return said.model_copy(update={"by": "kernelbench" if checkout else "form"})


def runs_here(language: str) -> bool:
    """Whether this machine has the device that a kernel needs."""
    return device_kind(Language(language)) == "cpu" or torch.cuda.is_available()


def package_of(checkout: Path) -> Path:
    """KernelBench's package in its checkout.

    Raises:
        UsageError: it is not there.
    """
    package = checkout / "src" / "kernelbench"
    if not (package / "eval.py").is_file():
        raise UsageError(f"{package} has no eval.py", "give the folder of KernelBench's repository")
    return package


def _checked(candidate: Candidate, problem: Path, checkout: Path | None) -> OwnCheck:
    contract, record = record_of(candidate.op)
    device = device_kind(candidate.language)
    if checkout and not torch.cuda.is_available():
        raise UsageError("KernelBench's own code needs a GPU", "check it where there is one")
    if not runs_here(candidate.language):
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
        (work / "check.py").write_text(THEIRS if checkout else SCRIPT, encoding="utf-8")
        program = [sys.executable, "-P", "check.py", file.name, device]
        if checkout:
            shutil.copytree(package_of(checkout), work / "theirs" / "kernelbench")
            program[-1] = "triton" if candidate.language is Language.TRITON else "cuda"
        known = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # where torch or pydantic may be
        code, log = run_compiler(program, work, CHECK_S, known, device=device)
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
    left = set(changed)
    for name, value, put in assigned(tree):
        if name in changed:
            before, arrow, after = changed[name].partition(" -> ")
            if not arrow or before != ast.unparse(value):
                raise UsageError("the problem changed since it was imported", "import it again")
            put(ast.parse(after, mode="eval").body)
            left.discard(name)
    if left:
        raise UsageError(f"the problem gives {min(left)} no value", "import it again")
    return ast.unparse(ast.fix_missing_locations(tree)) if changed else text
