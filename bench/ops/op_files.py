"""The Python files of an op, loaded by path: `kernels/` and a user's folder are data, no packages.

Anyone may write an op, so what is wrong with a file is said with its path and what to fix. Patch
points that a contract of the library does not name come from `points.toml` here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tomllib
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.machine.environment import ROOT
from patcher.bench.ops.contract import Contract, PatchPointSpec


def load_file(path: Path, *needed: str) -> ModuleType:
    """The module of an op's file, run once.

    Args:
        path: the file.
        needed: names that it must define.

    Raises:
        UsageError: it cannot be read or run, or lacks such a name.
    """
    # two libraries may each have an op of the same name
    where = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"_patcher_op_{path.parent.name}_{path.stem}_{where}"
    module = sys.modules.get(name) or _run(path, name)
    for each in needed:
        if not hasattr(module, each):
            raise UsageError(f"{path} defines no {each}", f"add it: {_SEE}")
    return module


_SEE = "see docs/tutorials/write-an-op.md"


def _run(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path} is missing", f"every op has this file: {_SEE}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except PatcherError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}",
            f"fix {line_of(error, path)}",
        ) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def line_of(error: BaseException, path: Path) -> str:
    """The last line of the file that an error went through, in words; else the file."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"line {error.lineno} of {path.name}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"line {lines[-1]} of {path.name}" if lines else path.name


@cache
def points_by_op() -> dict[str, tuple[PatchPointSpec, ...]]:
    """What `points.toml` says, by the op's name."""
    text = Path(__file__).with_name("points.toml").read_text(encoding="utf-8")
    return {
        op: tuple(PatchPointSpec.model_validate(each) for each in points)
        for op, points in tomllib.loads(text).items()
    }


def later_points(folder: Path) -> tuple[PatchPointSpec, ...]:
    """Those of the op in a folder of the library; a user's op of that name has none."""
    library = (ROOT / "patcher" / "kernel_library").resolve()
    return points_by_op().get(folder.name, ()) if folder.resolve().parent == library else ()


def with_later_points(contract: Contract, folder: Path) -> Contract:
    """The contract, with these after its own. `op.toml` stays as it is: with one more it would have
    another digest, and every verdict on its kernels would be of no use."""
    points = (*contract.patch_points, *later_points(folder))
    return contract.model_copy(update={"patch_points": points})
