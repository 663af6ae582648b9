"""The soak of two servers, with doubles of a server and a client."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from patcher.ab.served_records import ServedJob, SideSetup
from patcher.bench import Workload
from patcher.bench.ab.served import ServedPoint
from patcher.bench.engines.serving import ServingClient
from patcher.bench.lab import vllm_soak
from patcher.bench.lab.vllm_soak import SoakRound, grown, soak, started, table

SUPPORT = Path(__file__).parents[2] / "support"
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
    random_weights=("--first-ms", "1"),
    health="/health",
    imports="json",
    bench=(
        "served_client_double", "{port}", "{requests}", "{concurrency}",
        "{folder}/{result}",
    ),
    request='{"prompt": {prompt}, "output_tokens": {output_len}}',
)  # fmt: skip


@pytest.mark.parametrize("lora", [False, True])
def test_two_servers_get_the_same_and_a_line_a_round(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(SUPPORT), str(tmp_path))))
    monkeypatch.setattr(vllm_soak, "SLEEP_EVERY", 1)
    monkeypatch.setattr(vllm_soak, "TRAFFIC", (("fixed", 1),))
    points = (ServedPoint(trace="fixed", concurrency=1),)
    job = ServedJob(WORKLOAD, "double", CLIENT, points, process_pairs=1)
    sides = (SideSetup("stock"), SideSetup("patched", {"token_ms": 2}))
    with ExitStack() as kept:
        arms = started(job, sides, lora, kept)
        rounds = soak(arms, 0.01, tmp_path / "soak.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert len(lines) == len(rounds) > 0
    assert all(line["stock"]["drifted"] is False for line in lines)
    assert all(line["patched"]["host_mib"] > 0 for line in lines)
    told = json.loads((tmp_path / "soak.json").read_text())
    assert told["patched"]["rounds"] == table(rounds)["patched"]["rounds"] == len(rounds)
    assert told["minutes"] > 0


def test_drift_growth_and_forwards_are_told() -> None:
    calls = {"norm": {"calls": 90, "fallbacks": 8, "layers": 49}}

    def seen(index: int) -> SoakRound:
        return SoakRound([[" t1", [-1.0 - (index == 7)]]], 100.0 + index, 50.0, calls)

    found = table([{"patched": seen(index)} for index in range(16)])["patched"]
    assert (found["rounds_with_other_probes"], found["different_probes"]) == ([7], 2)
    assert found["gpu_mib"] == {"settled": 107.0, "end": 114.0, "growth": 7.0, "most": 115.0}
    assert found["host_mib"]["growth"] == 0
    assert found["calls"]["norm"]["forwards"] == 2
    assert grown([None, 1.0]) is None
