"""The search among what people switch on, against a double of a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from served_sample import CLIENT, JOB, WORKLOAD, serve_by_doubles
from typer.testing import CliRunner

from patcher.ab.served_records import ServedJob, ServedProcess, ServedResult, SideSetup
from patcher.ab.served_tuning import rated, tune_served
from patcher.bench import MissingError, PatcherError, UsageError
from patcher.bench.ab.engine_config import ConfigTrial, Tuning
from patcher.bench.ab.phases import silent
from patcher.bench.engines import serving, switches
from patcher.bench.engines.switches import EngineSwitch, ways_to_try
from patcher.commands.console import app

STOCK = SideSetup("stock", {"first_ms": 1})
SWITCHES = {
    "pace": EngineSwitch(summary="", ways=({"token_ms": 3}, {"token_ms": 0.5}, {"token_ms": 2})),
    "broken": EngineSwitch(summary="", ways=({"no_such_option": 1},)),
    "lossy": EngineSwitch(summary="", ways=({"token_ms": 0.1},), exact=False),
    "drafted": EngineSwitch(summary="", ways=({"patch": "{draft}"},), speculates=True),
}


@pytest.fixture(autouse=True)
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_doubles(tmp_path, monkeypatch)


def test_the_fastest_way_wins_and_what_was_tried_is_kept(tmp_path: Path) -> None:
    told: list[ConfigTrial] = []
    options = [SWITCHES["pace"].ways, SWITCHES["broken"].ways]
    found = tune_served(JOB, STOCK, options, (), tmp_path, silent, told.append)
    assert found.chosen == {"token_ms": 0.5}
    assert [one.arguments for one in found.trials] == [
        {}, {"token_ms": 3}, {"token_ms": 0.5}, {"token_ms": 2},
        {"token_ms": 0.5, "no_such_option": 1},
        {}, {"token_ms": 0.5},
    ]  # fmt: skip
    assert told == list(found.trials)
    # a user's 256 tokens take 1 + 255 x 0.5 ms; 1 and 2 users
    assert found.trials[2].tokens_per_s == pytest.approx(2**0.5 * 256 / 0.1285)
    assert found.trials[2].spread_pct == pytest.approx(0)
    assert (found.trials[4].tokens_per_s, "--no-such-option" in found.trials[4].failure) == (
        None, True,
    )  # fmt: skip
    assert found.served == "double: fixed, 1 at a time; fixed, 2 at a time"
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("served-*/trial-*.json")}
    assert len(kept) == 6
    again = tune_served(JOB, STOCK, options[:1], (), tmp_path, silent, told.append)
    assert again.trials == (*found.trials[:4], *found.trials[5:])
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def test_a_round_that_stalled_is_no_speed(tmp_path: Path) -> None:
    tune_served(JOB, STOCK, [], (), tmp_path, silent, lambda one: None)
    [file] = tmp_path.glob("served-*/trial-0.json")
    taken = ServedProcess.model_validate_json(file.read_bytes())
    right = rated({}, taken)
    slow = [run.model_copy(update={"output_tokens_per_s": 1.0}) for run in taken.runs]
    stalled = [run.model_copy(update={"stalled": True}) for run in slow]
    one = taken.model_copy(update={"runs": (stalled[0], *slow[1:2], *taken.runs[2:])})
    found = rated({}, one)
    assert found.tokens_per_s == pytest.approx(right.tokens_per_s, rel=0.01)
    assert found.spread_pct == 0
    both = rated({}, taken.model_copy(update={"runs": (stalled[0], slow[1], stalled[2], slow[3])}))
    assert (both.tokens_per_s, "it stalled in each round" in both.failure) == (None, True)


def test_a_stock_that_does_not_run_and_what_is_missing_end_the_search(tmp_path: Path) -> None:
    def tuned(job: ServedJob, stock: SideSetup) -> Tuning:
        return tune_served(job, stock, [], (), tmp_path, silent, lambda one: None)

    with pytest.raises(PatcherError, match="stock does not run"):
        tuned(JOB, SideSetup("stock", {"no_such_option": 1}))
    told: list[ConfigTrial] = []
    broken, ways = SideSetup("stock", {"no_such_option": 1}), SWITCHES["pace"].ways
    with pytest.raises(PatcherError, match="stock does not run"):
        tune_served(JOB, broken, [ways], (), tmp_path, silent, told.append)
    assert [one.arguments for one in told] == [{}]  # no other way is tried
    absent = CLIENT.model_copy(update={"package": "no-such-engine"})
    with pytest.raises(MissingError):
        tuned(replace(JOB, serving=absent), STOCK)
    assert tuned(JOB, STOCK).chosen == {}


def test_what_is_not_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "switches", lambda: {"vllm": SWITCHES})
    tried, refused = ways_to_try(WORKLOAD, (), None)
    assert tried == (SWITCHES["pace"].ways, SWITCHES["broken"].ways)
    assert [(one.name, one.reason.split()[0]) for one in refused] == [
        ("lossy", "it"),
        ("drafted", "weights"),
    ]
    trained = WORKLOAD.model_copy(update={"weights": "hub"})
    assert ways_to_try(trained, ("lossy",), None) == ((SWITCHES["lossy"].ways,), ())
    assert "--draft" in ways_to_try(trained, (), None)[1][1].reason
    assert ways_to_try(trained, ("drafted",), "small")[0] == (({"patch": "small"},),)
    for asked, draft, said in (
        (("no",), None, "no switch 'no'"),
        (("pace",), "small", "draft model"),
    ):
        with pytest.raises(UsageError, match=said):
            ways_to_try(trained, asked, draft)


def test_the_switches_are_data() -> None:
    for engine, those in switches.switches().items():
        assert {one.engine for one in serving.clients().values()} >= {engine}
        assert set(those) == {"async-scheduling", "chunked-prefill", "fp8-kv", "ngram", "eagle3"}
        assert [name for name, one in those.items() if one.drafts] == ["eagle3"]
        assert [name for name, one in those.items() if one.speculates] == ["ngram", "eagle3"]
        assert [name for name, one in those.items() if not one.exact] == ["fp8-kv"]
    model = WORKLOAD.model_copy(update={"weights": "hub"})
    [ways], _ = ways_to_try(model, ("eagle3",), "a/b")
    config = ways[0]["speculative_config"]
    assert isinstance(config, dict)
    assert config["model"] == "a/b"


def test_what_a_search_found_is_the_baseline_of_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "clients", lambda: {"double": CLIENT})
    monkeypatch.setattr(switches, "switches", lambda: {"vllm": SWITCHES})
    monkeypatch.setenv("PATCHER_RUNS_DIR", str(tmp_path / "runs"))
    what = ["gpt-oss-tiny", "--engine", "vllm", "--device", "cpu"]
    points = ["--trace", "fixed", "--concurrency", "1", "--engine-arg", "first_ms=1"]
    out, json_ = str(tmp_path / "stock.json"), ["--json"]
    words = ["throughput", "tune", *what, *points, "--client", "double", "--out", out]
    found = CliRunner().invoke(app, [*words, *json_], standalone_mode=False)
    assert found.return_value == 0, found.output
    assert Tuning.model_validate_json(Path(out).read_bytes()).chosen == {"token_ms": 0.5}
    assert [one["name"] for one in json.loads(found.stdout)["refused"]] == ["lossy", "drafted"]
    words = ["throughput", "compare-engines", *what, "stock", "first_ms=1", *points]
    words += ["--tuned", out, "--processes", "1"]
    found = CliRunner().invoke(app, [*words, *json_], standalone_mode=False)
    result = ServedResult.model_validate_json(found.stdout)
    assert [side.arguments for side in result.header.sides] == [
        {"first_ms": 1, "token_ms": 0.5}
    ] * 2
    bare = CliRunner().invoke(app, ["throughput", "tune", *what, "--draft", "a/b"])
    assert isinstance(bare.exception, UsageError)
    assert "over HTTP" in bare.exception.message
