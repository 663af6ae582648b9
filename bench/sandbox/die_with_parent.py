"""A child that must not outlive us: `die_with_parent` puts this file before its command.

`python -IS leash.py PARENT COMMAND ...` has the kernel kill it when PARENT dies, however that dies,
and becomes the command. Standard library only: it is run as a file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(*command: str) -> list[str]:
    """The command line that runs a command which is killed when this process dies.

    The kernel watches the thread that starts it: start it from one that stays.
    """
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it died before we could ask
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
