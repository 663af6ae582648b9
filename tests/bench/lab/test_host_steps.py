"""What the host takes of a step, of a model on the CPU; vLLM needs a GPU."""

from __future__ import annotations

import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from patcher.bench import PatcherError, Workload
from patcher.bench.engines import open_engine
from patcher.bench.lab import host_steps
from patcher.bench.lab.host_steps import (
    HostWindow,
    beside,
    holder,
    main,
    switches,
    told,
    told_beside,
    window,
)
from patcher.bench.sandbox.process_tree import descendants

WORKLOAD = Workload(
    model="gpt-oss-tiny", engine="transformers", device="cpu", dtype="float32", batch=1,
    input_len=8, output_len=8,
)  # fmt: skip


def test_steps_cpu_time_and_switches_of_a_window_are_told() -> None:
    engine = open_engine(WORKLOAD)
    found = [window(engine, seed, 6) for seed in range(8)]
    engine.close()
    for one in found:
        assert 0 < one.p10_ms <= one.p50_ms <= one.p90_ms
        assert one.step_ms <= one.most_ms
        assert min(one.voluntary, one.involuntary) >= 0
    # the kernel counts hundredths of a second, about what a window takes
    assert sum(one.cpu_share for one in found) > 0.1
    line = told("stock-in-process", [one._asdict() for one in found[:2]])
    assert f"{found[1].step_ms:.3f} ms a step" in line


def test_a_thread_that_waits_switches() -> None:
    before = switches({os.getpid()})
    waiting = threading.Event()
    for _ in range(50):
        waiting.wait(0.001)
    assert switches({os.getpid()})[0] - before[0] >= 50
    assert switches({2**22 + 1}) == (0, 0)


def test_a_way_that_fails_is_named_and_one_that_has_run_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = HostWindow(3.0, 2.9, 3.0, 3.1, 9.0, 1.0, 0.0, 10, 2)
    ready = tmp_path / "stock-in-process.json"
    ready.write_text(json.dumps([row._asdict()]))
    monkeypatch.setattr(host_steps, "TIMEOUT_S", 60)
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "stock-in-process       3.000 ms a step" in said
    assert "stock-own-process: it ended without a result" in said
    log = (tmp_path / "stock-own-process.log").read_text()
    assert "vLLM" in log or "vllm" in log
    assert (tmp_path / "host_steps.json").exists()


def test_windows_are_alone_and_beside_and_after_each_neighbour() -> None:
    engine, seen = open_engine(WORKLOAD), list[int]()

    def measure(seed: int) -> HostWindow:
        seen.append(len(descendants(os.getpid())))
        return window(engine, seed, 4)

    program = "import time; print('held', flush=True); time.sleep(99)"
    rows = beside(measure, {"one": lambda: holder(program), "two": nullcontext}, rounds=2)
    assert [row["beside"] for row in rows[::2]] == [
        "alone", "alone, later", "one", "after one", "two", "after two",
    ]  # fmt: skip
    assert seen == [1] * 5 + [2] * 2 + [1] * 6
    lines = told_beside(rows)
    assert [line.split("  ")[0] for line in lines] == list(dict.fromkeys(r["beside"] for r in rows))
    assert "+0.00 % of that alone" in lines[0]
    with pytest.raises(PatcherError, match="ended"):
        beside(measure, {"none": lambda: holder("")}, rounds=1)
    engine.close()
