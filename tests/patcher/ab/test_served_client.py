"""Clients as engines' wheels have them, against a double of a server (`make engines`)."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from served_sample import needs_the_real

from patcher.ab import served
from patcher.ab.served import compare_served
from patcher.ab.served_records import ServedJob, SideSetup
from patcher.bench import Workload
from patcher.bench.ab.phases import silent
from patcher.bench.ab.served import (
    ServedPoint,
    ServedRun,
    ServingTrace,
    requests_of,
    run_of,
    traces,
)
from patcher.bench.engines.serving import clients
from patcher.bench.engines.switches import switches

SUPPORT = Path(__file__).parents[2] / "support"
WORKLOAD = Workload(
    model="gpt-oss-tiny",
    device="cpu",
    dtype="float32",
    batch=1,
    input_len=8,
    output_len=8,
)


@pytest.mark.parametrize("name", sorted(name for name, one in clients().items() if one.serve))
def test_a_client_measures_what_the_server_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sends, and that our figures of its times are its own; not how fast it was."""
    own = clients()[name]
    needs_the_real(own)
    doubles = tmp_path / "doubles"
    doubles.mkdir()
    (doubles / "sitecustomize.py").write_text(f"import {own.engine}_doubles\n")
    (doubles / "datasets.py").write_text("load_dataset = None  # of data that is not used\n")
    path = [str(doubles), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*path, str(SUPPORT)]))
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(served, "RECEIPTS_S", 0)
    monkeypatch.setattr(served, "TRIES", 1)
    written: list[tuple[dict[str, Any], ServedRun]] = []

    def spy(point: ServedPoint, trace: ServingTrace, found: dict[str, Any]) -> ServedRun:
        written.append((found, run_of(point, trace, found)))
        return written[-1][1]

    monkeypatch.setattr(served, "run_of", spy)
    serve = ("{python}", str(SUPPORT / "openai_server.py"), "--port", "{port}")
    update = {"serve": serve, "random_weights": ("--first-ms", "4")}
    client = own.model_copy(update=update)
    workload = WORKLOAD.model_copy(update={"engine": own.engine})
    point = ServedPoint(trace="mixed", concurrency=3)
    job = ServedJob(workload, name, client, (point,), process_pairs=1)
    sides = (SideSetup("stock"), SideSetup("same", {"token_ms": 1.0}))
    result = compare_served(job, sides, tmp_path, silent)
    assert result.header.sides[0].version == importlib.metadata.version(own.package)
    asked = requests_of(traces()["mixed"], traces()["mixed"].requests(3), range(2, 1024), 1500)
    (found, run), (again, _) = written
    for one in (found, again):
        lengths = zip(one["input_lens"], one["output_lens"], strict=True)
        assert sorted(lengths) == sorted((len(each.prompt), each.output_len) for each in asked)
    assert run.output_tokens_per_s == pytest.approx(found["output_throughput"])
    for kind in ("ttft", "tpot", "itl"):
        ours = getattr(run, f"{kind}_ms")
        assert ours["p50"] == pytest.approx(found[f"median_{kind}_ms"], rel=1e-3)
        assert ours["p99"] == pytest.approx(found[f"p99_{kind}_ms"], rel=1e-3)
    assert run.ttft_ms["p50"] >= 4
    assert run.tpot_ms["p50"] >= 1


def test_switches_are_arguments_of_the_engines() -> None:
    known: dict[str, set[str]] = {}
    installed = {each.name for each in importlib.metadata.distributions()}
    if "vllm_doubles" in sys.modules and "vllm" in installed:
        engine: Any = importlib.import_module("vllm.engine.arg_utils")
        known["vllm"] = {one.name for one in fields(engine.EngineArgs)}
    if "sglang_doubles" in sys.modules and "sglang" in installed:
        order: Any = importlib.import_module("sglang.srt.arg_groups.field_order")
        known["sglang"] = set(order.POSITIONAL_FIELD_ORDER)
    if not known:
        pytest.skip("needs the unpacked wheel of an engine and its doubles")
    for name, names in known.items():
        for switch in switches()[name].values():
            assert {argument for way in switch.ways for argument in way} <= names
