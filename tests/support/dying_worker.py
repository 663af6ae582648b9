"""A judge of replies whose process dies: as often as `DIES` says, and always of `POISON`."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patcher.tasks.pool import JobFunction, serve_jobs
from patcher.training import worker

POISON = "poison"


def load() -> Mapping[str, JobFunction]:
    judge = worker.load()["judge"]

    def dying(**given: Any) -> Any:
        left = Path(os.environ["DIES"])
        times = int(left.read_text())
        if POISON in given["reply"] or times:
            left.write_text(str(max(times - 1, 0)))
            os.kill(os.getpid(), signal.SIGKILL)
        return judge(**given)

    return {"judge": dying}


if __name__ == "__main__":
    serve_jobs(load)
