"""`patcher` and `python -m patcher`: the command line, which a signal stops even in its imports."""

from __future__ import annotations

import json
import os
import sys

from patcher.runs.stopping import EXIT_CODE, Stopping


def start() -> None:
    """Run the command line and exit with its documented code."""
    with Stopping() as stopping:
        try:
            from patcher.cli import main

            main()
        except Exception:
            if not stopping.asked:
                raise
            _stopped_early()
        except KeyboardInterrupt:
            _stopped_early()


def _stopped_early() -> None:
    """Tell it as `patcher.cli` would, whose imports are incomplete."""
    message, hint = "the command was stopped before its end", "give the command again"
    error = {"kind": "interrupted", "message": message, "hint": hint}
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": error}), flush=True)
    else:
        print(f"interrupted: {message}\nnext: {hint}", file=sys.stderr, flush=True)
    # Where a library ran Python code as it was imported, CPython would end with SIGINT all the same
    os._exit(EXIT_CODE)


if __name__ == "__main__":
    start()
