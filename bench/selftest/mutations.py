"""Mutation tests of the judge: if a guard is removed, the corpus must fail.

`mutations.toml` in the corpus names each guard, its text in the judge's source, the replacement,
and the candidates of which at least one must then have another outcome.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.machine.environment import ROOT
from patcher.bench.ops.op import library
from patcher.bench.records import Record, parse_toml
from patcher.bench.selftest.cases import matching
from patcher.bench.selftest.scorecard import Progress, corpus_folder, run_corpus


class Mutation(Record):
    """The removal of one guard."""

    guard: str
    """What the guard does."""
    file: str
    """File under bench/."""
    old: str
    """Text of the guard, which occurs once in the file."""
    new: str
    """Replacement."""
    only: str
    """Candidates to evaluate: a regular expression on KIND/NAME."""
    device: str = "cpu"
    """`cpu` or `cuda`."""


class Killed(Record):
    """Result of one mutation."""

    guard: str
    """What the guard does."""
    killed: bool
    """Whether the outcome of a candidate changed."""
    by: tuple[str, ...]
    """Candidates whose outcome changed."""


def mutations(folder: Path | None = None) -> list[Mutation]:
    """Read the mutations of the corpus.

    Raises:
        UsageError: there is no corpus, or a mutation does not match the judge's source.
    """
    path = corpus_folder(folder) / "mutations.toml"
    root = ROOT / "patcher" / "bench"
    entries = [Mutation(**each) for each in parse_toml(path.read_text("utf-8"))["mutation"]]
    counts = [(root / each.file).read_text("utf-8").count(each.old) for each in entries]
    found = zip(entries, counts, strict=True)
    misfits = [f"{each.guard!r} is {n} times in {each.file}" for each, n in found if n != 1]
    if misfits:
        raise UsageError(f"{path.name}: the text of {', of '.join(misfits)}")
    return entries


def survived(
    device: str, report: Progress, only: str = "", folder: Path | None = None
) -> Iterator[Killed]:
    """Remove one guard after another in a copy of the judge, and evaluate the corpus.

    Args:
        device: `cpu` or `cuda`.
        report: called with (stage, done, total).
        only: text that the guard's description must contain.
        folder: folder of the corpus; None: that of this checkout.

    Raises:
        UsageError: no guard matches `only`, or no case that of a guard.
    """
    folder = corpus_folder(folder)
    chosen = [each for each in mutations(folder) if each.device == device and only in each.guard]
    if not chosen:
        raise UsageError(
            f"no guard on {device} has {only!r} in its description", "leave --only out"
        )
    for each in chosen:
        matching(folder, device, each.only)  # else its guard would seem noticed
    # what is built without a guard must not be found by a judge that has it
    with tempfile.TemporaryDirectory(prefix="patcher-mutants-") as cache:
        yield from _survived(device, chosen, report, folder, Path(cache))


def _survived(
    device: str, chosen: Sequence[Mutation], report: Progress, folder: Path, cache: Path
) -> Iterator[Killed]:
    for index, each in enumerate(chosen):
        report("mutations", index, len(chosen))
        with tempfile.TemporaryDirectory(prefix="patcher-mutant-") as scratch:
            copy = Path(scratch) / "patcher"
            ignore = shutil.ignore_patterns("__pycache__", "results", "kernel_library")
            shutil.copytree(ROOT / "patcher", copy, ignore=ignore)
            (copy / "kernel_library").symlink_to(library())
            target = copy / "bench" / each.file
            text = target.read_text(encoding="utf-8")
            target.write_text(text.replace(each.old, each.new), encoding="utf-8")
            try:
                results = run_corpus(
                    device, each.only, _quiet, folder, root=Path(scratch), cache=cache
                )
                by = tuple(f"{r.kind}/{r.name}" for r in results if not r.passed)
            except PatcherError as error:
                by = (f"the judge: {error.message[-200:]}",)
        yield Killed(guard=each.guard, killed=bool(by), by=by)
    report("mutations", len(chosen), len(chosen))


def _quiet(_stage: str, _done: int, _total: int) -> None:
    return
