"""Compare an engine with the versions for which its patch points were written, and record it.

`python -m patcher.integrate.vllm.points --tree FOLDER` reads an unpacked wheel without importing
it, and shows the lines that no version read has; for SGLang, say `sglang` instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from patcher.integrate.source_record import Reading, SourceRecord
from patcher.integrate.source_tree import SourceTree


class ReadPoint(Protocol):
    """A patch point whose parts are recorded by version."""

    parts: ClassVar[tuple[str, ...]]
    """Names `module:attribute` of the code that it replaces or relies on."""


def main(
    points: Mapping[str, type[ReadPoint]],
    read: SourceRecord,
    arguments: Sequence[str] | None = None,
    page: Callable[[Sequence[Any]], str] | None = None,
) -> int:
    """Show what differs, point by point.

    Args:
        points: the patch points by name.
        read: the record of the engine.
        arguments: of the command line; by default those of this process.
        page: makes the page of docs from trees, if the engine has one.

    Returns:
        0 if every part is as in a version read, or is now recorded as read; else 1.

    Raises:
        MissingError: the engine is not installed, or a folder does not hold it.
    """
    title = read.tree.title
    parser = argparse.ArgumentParser(
        f"python -m patcher.integrate.{read.tree.package}.points",
        description=f"Compare {title}'s code with the versions for which patch points were written",
    )
    parser.add_argument(
        "--tree",
        type=Path,
        action="append",
        metavar="FOLDER",
        help=f"an unpacked wheel; repeatable; by default the installed {title}",
    )
    parser.add_argument(
        "--write", action="store_true", help="record what is the same as read in this version, too"
    )
    parser.add_argument(
        "--reviewed", action="store_true", help="with --write: also record what differs, as read"
    )
    if page is not None:
        parser.add_argument(
            "--table",
            type=Path,
            metavar="FILE",
            help="write the page of roles, versions and models",
        )
    chosen = parser.parse_args(arguments)
    trees = [read.tree(folder) for folder in chosen.tree or ()] or [read.tree.installed()]
    parts = {name: point.parts for name, point in points.items()}
    left = 0
    for tree in trees:
        left += show(parts, read, tree)
        if chosen.write:
            left -= record(parts, read, tree, chosen.reviewed)
    if page is not None and chosen.table:
        chosen.table.write_text(page(trees), encoding="utf-8")
    return 1 if left else 0


def show(points: Mapping[str, tuple[str, ...]], read: SourceRecord, tree: SourceTree) -> int:
    """Print each point's changes; returns the number of parts that no version read has."""
    print(f"{tree.title} {tree.version()}, compared with {', '.join(read.versions_read())}")
    changed: dict[str, str] = {}
    for name, parts in points.items():
        found = {change.name: change for change in read.changes_of(parts, tree)}
        print(f"  {name}: {f'{len(found)} of {len(parts)} parts differ' if found else 'as read'}")
        changed |= {part: change.diff or change.change for part, change in found.items()}
    for part, diff in sorted(changed.items()):
        print(diff if diff.startswith("---") else f"{part}: {diff}, no new line")
    return len(changed)


def record(
    points: Mapping[str, tuple[str, ...]], read: SourceRecord, tree: SourceTree, reviewed: bool
) -> int:
    """Add the version to the record, and remove parts that no point names.

    Returns:
        The number of parts recorded that no version read had: 0 unless `reviewed`.
    """
    known, version, added = read.readings(), tree.version(), 0
    names = {part for parts in points.values() for part in parts}
    kept = {name: reading for name, reading in known.items() if name in names}
    for name in names:
        reading, now = kept.get(name, Reading({})), tree.part(name)
        unread = now.digest not in reading.versions
        if not unread or reviewed:
            kept[name] = reading.and_of(version, now)
            added += unread
    read.write(kept)
    return added
