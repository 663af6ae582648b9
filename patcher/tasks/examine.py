"""Examine one candidate: compose it, run it, trace it, and hold it against each filter.

This runs in a worker process, since a sampled operator may crash or never end.
"""

from __future__ import annotations

import fcntl
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from patcher.bench import Op, Record, UsageError
from patcher.bench.judge import cases
from patcher.integrate import (
    ProblemOptions,
    Refused,
    import_problems,
    own_problem_op,
)
from patcher.tasks.compose import DeviceKind, ModuleComposition, NoFit, compose
from patcher.tasks.records import Reason
from patcher.tasks.structure import GraphStructure, structure_of

ORIGIN = "patcher tasks"
SAME = 1e-2
"""Results of two inputs that differ by less, relative to their size, are one result."""
_TIMED_CALLS = 5


class Examined(Record):
    """What the filters of one candidate alone say."""

    index: int
    reason: Reason
    detail: str = ""
    composition: ModuleComposition | None = None
    structure: GraphStructure | None = None
    op: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    """Of the op, by path."""
    ms: float = 0.0
    """Median time of eager in float32."""


class _Filtered(Exception):
    def __init__(self, reason: Reason, detail: object = "") -> None:
        lines = str(detail).strip().splitlines() or [""]
        super().__init__(lines[0][:300])
        self.reason: Reason = reason


def examine(seed: int, index: int, device: DeviceKind, compiled: bool, lock: str) -> Examined:
    """Examine candidate `index` of a seed.

    Args:
        compiled: whether `torch.compile` must run it and agree.
        lock: a file that one worker holds at a time, while it times.
    """
    found: dict[str, Any] = {"index": index}
    try:
        found["composition"] = composition = _composed(seed, index, device)
        with tempfile.TemporaryDirectory(prefix="patcher-task-") as folder:
            path = Path(folder) / f"{composition.name}.py"
            path.write_text(composition.source, encoding="utf-8")
            module, inputs, result = _runs(path, seed + index, device)
            name, files = _op_of(path, composition.precision)
            op = written(Path(folder), name, files)
            found |= {"op": name, "files": {key: text.decode() for key, text in files.items()}}
            found["structure"] = _structured(op)
            _told_apart(op)
        if compiled:
            _compiles(module, inputs, result)
        with open(lock, "w", encoding="utf-8") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            found["ms"] = _time_ms(module, inputs, device)
    except _Filtered as filtered:
        return Examined(reason=filtered.reason, detail=str(filtered), **found)
    return Examined(reason="kept", **found)


def library_structure(folder: str) -> GraphStructure:
    """The structure of an op of the library.

    Raises:
        Refused: it cannot be traced.
    """
    return _traced(Op(Path(folder)))


def problem_structure(path: str) -> GraphStructure:
    """The structure of a stranger's problem file, which runs in the sandbox alone.

    Raises:
        Refused: it cannot be traced.
    """
    imported = import_problems([Path(path)], ProblemOptions(scale=16))
    for reason in imported.refused.values():
        raise Refused(reason)
    with tempfile.TemporaryDirectory(prefix="patcher-task-") as folder:
        return _traced(written(Path(folder), imported.ops[0], imported.files))


def _traced(op: Op) -> GraphStructure:
    try:
        return structure_of(op)
    except Exception as error:  # tracing raises what it likes
        raise Refused(f"{type(error).__name__}: {error}"[:400]) from error


def written(folder: Path, name: str, files: dict[str, bytes]) -> Op:
    """Write an op's files and load it."""
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return Op(folder / name)


def _composed(seed: int, index: int, device: DeviceKind) -> ModuleComposition:
    try:
        return compose(seed, index, device)
    except NoFit as reason:
        raise _Filtered("does not fit", reason) from reason


def _runs(path: Path, seed: int, device: DeviceKind) -> tuple[Any, list[Tensor], Tensor]:
    """The module, inputs and their result, which is finite, repeats itself and depends on them."""
    space: dict[str, Any] = {"__name__": "problem"}
    exec(compile(path.read_text(encoding="utf-8"), path.name, "exec"), space)

    def built() -> tuple[Any, list[Tensor]]:
        torch.manual_seed(seed)
        module = space["Model"](*space["get_init_inputs"]()).to(device)
        return module, [each.to(device) for each in space["get_inputs"]()]

    try:
        made = [_called(*built())]
        module, inputs = built()
        made += [_called(module, inputs), _called(module, inputs)]
        other = _called(module, [each.to(device) for each in space["get_inputs"]()])
    except RuntimeError as error:
        raise _Filtered("eager fails", error) from error
    result = made[0]
    if not bool(result.isfinite().all()):
        raise _Filtered("not finite")
    if any(not torch.equal(result, each) for each in made[1:]):
        raise _Filtered("not deterministic")
    size = float(result.double().square().mean().sqrt())
    apart = float((result.double() - other.double()).square().mean().sqrt())
    spread = float(result.double().std(correction=0))
    if apart <= SAME * size or spread <= 1e-6 * size:
        raise _Filtered("constant")
    return module, inputs, result


def _called(module: Any, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        result: Tensor = module(*(each.clone() for each in inputs))
    return result


def _op_of(path: Path, precision: str) -> tuple[str, dict[str, bytes]]:
    try:
        return own_problem_op(path, precision, ORIGIN)
    except Refused as reason:
        raise _Filtered("cannot be an op", reason) from reason


def _structured(op: Op) -> GraphStructure:
    try:
        found = _traced(op)
    except Refused as reason:
        raise _Filtered("no structure", reason) from reason
    if not found.digest:
        raise _Filtered("no structure", "it moves values and computes none")
    return found


def _told_apart(op: Op) -> None:
    """The judge's planted version in low precision must fail, or a verdict would be void."""
    case = cases.Case(op.contract.sweeps[0].points()[0], "normal", 0, ())
    inputs = op.inputs.make(case.point, torch.Generator().manual_seed(0), "normal")
    try:
        expected = cases.expect(op, case, inputs)
        wrong = cases.value_problem(op, [case], [expected], [cases.planted(op, case, inputs)])
    except (RuntimeError, UsageError) as error:  # an operator that lacks the column's dtype
        raise _Filtered("eager fails", error) from error
    if wrong is None:
        raise _Filtered("judge cannot tell", "a version in lower precision passes")


def _compiles(module: Any, inputs: list[Tensor], result: Tensor) -> None:
    torch._dynamo.reset()
    try:
        found = _called(torch.compile(module), inputs)
    except Exception as error:  # so does compiling
        raise _Filtered("compile fails", f"{type(error).__name__}: {error}") from error
    try:
        torch.testing.assert_close(found, result, rtol=1e-2, atol=1e-2)
    except AssertionError as error:
        raise _Filtered("compile differs", error) from error


def _time_ms(module: Any, inputs: list[Tensor], device: DeviceKind) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    with torch.no_grad():
        for call in range(_TIMED_CALLS + 2):
            wait()
            begin = time.perf_counter()
            module(*inputs)
            wait()
            if call >= 2:
                times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)
