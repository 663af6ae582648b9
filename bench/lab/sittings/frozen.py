"""The code that loops began with: a copy, so that the checkout may go on while they wait."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from patcher.bench import MissingError, UsageError
from patcher.bench.machine.environment import ROOT

CODE, COMMITS = "code", "commit.txt"
SOURCES = ("patcher", "bench", "hotspot", "integrate", "kernels")
"""What `import patcher` reads in a checkout."""
CHANGED = " with changes"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "lab", "results")


def freeze(loops: Path, say: Callable[[str], None], commit: str | None = None) -> None:
    """Copy patcher into the folder of loops, unless it is there.

    Args:
        commit: of which commit of this checkout; None: as the checkout stands.

    Raises:
        UsageError: the commit is not in this checkout.
        MissingError: git, or its folder, is not there.
    """
    target = loops / CODE
    if target.exists():
        return
    loops.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=loops, prefix=".code-") as scratch:
        source = ROOT
        if commit:
            source = Path(scratch, "source")
            archive = Path(scratch, "source.tar")
            _git("archive", "-o", str(archive), commit, *SOURCES)
            shutil.unpack_archive(archive, source, filter="data")
        code = Path(scratch, CODE)
        shutil.copytree(source / "patcher", code / "patcher", ignore=LEFT_OUT)
        version = importlib.metadata.version("patcher")  # which a worker tells
        info = code / f"patcher-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: patcher\nVersion: {version}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
        named = commit or commit_here()
        with (loops / COMMITS).open("a", encoding="ascii") as file:
            file.write(f"{named}\n")
        code.rename(target)
    say(f"the loops go on with patcher of commit {named}")


def commit_of(loops: Path) -> str:
    """The commit of the code that the loops go on with; before it, there may have been others.

    Raises:
        UsageError: nobody wrote it down.
    """
    file = loops / COMMITS
    lines = file.read_text(encoding="ascii", errors="replace").split("\n") if file.is_file() else []
    if not (named := [line for line in lines if line]):
        raise UsageError(
            f"{file} does not say of which commit the loops' code is", "write the commit into it"
        )
    return named[-1]


def commit_here() -> str:
    """The commit of this checkout, and whether the code differs from it."""
    changed = _git("status", "--porcelain", "--", *SOURCES, ":!bench/lab", ":!bench/results")
    return _git("rev-parse", "HEAD") + (CHANGED if changed else "")


def full_commit(named: str) -> str:
    """The whole name of a commit of this checkout.

    Raises:
        UsageError: it has none of that name.
    """
    return _git("rev-parse", "--verify", "--end-of-options", f"{named}^{{commit}}")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise MissingError(f"git did not run: {error}", "install git") from error
    if done.returncode:
        raise UsageError(
            f"git {words[0]} in {ROOT}: {done.stderr.strip()}",
            "use a git checkout that has the commit",
        )
    return done.stdout.strip()
