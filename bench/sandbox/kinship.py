"""The descendants of one process, for who looks at them again and again."""

from __future__ import annotations

import os
from collections.abc import Mapping

from patcher.bench.sandbox.process_tree import below, parent_of


class Kinship:
    """Tells the descendants of a process from all others, of which each is looked at once.

    A process that is no descendant never becomes one: a new parent is always an ancestor of the
    former. A process that got the id of another has another folder in `/proc`, by its inode.

    Args:
        pid: the root.
    """

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._strangers: dict[int, int] = {}
        """Inodes of the folders of those that are no descendants, by their ids."""

    def descendants(self) -> set[int]:
        """Ids of the process and all its descendants; empty if it has ended."""
        strangers: dict[int, int] = {}
        inodes: dict[int, int] = {}
        parents: dict[int, int] = {}
        with os.scandir("/proc") as entries:
            for entry in entries:
                if not entry.name.isdigit():
                    continue
                pid, inode = int(entry.name), entry.inode()
                if self._strangers.get(pid) == inode:
                    strangers[pid] = inode
                elif (parent := parent_of(pid)) is not None:
                    inodes[pid], parents[pid] = inode, parent
        found = below(self._root, parents)
        for pid in parents.keys() - found:
            if _comes_from_elsewhere(pid, parents, strangers):
                strangers[pid] = inodes[pid]
        self._strangers = strangers
        return found


def _comes_from_elsewhere(
    pid: int, parents: Mapping[int, int], strangers: Mapping[int, int]
) -> bool:
    """Whether a process that is not below the root has ancestors up to the first, or to a stranger.

    One whose parent ended while all were looked at may be below the root all the same.
    """
    for _ in parents:
        if pid not in parents:
            break
        pid = parents[pid]
    return pid == 0 or pid in strangers
