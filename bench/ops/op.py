"""An op of the kernel library: its contract, reference, inputs, baselines and solutions."""

from __future__ import annotations

import hashlib
import logging
import os
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import ValidationError

from patcher.bench.errors import UsageError
from patcher.bench.machine.environment import ROOT
from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import SIZED, Contract, Sweep
from patcher.bench.ops.op_files import load_file, with_later_points
from patcher.bench.ops.soundness import unsound
from patcher.bench.records import Record, parse_toml, problem, read_source

log = logging.getLogger("patcher")

CONTRACT_HINT = "see docs/tutorials/write-an-op.md, or compare it with `patcher ops show rms_norm`"


class SolutionInfo(Record):
    """`solution.toml` beside a source in `solutions/<name>/`."""

    name: str
    language: Language
    device: Literal["cpu", "cuda"]
    summary: str
    origin: str
    """Who or what wrote it: `hand`, or the loop's run that made it."""


class Op:
    """One folder of `kernels/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "op.toml"
        try:
            named = Contract(**parse_toml(read_source(file)))
            self.contract = with_later_points(named, folder)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {problem(error)}", "fix the file") from error
        except (ValidationError, tomllib.TOMLDecodeError) as error:
            raise UsageError(
                f"{file} is not a valid contract: {problem(error)}", CONTRACT_HINT
            ) from error
        if said := unsound(self.contract):
            raise UsageError(f"{file} is not a valid contract: {said}", CONTRACT_HINT)

    @property
    def name(self) -> str:
        return self.contract.name

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that determines a verdict: contract, reference, inputs and
        baselines, and what these run of other ops.

        Raises:
            UsageError: the contract names a file of another op that is not there.
        """
        found = hashlib.sha256()
        own = ("op.toml", "reference.py", "inputs.py", "baselines.py")
        files = {name: self.folder / name for name in own}
        files |= {name: self.folder.parent / name for name in self.contract.reads}
        for name, path in files.items():
            if name in self.contract.reads and not path.is_file():
                raise UsageError(f"{self.folder / 'op.toml'} reads {name}, which is not there")
            content = path.read_bytes()
            found.update(f"{name}\0{len(content)}\0".encode() + content)
        return found.hexdigest()

    @cached_property
    def reference(self) -> Callable[..., dict[str, Any]]:
        """`reference(**inputs) -> {written tensor: float64 value}`; takes tensors of any dtype."""
        function: Callable[..., dict[str, Any]] = load_file(
            self.folder / "reference.py", "reference"
        ).reference
        return function

    @property
    def served_scalars(self) -> tuple[float, ...]:
        """The contract's scalars as a sweep uses them, whole numbers as int."""
        scalars = self.contract.scalars
        return tuple(int(each.value) if each.type == "int" else each.value for each in scalars)

    @cached_property
    def kept(self) -> Callable[..., dict[str, Any]]:
        """`kept(**inputs) -> {updated tensor: bool mask}`: elements that a call must not change,
        for an op that updates a tensor in part. Without it, no element is checked.
        """
        found: Callable[..., dict[str, Any]] | None = getattr(
            load_file(self.folder / "reference.py"), "kept", None
        )
        return found or (lambda **inputs: {})

    @cached_property
    def derived(self) -> Callable[..., dict[str, Any]] | None:
        """`derived(**tensors after the call, **scalars) -> {written tensor: float64 value}`:
        outputs that other outputs of the same call determine, such as a choice by logits that the
        call writes, or of which several may be right, such as a choice by logits that it does not
        write. They are compared with these values, the others with `reference`. None: there are
        none.
        """
        found: Callable[..., dict[str, Any]] | None = getattr(
            load_file(self.folder / "reference.py"), "derived", None
        )
        return found

    @cached_property
    def control(self) -> Callable[..., dict[str, Any]]:
        """The op in lower precision than the contract requires, which the judge must reject."""
        function: Callable[..., dict[str, Any]] = load_file(
            self.folder / "reference.py", "control"
        ).control
        return function

    @cached_property
    def inputs(self) -> ModuleType:
        """`make(point, generator, regime) -> {tensor: value}` on the generator's device, and
        `REGIMES`; `normal` is the one that is timed.
        """
        return load_file(self.folder / "inputs.py", "make", "REGIMES")

    @cached_property
    def baselines(self) -> dict[str, Callable[[str], Callable[..., Any]]]:
        """Name to factory: `factory(device)` returns a callable, or raises `ImportError` with the
        reason why it does not run on this machine.

        A baseline writes in place, or returns a tuple of the written tensors in contract order.
        """
        found: dict[str, Callable[[str], Callable[..., Any]]] = load_file(
            self.folder / "baselines.py", "BASELINES"
        ).BASELINES
        return found

    @cached_property
    def accuracy_baseline(self) -> str:
        """The baseline whose error against float64 limits a candidate's error.

        Raises:
            UsageError: `baselines.py` names none, or names it by the constant's former spelling.
        """
        module = load_file(self.folder / "baselines.py")
        name: str | None = getattr(module, "ACCURACY_BASELINE", None)
        if name is None:
            former = hasattr(module, "HONEST")
            raise UsageError(
                f"{self.folder / 'baselines.py'} names no ACCURACY_BASELINE",
                "rename its constant HONEST to ACCURACY_BASELINE"
                if former
                else "set ACCURACY_BASELINE to the name in BASELINES that sets the tolerance",
            )
        if name not in self.baselines:
            raise UsageError(
                f"{self.folder / 'baselines.py'} names {name} as ACCURACY_BASELINE, which is not "
                f"among its BASELINES: {', '.join(self.baselines) or 'none'}",
                "set ACCURACY_BASELINE to the name in BASELINES that sets the tolerance",
            )
        return name

    @cached_property
    def accuracy(self) -> Callable[[str], Callable[..., Any]]:
        """Factory of what limits a candidate's error: the accuracy baseline, or `ACCURACY` in
        `baselines.py`, which is never timed. It is for arithmetic that the contract allows and that
        no baseline shows at its worst.
        """
        own: Callable[[str], Callable[..., Any]] | None = getattr(
            load_file(self.folder / "baselines.py"), "ACCURACY", None
        )
        return own or self.baselines[self.accuracy_baseline]

    @property
    def accuracy_name(self) -> str:
        """Of `accuracy`, as verdicts call it."""
        shared = self.baselines[self.accuracy_baseline]
        own = self.accuracy is not shared
        return self.accuracy.__name__.replace("_", " ") if own else self.accuracy_baseline

    def sweep(self, device: str, name: str | None = None) -> Sweep:
        """The sweep of that name, or the first one for the device.

        Args:
            device: `cpu` or `cuda`.
            name: as in the contract, with other sizes after an `@`: `bf16@hidden=4096`.

        Raises:
            UsageError: there is no such sweep, or no kernel of the op has to take such a size.
        """
        sweeps = self.contract.sweeps
        try:
            named = sweep_named(self.contract, name)
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}", "see `patcher ops show`") from error
        found = named if name else next((one for one in sweeps if one.device == device), None)
        if found is None or found.device != device:
            known = ", ".join(f"{sweep.name} ({sweep.device})" for sweep in sweeps)
            raise UsageError(
                f"{self.name} has no sweep {name or ''} for {device}", f"it has: {known}"
            )
        for axis, guard in self.contract.guards.axes.items():
            sizes = {point.axes[axis] for point in found.points() if axis in point.axes}
            for size in sorted(sizes) if SIZED in found.name else ():
                if not guard.takes(size):
                    raise UsageError(
                        f"{self.name} is not for {axis} = {size:,}: its kernels are called where "
                        f"it is {guard}",
                        "give another size, or another op",
                    )
        return found

    def solutions(self) -> Iterator[tuple[SolutionInfo, Candidate]]:
        """Every shipped solution, by folder name."""
        for manifest in sorted(self.folder.glob("solutions/*/solution.toml")):
            folder = manifest.parent
            try:
                fields = parse_toml(manifest.read_text(encoding="utf-8"))
                info = SolutionInfo.model_validate({**fields, "name": folder.name})
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"{manifest} describes no solution: {problem(error)}", "compare it with others"
                ) from error
            source = folder / f"{self.name}{info.language.traits.suffix}"
            yield info, Candidate.from_file(self.name, source, info.language)


