"""Which ops are trained or evaluated on."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from patcher.bench import UsageError, load_op
from patcher.tasks import load_tasks
from patcher.tasks.records import OPS, Split


def choose_ops(
    tasks: Path | None,
    names: Sequence[str],
    split: Split,
    count: int | None = None,
    seed: int = 0,
    most_operators: int | None = None,
) -> tuple[str, ...]:
    """Ops by name, or of a folder of tasks, whose ops are made known to this process and those
    that it starts.

    Args:
        tasks: a folder of `patcher tasks create`.
        names: ops of the library, instead.
        split: of the tasks.
        count: at most so many, drawn by the seed.
        most_operators: of the tasks; None: any number.

    Raises:
        UsageError: both or neither are given, there is no such op, or no such task of the split.
    """
    if (tasks is None) == (not names):
        raise UsageError("what to work on is not said", "give either --tasks DIR, or --op NAME")
    if tasks is None:
        if most_operators is not None:
            raise UsageError("an op of the library has no operators to count", "give --tasks DIR")
        return tuple(load_op(name).name for name in names)
    found = [
        task.op
        for task in load_tasks(tasks, split)
        if most_operators is None or len(task.operators) <= most_operators
    ]
    if not found:
        most = "" if most_operators is None else f" of at most {most_operators} operators"
        raise UsageError(
            f"{tasks} has no {split} task{most}",
            "create more of them: patcher tasks create --count",
        )
    known, own = os.environ.get("PATCHER_OPS", "").split(os.pathsep), str((tasks / OPS).resolve())
    os.environ["PATCHER_OPS"] = os.pathsep.join(
        [*(each for each in known if each not in ("", own)), own]
    )
    if count is not None and count < len(found):
        found = sorted(random.Random(seed).sample(found, count))
    return tuple(found)


def in_rounds(ops: Sequence[str], count: int, seed: int) -> list[str]:
    """So many ops, each as often as another, every round in an order of its own; a longer list
    begins as a shorter one."""
    drawn: list[str] = []
    for turn in range(-(-count // len(ops))):
        order = list(ops)
        random.Random(f"{seed}/{turn}").shuffle(order)
        drawn += order
    return drawn[:count]
