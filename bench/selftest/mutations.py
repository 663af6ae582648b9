"""Does each guard of the judge earn its keep? Delete one, and the corpus must fail.

`mutations.toml` beside the corpus names each guard, the text of the judge that is it, what stands
there instead, and which candidates must then come out otherwise.
"""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.machine.environment import ROOT
from patcher.bench.ops.op import library
from patcher.bench.records import Record
from patcher.bench.selftest.scorecard import Progress, corpus_folder, run_corpus


class Mutation(Record):
    """One guard taken out."""

    guard: str
    file: str
    old: str
    new: str
    only: str
    """Which candidates are judged: a regular expression on KIND/NAME."""
    device: str = "cpu"


class Killed(Record):
    """What the corpus said of it."""

    guard: str
    killed: bool
    """Whether a candidate came out otherwise than it must."""
    by: tuple[str, ...]
    """Which."""


def mutations(folder: Path | None = None) -> list[Mutation]:
    """Those of the corpus.

    Raises:
        UsageError: there are none, or one does not fit the judge's text.
    """
    path = corpus_folder(folder) / "mutations.toml"
    root = ROOT / "patcher" / "bench"
    found = [Mutation(**each) for each in tomllib.loads(path.read_text("utf-8"))["mutation"]]
    for each in found:
        count = (root / each.file).read_text(encoding="utf-8").count(each.old)
        if count != 1:
            place = f"{count} times in {each.file}"
            raise UsageError(f"{path.name}: the text of {each.guard!r} is {place}")
    return found


def survived(
    device: str, report: Progress, only: str = "", folder: Path | None = None
) -> Iterator[Killed]:
    """Take out one guard after the other, in a copy, and judge the corpus in `folder`."""
    folder = corpus_folder(folder)
    root = ROOT / "patcher" / "bench"
    chosen = [each for each in mutations(folder) if each.device == device and only in each.guard]
    for index, each in enumerate(chosen):
        report("mutations", index, len(chosen))
        with tempfile.TemporaryDirectory(prefix="patcher-mutant-") as scratch:
            copy = Path(scratch) / "patcher"
            ignore = shutil.ignore_patterns("__pycache__", "results", "kernel_library")
            shutil.copytree(root.parent, copy, ignore=ignore)
            (copy / "kernel_library").symlink_to(library())
            target = copy / "bench" / each.file
            text = target.read_text(encoding="utf-8")
            target.write_text(text.replace(each.old, each.new), encoding="utf-8")
            try:
                results = run_corpus(device, each.only, _quiet, folder, root=Path(scratch))
                by = tuple(f"{r.kind}/{r.name}" for r in results if not r.passed)
            except PatcherError as error:
                by = (f"the judge: {error.message[-200:]}",)
        yield Killed(guard=each.guard, killed=bool(by), by=by)
    report("mutations", len(chosen), len(chosen))


def _quiet(_stage: str, _done: int, _total: int) -> None:
    return
