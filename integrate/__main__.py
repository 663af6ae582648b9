"""Run a program with the applied patches, for engines without plugins: transformers.

    PATCHER_PATCHES=on python -m patcher.integrate SCRIPT [ARGS...]
    PATCHER_PATCHES=on python -m patcher.integrate -m MODULE [ARGS...]

The program restarts as `python SCRIPT` with our `sitecustomize` on `PYTHONPATH`, which child
processes inherit: workers of torchrun and of multiprocessing. A process is patched only if
`PATCHER_PATCHES` is set and it builds a model that a patch supports. Processes that ignore the
environment (`python -I`, `python -E`) are not patched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from patcher.bench import PatcherError, UsageError
from patcher.integrate.switches import startup_python_path


def command(flags: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The command line: this interpreter, its flags, and the program.

    Raises:
        UsageError: there is no program, or this interpreter ignores the environment.
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
            "this Python does not read PYTHONPATH at startup", "run it without -E, -I and -S"
        )
    return [sys.executable, *flags, *argv]


def environment() -> dict[str, str]:
    """This process's environment, with our `sitecustomize` first on `PYTHONPATH`."""
    return {**os.environ, "PYTHONPATH": startup_python_path(os.environ.get("PYTHONPATH", ""))}


def main() -> NoReturn:
    """Replace this process by the program."""
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
