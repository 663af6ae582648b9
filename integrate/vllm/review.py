"""Compare a vLLM with the versions for which the patch points were written, and record it.

`python -m patcher.integrate.vllm.points --tree FOLDER` reads an unpacked wheel without importing
it, and shows the lines that no version read has.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from patcher.integrate.vllm import sources, table
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.tree import Tree


def main(points: Mapping[str, type[VllmPoint]], arguments: Sequence[str] | None = None) -> int:
    """Show what differs, point by point.

    Args:
        points: the patch points by name.
        arguments: of the command line; by default those of this process.

    Returns:
        0 if every part is as in a version read, or is now recorded as read; else 1.

    Raises:
        MissingError: no vLLM is installed, or a folder holds none.
    """
    parser = argparse.ArgumentParser(
        "python -m patcher.integrate.vllm.points",
        description="Compare vLLM's code with the versions for which the patch points were written",
    )
    parser.add_argument(
        "--tree",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="an unpacked wheel; repeatable; by default the installed vLLM",
    )
    parser.add_argument(
        "--write", action="store_true", help="record what is the same as read in this version, too"
    )
    parser.add_argument(
        "--reviewed", action="store_true", help="with --write: also record what differs, as read"
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write the page of roles, versions and models"
    )
    chosen = parser.parse_args(arguments)
    trees = [Tree(folder) for folder in chosen.tree or ()] or [Tree.installed()]
    parts = {name: point.parts for name, point in points.items()}
    left = 0
    for tree in trees:
        left += show(parts, tree)
        if chosen.write:
            left -= record(parts, tree, chosen.reviewed)
    if chosen.table:
        chosen.table.write_text(table.page(points, trees), encoding="utf-8")
    return 1 if left else 0


def show(points: Mapping[str, tuple[str, ...]], tree: Tree) -> int:
    """Print each point's changes; returns the number of parts that no version read has."""
    print(f"vLLM {tree.version()}, compared with {', '.join(sources.versions_read())}")
    changed: dict[str, str] = {}
    for name, parts in points.items():
        found = {change.name: change for change in sources.changes_of(parts, tree)}
        print(f"  {name}: {f'{len(found)} of {len(parts)} parts differ' if found else 'as read'}")
        changed |= {part: change.diff or change.change for part, change in found.items()}
    for part, diff in sorted(changed.items()):
        print(diff if diff.startswith("---") else f"{part}: {diff}, no new line")
    return len(changed)


def record(points: Mapping[str, tuple[str, ...]], tree: Tree, reviewed: bool) -> int:
    """Add the version to `sources.json`, and remove parts that no point names.

    Returns:
        The number of parts recorded that no version read had: 0 unless `reviewed`.
    """
    known, version, added = sources.readings(), tree.version(), 0
    names = {part for parts in points.values() for part in parts}
    kept = {name: reading for name, reading in known.items() if name in names}
    for name in names:
        reading, now = kept.get(name, sources.Reading({})), tree.part(name)
        unread = now.digest not in reading.versions
        if not unread or reviewed:
            kept[name] = reading.and_of(version, now)
            added += unread
    sources.write(kept)
    return added
