"""A judge of replies on a machine that is too busy: as often as `BUSY` says, and always for what
holds `ALWAYS`. Replies that hold `SLOW` take it minutes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patcher.bench import BusyError
from patcher.tasks.pool import JobFunction, serve_jobs
from patcher.training import worker

ALWAYS, SLOW = "always busy", "slow to judge"


def load() -> Mapping[str, JobFunction]:
    judge = worker.load()["judge"]

    def busy_at_times(**given: Any) -> Any:
        left = Path(os.environ["BUSY"])
        times = int(left.read_text())
        if ALWAYS in given["reply"] or times:
            left.write_text(str(max(times - 1, 0)))
            error = BusyError("this machine is too busy to time it", "stop other programs")
            return worker.WorkerVerdict(error=error.as_dict())
        if SLOW in given["reply"]:
            time.sleep(300)
        return judge(**given)

    return {"judge": busy_at_times}


if __name__ == "__main__":
    serve_jobs(load)
