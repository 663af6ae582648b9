"""The Python files of an op, loaded by path: `kernels/` and a user's folder are data, no packages.

Anyone may write an op, so what is wrong with a file is said with its path and what to fix.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from patcher.bench.errors import PatcherError, UsageError


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
