"""Engines compared by their own offline benchmarks: doubles of the commands, and real records."""

from __future__ import annotations

import json
import lzma
import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from offline_sample import FAST, SLOW, bench_by_doubles, doubled, job_of
from pydantic import JsonValue, ValidationError
from served_sample import CLIENT
from typer.testing import CliRunner

from patcher.ab import offline, served
from patcher.ab.offline import OfflineTaking
from patcher.ab.served import compare_served, taking_class
from patcher.ab.served_records import ServedResult, SideSetup
from patcher.ab.served_tuning import tune_served
from patcher.bench import PatcherError, UsageError
from patcher.bench.ab.offline import READERS, offline_run
from patcher.bench.ab.phases import silent
from patcher.bench.ab.served import ServedPoint, arm_orders, traces
from patcher.bench.engines import serving
from patcher.bench.engines.serving import ServingClient, clients
from patcher.bench.machine.environment import ROOT
from patcher.commands.console import app
from patcher.report.served import served_html, served_markdown
from patcher.show.served import served_lines

ID = "double.norm"
BATCH = traces()["fixed"].parts[0]


@pytest.fixture(autouse=True)
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench_by_doubles(tmp_path, monkeypatch)


@dataclass(frozen=True)
class PatchedSide(SideSetup):
    """A double's patch: its engine writes receipts, or does not."""

    def digests(self, engine: str) -> dict[str, str]:
        return {ID: "0" * 64}

    def environment(self, folder: Path) -> dict[str, str]:
        return {"PATCHER_RECEIPTS": str(folder / "receipts")}


def test_batches_are_compared_by_their_tokens_and_what_was_taken_is_kept(tmp_path: Path) -> None:
    fast = PatchedSide("fast", {"token_ms": 2, "patch": ID, "pause_s": 1})
    begun = compare_served(job_of("vllm-latency", 1, 8, pairs=1), (SLOW, fast), tmp_path, silent)
    assert begun.comparison.verdict == "inconclusive"
    [folder] = tmp_path.glob("served-*")
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("pair-*.json")}
    result = compare_served(job_of("vllm-latency", 1, 8), (SLOW, fast), tmp_path, silent)
    assert result.processes[:2] == begun.processes
    assert len(kept) == 2
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    found = result.comparison
    # 255 tokens after the first: 4 + 255 x 4 ms against 4 + 255 x 2 ms, whatever the batch
    assert found.gain_pct == pytest.approx(100 * (1024 / 514 - 1))
    assert found.verdict == "accept"
    assert [(one.pair, one.arm) for one in result.processes] == list(arm_orders(2))
    run = result.processes[1].runs[1]
    assert (run.requests, run.input_tokens, run.output_tokens) == (240, 240 * 1024, 240 * 256)
    assert run.duration_s == pytest.approx(30 * 0.514)
    figures = found.points[1].figures["patched"]
    assert figures.output_tokens_per_s == pytest.approx(8 * 256 / 0.514)
    assert figures.total_tokens_per_s == pytest.approx(8 * 1280 / 0.514)
    assert figures.batch_ms == pytest.approx(
        dict.fromkeys(("p10", "p25", "p50", "p75", "p90", "p99"), 514)
    )
    # a call for each prompt, at both points, and not the two of each start
    calls = [one.receipts[0].total_calls for one in result.processes if one.receipts]
    assert calls == [1 + 8, 1 + 8]
    assert result.header.serve == ()
    assert result.header.bench[:5] == ("PYTHON", "-m", "vllm_bench_double", "bench", "latency")
    assert "--batch-size CONCURRENCY" in " ".join(result.header.bench)


def test_many_prompts_are_compared_by_the_tokens_that_the_engine_wrote(tmp_path: Path) -> None:
    result = compare_served(job_of("vllm-throughput", 50), (SLOW, FAST), tmp_path, silent)
    found = result.comparison
    assert found.verdict == "accept"
    assert found.gain_pct == pytest.approx(100)
    run = result.processes[0].runs[0]
    assert (run.requests, run.input_tokens, run.output_tokens) == (50, 50 * 1024, 50 * 256)
    assert run.output_tokens_per_s == pytest.approx(100 / 0.004)
    assert run.total_tokens_per_s == pytest.approx(5 * 100 / 0.004)
    assert run.batch_ms == {}


