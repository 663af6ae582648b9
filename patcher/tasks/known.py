"""Structures that no task may have: those of benchmarks that a user names, and of our own ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from patcher.bench import Record, load_ops
from patcher.bench.judge import Progress
from patcher.tasks.pool import WorkerPool
from patcher.tasks.records import Reason
from patcher.tasks.structure import GraphStructure

LIKE = 0.9
"""Likeness from which two structures count as one."""


class KnownStructures(Record):
    """`known.json`."""

    against: dict[str, GraphStructure]
    """Of the problems that `--against` names."""
    library: dict[str, GraphStructure]
    """Of our own ops."""
    untraced: dict[str, str]
    """What could not be compared with, and why."""

    @cached_property
    def _digests(self) -> dict[str, tuple[Reason, str]]:
        found: dict[str, tuple[Reason, str]] = {}
        for reason, name, structure in self._each():
            if structure.digest:
                found.setdefault(structure.digest, (reason, f"same structure as {name}"))
        return found

    def _each(self) -> list[tuple[Reason, str, GraphStructure]]:
        theirs: Reason = "like a benchmark's"
        ours: Reason = "like an op of the library"
        return [
            *((theirs, name, each) for name, each in self.against.items()),
            *((ours, name, each) for name, each in self.library.items()),
        ]

    def like(self, structure: GraphStructure) -> tuple[Reason, str] | None:
        """Why a structure is refused; None: it is new."""
        if structure.digest in self._digests:
            return self._digests[structure.digest]
        for reason, name, each in self._each():
            if (likeness := structure.likeness(each)) >= LIKE:
                return reason, f"{likeness:.2f} like {name}"
        return None


def nearest(structure: GraphStructure, among: dict[str, GraphStructure]) -> tuple[str, float]:
    """The most alike, and how alike; an empty name: there is none."""
    ranked = [(structure.likeness(each), name) for name, each in among.items()]
    likeness, name = max(ranked, default=(0.0, ""))
    return name, likeness


def trace_known(
    pool: WorkerPool,
    problems: list[Path],
    report: Progress,
    known: KnownStructures | None = None,
    keep: Callable[[KnownStructures], None] = lambda _: None,
) -> KnownStructures:
    """Trace the problems, in the sandbox, and the library.

    Args:
        pool: what traces.
        problems: files of the benchmarks that a user names.
        report: called with the progress.
        known: what an interrupted call has kept: it is not traced again.
        keep: given all structures so far after each.
    """
    known = known or KnownStructures(against={}, library={}, untraced={})
    places = {False: dict(known.library), True: dict(known.against)}
    untraced = dict(known.untraced)
    wanted: dict[tuple[bool, str], tuple[str, dict[str, str]]] = {
        (False, name): ("library", {"folder": str(op.folder)}) for name, op in load_ops().items()
    }
    for path in problems:
        key = (True, f"{path.resolve().parent.name}/{path.name}")
        wanted[key] = "problem", {"path": str(path)}
    jobs = {
        (against, name): pool.submit(kind, **given)
        for (against, name), (kind, given) in wanted.items()
        if name not in places[against] and name not in untraced
    }
    begun = len(wanted) - len(jobs)
    for done, ((against, name), job) in enumerate(jobs.items()):
        report("known structures", begun + done, len(wanted))
        result, why = job.result()
        if result is None:
            untraced[name] = why
        else:
            places[against][name] = GraphStructure.model_validate(result)
        known = KnownStructures(against=places[True], library=places[False], untraced=untraced)
        keep(known)
    return known
