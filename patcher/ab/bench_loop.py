"""Run a client's module with one command line after another, in an interpreter that imports once.

`python bench_loop.py MODULE` imports MODULE at once. Then each line of stdin is a JSON list: a
module, which runs as `python -m` would, and its arguments. The reply is a line, its exit code.
What the client prints goes to stderr. Standard library only, since any interpreter may run it.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose names are none of the client's

import importlib
import json
import os
import runpy
import traceback


def main() -> None:
    """Serve until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        module, *arguments = json.loads(line)
        sys.argv = [module, *arguments]
        code = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):  # as an interpreter that ends with it
                print(end.code, file=sys.stderr)
        except Exception:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        print(code, file=replies, flush=True)


if __name__ == "__main__":
    main()