@pytest.mark.parametrize("name", ["vllm-latency", "vllm-throughput"])
def test_what_is_not_timed_is_absent_and_not_zero(name: str, tmp_path: Path) -> None:
    result = compare_served(job_of(name, 4, 8, pairs=1), (SLOW, FAST), tmp_path, silent)
    whole = json.loads(result.model_dump_json())
    for figures in whole["comparison"]["points"][0]["figures"].values():
        timed = ("goodput_per_s", "user_tokens_per_s", "stalls", "ttft_ms", "tpot_ms", "itl_ms")
        assert [figures[name] for name in timed] == [None] * 3 + [{}] * 3
    assert whole["processes"][0]["runs"][0]["longest_gap_ms"] is None
    for page in (served_html(result), served_markdown(result)):
        head = page.partition("Commands")[0].replace("TTFT, TPOT, ITL, goodput", "")
        for absent in ("TTFT p50", "TPOT p50", "ITL p50", "good req/s", "as served", "one server"):
            assert absent not in head
        assert ("a batch p50 / p90 / p99 ms" in page) is (name == "vllm-latency")
        assert "has no times of single requests: TTFT, TPOT, ITL, goodput and stalls" in page
        assert "one engine alone on the device at a time" in page
        assert "1,024 tokens in, 256 out" in page
        assert f"by {name}, without a server" in page.replace("\\", "")
    assert served_html(result).count("<svg") == 2, "gains for a screen and a phone, and no curve"
    table, *lines = served_lines(result)
    heads = [str(column.header) for column in table.columns]
    batch = ["a batch p50 / p99 ms"] if name == "vllm-latency" else []
    assert heads == ["point", "tok/s", "patched", "gain", *batch]
    assert any("no times of single requests" in str(line) for line in lines)


def test_a_patch_that_never_ran_or_only_while_the_engine_started_is_rejected(
    tmp_path: Path,
) -> None:
    job = job_of("vllm-latency", 1, pairs=1)
    only_starts: dict[str, JsonValue] = {"patch": ID, "start_only": True, "pause_s": 3}
    for more in ({}, only_starts):
        idle = PatchedSide("fast", {"token_ms": 2, **more})
        found = compare_served(job, (SLOW, idle), tmp_path, silent).comparison
        assert found.verdict == "reject"
        assert found.reasons[1:] == (f"{ID} never ran while fast was measured",)


def test_each_side_compiles_once_by_the_largest_point_and_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "compiles", lambda engine: engine == "vllm")
    seen, told = tmp_path / "seen", list[str]()
    slow, fast = (
        replace(side, arguments={**side.arguments, "seen": str(seen)}) for side in (SLOW, FAST)
    )
    job = job_of("vllm-latency", 1, 8, pairs=1)
    compare_served(job, (slow, fast), tmp_path, lambda phase, said, *at: told.append(said))
    starts = [one for one in told if one.startswith("starting the engine")]
    compiling = ", which only compiles: fixed, 8 at a time"
    whole = [": fixed, 1 at a time", ": fixed, 8 at a time"]
    assert {*starts[:2]} == {f"starting the engine, {arm}{compiling}" for arm in served.ARMS}
    assert starts[2:] == [
        f"starting the engine, {arm}{each}" for arm in served.ARMS for each in whole
    ]
    words = [json.loads(line) for line in seen.read_text().splitlines()]
    brief = ["--num-iters-warmup", "1", "--num-iters", "1"]
    assert [one[-4:] == brief for one in words] == [True] * 2 + [False] * 4
    first, alone = (dict(zip(one[2::2], one[3::2], strict=True)) for one in words[1:3])
    assert first["--gpu-memory-utilization"] == "0.42", "each leaves room for the other"
    assert "--gpu-memory-utilization" not in alone
    assert (first["--batch-size"], alone["--batch-size"], alone["--num-iters"]) == ("8", "1", "30")
    assert alone["--max-num-seqs"] == "8", "the engine is the same at all points"
    assert (alone["--input-len"], alone["--output-len"]) == ("1024", "256")
    assert int(alone["--max-model-len"]) >= 1280
    assert alone["--token-ms"] == "4"


