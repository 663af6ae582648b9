"""Clients without a server, as `serving.toml` has them, with a double of `vllm bench`."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_sample import WORKLOAD, serve_by_doubles

from patcher.ab import offline
from patcher.ab.served_records import ServedJob, SideSetup
from patcher.bench.ab.served import ServedPoint
from patcher.bench.engines.serving import ServingClient, clients


def doubled(name: str, vocabulary: int = 1) -> ServingClient:
    """A client whose command is the double's, with arguments as they are."""
    own = clients()[name]
    assert own.offline is not None
    return own.model_copy(
        update={
            "package": "numpy",
            "bench": ("vllm_bench_double", *own.bench[1:]),
            "offline": own.offline.model_copy(update={"vocabulary": vocabulary}),
        }
    )


def job_of(name: str, *sizes: int, pairs: int = 2) -> ServedJob:
    """A comparison at these numbers of prompts."""
    points = tuple(ServedPoint(trace="fixed", concurrency=size) for size in sizes)
    return ServedJob(WORKLOAD, name, doubled(name), points, process_pairs=pairs)


SLOW, FAST = SideSetup("slow", {"token_ms": 4}), SideSetup("fast", {"token_ms": 2})


def bench_by_doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the double be found and waited for no longer than it needs."""
    serve_by_doubles(tmp_path, monkeypatch)
    monkeypatch.setattr(offline, "RECEIPTS_S", 0)
    monkeypatch.setattr(offline, "POLL_S", 0.02)
