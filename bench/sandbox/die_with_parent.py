"""Run a child process that the kernel kills when its parent dies.

`python -IS die_with_parent.py PARENT COMMAND ...` asks the kernel to kill this process when PARENT
dies for any reason, and then executes the command. Standard library only, since it runs as a file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(*command: str) -> list[str]:
    """Wrap a command so that the kernel kills it when this process dies.

    The kernel watches the thread that starts the command, so start it from a thread that stays
    alive.

    Returns:
        The command line to run.
    """
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # the parent died before prctl took effect
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
