"""`python -P -m patcher.tasks.worker`: examines candidates for tasks."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from pydantic import BaseModel

from patcher.tasks.pool import JobFailed, JobFunction, serve_jobs


def load() -> Mapping[str, JobFunction]:
    import torch

    from patcher.integrate import Refused
    from patcher.tasks import examine

    # one thread: sums in one order, so that the same seed gives the same bytes
    torch.set_num_threads(1)

    def told(job: JobFunction) -> JobFunction:
        @functools.wraps(job)
        def run(**given: object) -> BaseModel:
            try:
                return job(**given)
            except Refused as reason:
                raise JobFailed(str(reason)) from reason

        return run

    return {
        "candidate": told(examine.examine),
        "library": told(examine.library_structure),
        "problem": told(examine.problem_structure),
    }


if __name__ == "__main__":
    serve_jobs(load)
