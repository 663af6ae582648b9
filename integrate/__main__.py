"""Run a program with the patches that are switched on, for engines without plugins: transformers.

    PATCHER_PATCHES=on python -m patcher.integrate SCRIPT [ARGS...]
    PATCHER_PATCHES=on python -m patcher.integrate -m MODULE [ARGS...]

The program starts anew as `python SCRIPT` with a `sitecustomize` on `PYTHONPATH`, which the
processes that it starts inherit: torchrun's workers, and those of multiprocessing. Nothing happens
in a process unless `PATCHER_PATCHES` is set and it builds a model that a patch is for. Processes
that ignore the environment (`python -I`, `python -E`) are not reached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from patcher.bench import PatcherError, UsageError
from patcher.integrate.switches import starting_up


def command(flags: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The interpreter, with the flags of this one, and the program.

    Raises:
        UsageError: no program, or an interpreter that would not read the environment.
    """
    program = argv[1:] if argv[:1] == ["-m"] else argv
    if not program or program[0].startswith("-"):
        raise UsageError(
            "python -m patcher.integrate needs a program",
            "python -m patcher.integrate SCRIPT [ARGS...], or "
            "python -m patcher.integrate -m MODULE [ARGS...]",
        )
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise UsageError(
            "this Python does not read PYTHONPATH at its start", "run it without -E, -I and -S"
        )
    return [sys.executable, *flags, *argv]


def environment() -> dict[str, str]:
    """This process's, with our `sitecustomize` before all others."""
    return {**os.environ, "PYTHONPATH": starting_up(os.environ.get("PYTHONPATH", ""))}


def main() -> NoReturn:
    argv = sys.argv[1:]
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(argv)]
    flags = before[: -1 if before and before[-1] != "patcher.integrate" else -2]
    try:
        line = command(flags, argv)
    except PatcherError as error:
        print(f"{error.kind}: {error}\n{error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    sys.stdout.flush()
    os.execve(line[0], line, environment())


if __name__ == "__main__":
    main()
