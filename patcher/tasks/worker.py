"""`python -P -m patcher.tasks.worker`: `ready`, then for each JSON line on stdin one on stdout."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel


def main() -> None:
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an operator prints is no result
    import torch

    from patcher.integrate import Refused
    from patcher.tasks import examine

    # one thread: sums in one order, so that the same seed gives the same bytes
    torch.set_num_threads(1)
    jobs: dict[str, Callable[..., BaseModel]] = {
        "candidate": examine.examine,
        "library": examine.library_structure,
        "problem": examine.problem_structure,
    }
    results.write("ready\n")
    results.flush()
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        try:
            found: dict[str, Any] = {
                "result": jobs[job["job"]](**job["given"]).model_dump(mode="json")
            }
        except Refused as reason:
            found = {"failed": str(reason)}
        except Exception:
            found = {"unexpected": traceback.format_exc()}
        results.write(json.dumps(found) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
