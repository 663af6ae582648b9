"""A model that is served and driven by doubles."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from patcher.ab import bench_client, served
from patcher.ab.served_records import ServedJob, SideSetup
from patcher.bench import Workload
from patcher.bench.ab.served import ServedPoint
from patcher.bench.engines.serving import ServingClient

SUPPORT = Path(__file__).parent
WORKLOAD = Workload(
    model="gpt-oss-tiny", engine="vllm", device="cpu", dtype="float32", batch=1, input_len=8,
    output_len=8,
)  # fmt: skip
CLIENT = ServingClient(
    engine="vllm",
    package="numpy",
    install="pip install numpy",
    plugins="vllm.general_plugins",
    serve=("{python}", str(SUPPORT / "openai_server.py"), "--port", "{port}"),
    random_weights=("--first-ms", "4"),
    health="/health",
    imports="json",
    bench=(
        "served_client_double", "{port}", "{requests}", "{concurrency}",
        "{folder}/{result}",
    ),
    rate=("--request-rate", "{rate}"),
    request='{"prompt": {prompt}, "output_tokens": {output_len}}',
)  # fmt: skip
POINTS = tuple(ServedPoint(trace="fixed", concurrency=users) for users in (1, 2))
JOB = ServedJob(WORKLOAD, "double", CLIENT, POINTS, process_pairs=2)
SLOW, FAST = SideSetup("slow", {"token_ms": 4}), SideSetup("fast", {"token_ms": 2})


def serve_by_doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doubles be found and waited for no longer than they need."""
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(served, "RECEIPTS_S", 0)  # the double writes them before it answers
    monkeypatch.setattr(served, "compiles", lambda engine: False)  # else one start comes before
    monkeypatch.setattr(bench_client, "POLL_S", 0.02)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(SUPPORT), str(tmp_path))))


def needs_the_real(client: ServingClient) -> None:
    """Skip a test where the client's package and the doubles of its engine are not there."""
    installed = {each.name for each in importlib.metadata.distributions()}
    if client.package not in installed or f"{client.engine}_doubles" not in sys.modules:
        pytest.skip(f"needs the unpacked wheel of {client.engine} and its doubles")
