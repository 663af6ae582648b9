"""What the tests of packaging share: archives built of a copy, and environments that hold just what
a requirement brings."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))


def copy_of_repository(target: Path) -> Path:
    """Building writes beside the sources, so it happens on a copy."""
    ignore = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "patcher-runs")
    shutil.copytree(ROOT, target, ignore=ignore, symlinks=True)
    return target


def build_wheel(source: Path, folder: Path) -> Path:
    """The wheel of a checkout or an sdist."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def build_sdist(source: Path, folder: Path) -> Path:
    """The sdist of a checkout, by the build backend that `pyproject.toml` names."""
    folder.mkdir(parents=True, exist_ok=True)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, check=True, capture_output=True
    )
    [archive] = folder.glob("*.tar.gz")
    return archive


def closure(names: Sequence[str]) -> list[str]:
    """The distributions that these requirements bring here, without patcher itself."""
    found: dict[str, None] = {}
    waiting = [Requirement(name) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = name, frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        if name != "patcher":
            found[name] = None
        waiting += _needs(name, requirement.extras)
    return sorted(found)


def _needs(name: str, extras: set[str]) -> Iterator[Requirement]:
    for line in importlib.metadata.requires(name) or ():
        need = Requirement(line)
        marker = need.marker
        if marker is None or any(marker.evaluate({"extra": one}) for one in ("", *extras)):
            yield need


def make_environment(folder: Path, *requirements: str) -> Path:
    """A Python environment with what the requirements bring, and nothing else; its `python`.

    No download: files are hard links to those of this environment.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for name in closure(requirements):
        for file in importlib.metadata.files(name) or ():
            source = SITE / file
            if ".." in file.parts or not source.is_file():
                continue
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                _link(source, target)
    return folder / "bin" / "python"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def install(python: Path, wheel: Path) -> None:
    """Put a wheel into an environment, as pip does, without what it requires."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "-q"),
            *("--no-deps", "--no-index", str(wheel)),
        ],
        check=True,
        capture_output=True,
    )


def bare_variables(home: Path, **more: str) -> dict[str, str]:
    """Variables for a process that must find patcher in its environment alone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PATCHER_", "PYTHON", "VIRTUAL_ENV"))
    }
    return {**kept, "PATCHER_HOME": str(home), **more}