def test_several_gpus_share_the_pairs_and_those_of_another_host_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of the same command at a time, here threads; each stands for a GPU of one host."""
    monkeypatch.setattr(served, "WAIT_S", 0.05)
    told: list[str] = []

    def compared(folder: Path, *earlier: ServedResult, pairs: int = 2) -> ServedResult:
        job = replace(job_of("vllm-throughput", 50, pairs=pairs), earlier=earlier)
        return compare_served(job, (SLOW, FAST), folder, lambda phase, said, *at: told.append(said))

    here = tmp_path / "here"
    with ThreadPoolExecutor(2) as pool:
        one, other = (task.result() for task in [pool.submit(compared, here) for _ in range(2)])
    assert one.comparison == other.comparison
    assert sum(said.startswith("starting the engine") for said in told) == 4
    told.clear()
    joined = compared(tmp_path / "there", one, pairs=3)
    assert "2 of 2 earlier pairs count" in told[0]
    assert joined.processes[:4] == one.processes
    assert sum(said.startswith("starting the engine") for said in told) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dies": True}, r"baseline ended \(exit code 1\): ValueError: out of luck"),
        ({"no_such_option": 1}, "unrecognized arguments: --no-such-option"),
        ({"mute": True}, "ended and never printed 'Warming up with'"),
        ({"idle": True}, "vllm-throughput wrote no result that can be read"),
        ({"short": True}, "50 prompts have 51,200 tokens with their answers .* 64,000 were asked"),
    ],
)
def test_a_benchmark_that_fails_says_why(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    job = job_of("vllm-throughput", 50, pairs=1)
    with pytest.raises(PatcherError, match=said):
        compare_served(job, (SideSetup("broken", arguments), FAST), tmp_path, silent)
    assert not list(tmp_path.glob("served-*/pair-*.json"))


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "RUN_S", 0.2)
    endless = SideSetup("endless", {"pause_s": 600})
    with pytest.raises(PatcherError, match="vllm-latency of the baseline took longer than"):
        compare_served(job_of("vllm-latency", 1), (endless, FAST), tmp_path, silent)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    mine = [line for line in running.stdout.splitlines() if "vllm_bench_double" in line]
    assert not [line for line in mine if str(tmp_path) in line]
    monkeypatch.setattr(offline, "START_S", 0.2)
    mute = SideSetup("mute", {"mute": True, "pause_s": 600})
    with pytest.raises(PatcherError, match="did not start its engine"):
        compare_served(job_of("vllm-latency", 1), (mute, FAST), tmp_path, silent)


def test_a_model_of_few_tokens_is_refused_before_a_start(tmp_path: Path) -> None:
    job = replace(job_of("vllm-latency", 1), serving=doubled("vllm-latency", 10_000))
    with pytest.raises(UsageError, match="10,000 token ids, and gpt-oss-tiny has 1,024"):
        compare_served(job, (SLOW, FAST), tmp_path, silent)


def test_a_search_tries_ways_without_a_server(tmp_path: Path) -> None:
    job = job_of("vllm-throughput", 50)
    assert taking_class(job) is OfflineTaking
    options = [({"token_ms": 2}, {"token_ms": 1}), ({"no_such_option": 1},)]
    found = tune_served(job, SLOW, options, (), tmp_path, silent, lambda one: None)
    assert found.chosen == {"token_ms": 1}
    assert found.trials[0].tokens_per_s == pytest.approx(100 / 0.004)
    assert "--no-such-option" in str(found.trials[3].failure)


def test_results_are_read_as_vllm_writes_them() -> None:
    point, trace = ServedPoint(trace="fixed", concurrency=4), traces()["fixed"]
    seconds = [1.0, 2.0, 3.0]
    percentiles = {"50": 2.0, "90": 2.8, "99": 2.98}
    found = {"avg_latency": 2.0, "latencies": seconds, "percentiles": percentiles}
    run = offline_run("latency", point, trace, found)
    assert run.output_tokens_per_s == 4 * 256 / 2
    assert run.batch_ms == {"p50": 2000, "p90": 2800, "p99": 2980}
    assert (run.compared, run.user_tokens_per_s) == (512, None)
    # a trained tokenizer joined some tokens of the prompts
    whole = {"elapsed_time": 2.0, "num_requests": 4, "total_num_tokens": 5100}
    run = offline_run("throughput", point, trace, whole)
    assert (run.input_tokens, run.output_tokens, run.total_tokens_per_s) == (4076, 1024, 2550)
    for other in ({"num_requests": 3}, {"total_num_tokens": 4200}):
        with pytest.raises(PatcherError, match="were asked for"):
            offline_run("throughput", point, trace, whole | other)


@pytest.mark.parametrize(
    ("kind", "update"),
    [
        ("latency", {"avg_latency": 1e-9}),
        ("latency", {"latencies": []}),
        ("latency", {"latencies": [-1.0], "avg_latency": -1.0}),
        ("latency", {"latencies": [math.nan], "avg_latency": math.nan}),
        ("latency", {"percentiles": {"50": 1.0, "99": 1.0}}),
        ("latency", {"percentiles": {"50": 1.0, "90": 1.0, "99": math.nan}}),
        ("latency", {"percentiles": [1.0]}),
        ("throughput", {"elapsed_time": 0}),
        ("throughput", {"elapsed_time": -1}),
        ("throughput", {"elapsed_time": math.inf}),
        ("throughput", {"total_num_tokens": math.inf}),
    ],
)
def test_a_result_of_absurd_numbers_is_none(kind: str, update: dict[str, Any]) -> None:
    point, trace = ServedPoint(trace="fixed", concurrency=4), traces()["fixed"]
    percentiles = {"50": 1.0, "90": 1.0, "99": 1.0}
    found = {"avg_latency": 1.0, "latencies": [1.0], "percentiles": percentiles}
    found |= {"elapsed_time": 2.0, "num_requests": 4, "total_num_tokens": 5120}
    assert offline_run(kind, point, trace, found).requests == 4
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        offline_run(kind, point, trace, found | update)


def test_clients_are_data_and_each_has_a_server_or_none() -> None:
    own = {name: one.offline for name, one in clients().items() if one.offline is not None}
    assert set(own) == {"vllm-latency", "vllm-throughput"}
    for one in own.values():
        assert len(traces()[one.trace].parts) == 1
        assert one.result in READERS
    assert (BATCH.input_len, BATCH.output_len) == (1024, 256)
    whole = doubled("vllm-latency").model_dump()
    for update in ({"offline": None}, {"serve": ("x",)}):
        with pytest.raises(ValidationError, match="or offline"):
            ServingClient.model_validate(whole | update)


def test_the_command_line_compares_patches_and_option_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"double": CLIENT, **{name: doubled(name) for name in ("vllm-latency",)}}
    monkeypatch.setattr(serving, "clients", lambda: known)
    monkeypatch.setenv("PATCHER_RUNS_DIR", str(tmp_path / "runs"))
    what = ("gpt-oss-tiny", "--engine", "vllm", "--device", "cpu", "--client", "vllm-latency")
    out, page = tmp_path / "out.json", tmp_path / "page"
    words = ["throughput", "compare-engines", *what, "token_ms=4", "token_ms=2"]
    words += ["--concurrency", "2", "--out", str(out), "--report", str(page)]
    found = CliRunner().invoke(app, [*words, "--json"], standalone_mode=False)
    assert found.return_value == 0, found.output
    result = ServedResult.model_validate_json(out.read_bytes())
    assert json.loads(found.stdout)["comparison"] == result.comparison.model_dump(mode="json")
    assert [one.point.label for one in result.comparison.points] == ["fixed, 2 at a time"]
    assert "without a server" in (page / "report.html").read_text()
    again = ["throughput", "compare-engines", *what, "token_ms=4", "token_ms=2"]
    again += ["--concurrency", "2", "--with", str(out)]
    monkeypatch.setenv("PATCHER_RUNS_DIR", str(tmp_path / "elsewhere"))
    adopted = CliRunner().invoke(app, again, standalone_mode=False)
    assert adopted.return_value == 0, adopted.output
    assert "vllm-latency has no times of single requests" in adopted.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--trace fixed", "leave out --trace"),
        ("--rate 2 --port 8000", "leave out --rate and --port"),
        ("--concurrency 8,8", "a point is there twice"),
        ("--batch 8", "without --batch"),
    ],
)
def test_options_of_a_server_are_refused(words: str, said: str) -> None:
    what = ("gpt-oss-tiny", "--engine", "vllm", "--device", "cpu", "--patch", "p")
    own = ["throughput", "compare", *what, "--client", "vllm-throughput", *words.split()]
    found = CliRunner().invoke(app, own)
    assert isinstance(found.exception, UsageError)
    assert said in found.exception.message


@pytest.mark.parametrize(
    "path",
    ["h100-vllm-0.33/served.json.xz", "h200-vllm-0.33/served.json.xz",
     "h100-served/served-0.33.json.xz"],
)  # fmt: skip
def test_results_that_were_published_are_still_read(path: str) -> None:
    raw = lzma.decompress((ROOT / "bench" / "results" / path).read_bytes())
    result = ServedResult.model_validate_json(raw)
    assert not result.header.offline
    page = served_markdown(result)
    for name in ("TTFT p50 / p95 / p99 ms", "good req/s", "stalls", "as served", "one server"):
        assert name in page
    assert "a batch" not in page