def sweep_named(contract: Contract, name: str | None) -> Sweep | None:
    """The contract's sweep of that name, with the sizes and dtypes that the name says after an `@`;
    None if there is no such sweep.

    Raises:
        ValueError: it does not fix such an axis, or has no such dtype.
    """
    base, _, changes = (name or "").partition(SIZED)
    sweep = next((each for each in contract.sweeps if each.name == base), None)
    if sweep is None:
        return None
    sizes: dict[str, int] = {}
    dtypes: dict[str, str] = {}
    values: list[int] = []
    for change in filter(None, changes.split(",")):
        key, _, value = change.partition("=")
        if key in {*sizes, *dtypes, *([sweep.axis] if values else [])}:
            raise ValueError(f"{key} is given twice in {name}")
        if key in sweep.fixed and value.isdecimal():
            sizes[key] = int(value)
        elif key == sweep.axis and all(size.isdecimal() for size in value.split(":")):
            values = [int(size) for size in value.split(":")]
        elif any(choice.get(key) == value for choice in contract.dtype_choices()):
            dtypes[key] = value
        else:
            known = ", ".join([sweep.axis, *sweep.fixed, *contract.dtypes])
            raise ValueError(f"{change} is no size or dtype of {base}, which has {known}")
    return sweep.sized(sizes, dtypes, values)


def library() -> Path:
    """The kernel library: `patcher/kernel_library`, in a checkout a link to `kernels/`.

    Raises:
        UsageError: this installation has none.
    """
    folder = ROOT / "patcher" / "kernel_library"
    if not folder.is_dir():
        raise UsageError(
            "the kernel library is missing from this installation", "reinstall patcher"
        )
    return folder.resolve()


def load_ops() -> dict[str, Op]:
    """Every op by name: the library's, then those in the folders of `$PATCHER_OPS`.

    Relative folders count from the current folder.

    A user's op whose contract is not valid is left out, and logged: see `op_problems`.

    Raises:
        UsageError: a folder of `$PATCHER_OPS` does not exist.
    """
    return _load_ops(user_op_folders())[0]


def user_op_folders() -> str:
    """`$PATCHER_OPS` with absolute folders, for a process with another current folder."""
    folders = os.environ.get("PATCHER_OPS", "").split(os.pathsep)
    return os.pathsep.join(os.path.abspath(folder) for folder in folders if folder)


def op_problems() -> dict[Path, UsageError]:
    """What is wrong with ops in the folders of `$PATCHER_OPS` that `load_ops` leaves out, by the
    op's folder.

    Raises:
        UsageError: see `load_ops`.
    """
    return _load_ops(user_op_folders())[1]


@cache
def _load_ops(more: str) -> tuple[dict[str, Op], dict[Path, UsageError]]:
    found = {op.name: op for op in map(Op, _folders_of_ops(library()))}
    broken: dict[Path, UsageError] = {}
    for folder in map(Path, filter(None, more.split(os.pathsep))):
        if not folder.is_dir():
            raise UsageError(
                f"PATCHER_OPS names {folder}, which is no folder", "fix or unset PATCHER_OPS"
            )
        for each in _folders_of_ops(folder):
            try:
                op = Op(each)
            except UsageError as error:
                log.warning("an op is left out: %s", error.message)
                found.pop(each.name, None)  # which it was to replace
                broken[each] = error
            else:
                found[op.name] = op
    return found, broken


def _folders_of_ops(folder: Path) -> list[Path]:
    # lexists: a link to nothing is an op that is broken
    return [each for each in sorted(folder.iterdir()) if os.path.lexists(each / "op.toml")]


def load_op(name: str) -> Op:
    """The op of that name.

    Raises:
        UsageError: there is no such op, or what `$PATCHER_OPS` has in the folder of that name is
            not valid.
    """
    found, broken = load_ops(), op_problems()
    if name in found:
        return found[name]
    for folder, error in broken.items():
        if folder.name == name:
            raise error
    left_out = "".join(f"; left out: {error.message}" for error in broken.values())
    hint = f"PATCHER_OPS names the folder of your own ops; there are: {', '.join(found)}{left_out}"
    raise UsageError(f"unknown op {name!r}", hint)
