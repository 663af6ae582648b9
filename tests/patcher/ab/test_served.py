"""Ways to serve, compared over HTTP: the session against a double server, and the verdict."""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import JsonValue, ValidationError
from rich.console import Console
from rich.text import Text
from served_sample import (
    CLIENT,
    FAST,
    JOB,
    POINTS,
    SLOW,
    SUPPORT,
    WORKLOAD,
    serve_by_doubles,
)
from typer.testing import CliRunner

from patcher.ab import bench_client, served, server
from patcher.ab.block_folder import blocks_folder
from patcher.ab.job import ABJob
from patcher.ab.served import compare_served, with_patches
from patcher.ab.served_records import (
    ServedHeader,
    ServedJob,
    ServedProcess,
    ServedResult,
    ServedSide,
    SideSetup,
    header_of,
)
from patcher.ab.served_verdict import judge_served
from patcher.ab.server import EngineServer, WarmUp, announce_plugin, installation, warm_up
from patcher.bench import MissingError, PatcherError, UsageError, VerificationError
from patcher.bench.ab.phases import silent
from patcher.bench.ab.served import (
    ServedPoint,
    ServedRun,
    arm_orders,
    points_of,
    requests_of,
    run_of,
    traces,
)
from patcher.bench.engines import serving
from patcher.bench.engines.architecture import full_config, model_digest
from patcher.bench.engines.served_prompts import ServedPrompts
from patcher.bench.engines.serving import client_of, clients, flags, request_line
from patcher.bench.machine.environment import ROOT, python_path
from patcher.bench.stats.comparison import Arm
from patcher.commands.console import app
from patcher.commands.throughput_sides import side_of
from patcher.integrate import Receipt
from patcher.integrate import vllm as vllm_plugin
from patcher.report.served import served_html, served_markdown
from patcher.runs.durable import held_alone
from patcher.show.served import served_lines

ID, DIGEST = "double.norm", "0" * 64


@pytest.fixture(autouse=True)
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_doubles(tmp_path, monkeypatch)
    monkeypatch.setattr(served, "compiles", lambda engine: False)  # doubles start faster


@dataclass(frozen=True)
class PatchedSide(SideSetup):
    """A double's patch: its server writes receipts, or does not."""

    def digests(self, engine: str) -> dict[str, str]:
        return {ID: DIGEST}

    def environment(self, folder: Path) -> dict[str, str]:
        return {"PATCHER_RECEIPTS": str(folder / "receipts")}


def test_a_faster_server_is_found_and_what_was_taken_is_kept(tmp_path: Path) -> None:
    fast = PatchedSide("fast", {"token_ms": 2, "patch": ID})
    checkout = tmp_path / "a checkout"
    checkout.symlink_to(SUPPORT)
    program = str(checkout / "openai_server.py")
    serve = ("{python}", program, "--port", "{port}")
    job = replace(JOB, serving=CLIENT.model_copy(update={"serve": serve}))
    begun = compare_served(replace(job, process_pairs=1), (SLOW, fast), tmp_path, silent)
    assert begun.comparison.verdict == "inconclusive"
    [folder] = tmp_path.glob("served-*")
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("pair-*.json")}
    result = compare_served(job, (SLOW, fast), tmp_path, silent)
    assert result.processes[:2] == begun.processes
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    # 255 tokens after the first: 4 + 255 x 4 ms against 4 + 255 x 2 ms, at both points
    found = result.comparison
    assert found.gain_pct == pytest.approx(100 * (1024 / 514 - 1))
    assert found.verdict == "accept"
    assert [(one.pair, one.arm) for one in result.processes] == list(arm_orders(2))
    figures = found.points[1].figures
    assert figures["baseline"].tpot_ms["p99"] == pytest.approx(4)
    assert figures["patched"].user_tokens_per_s == pytest.approx(500)
    assert figures["patched"].output_tokens_per_s == pytest.approx(2 * 256 / 0.514)
    assert figures["patched"].ttft_ms["p50"] == pytest.approx(4)
    assert figures["patched"].goodput_per_s == pytest.approx(2 / 0.514)
    # calls while it was measured, not those of the warm-up: one request a point
    assert [one.receipts[0].total_calls for one in result.processes if one.receipts] == [4, 4]
    page = served_html(result)
    assert page.count("<svg") == 4, "gains and one trace, each for a screen and a phone"
    assert page.count('class="whisker') == 2 * 3, "two points and their mean"
    assert "+99.22 %" in page
    assert "interval over 2 process pairs" in page
    assert 'class="whisker' not in served_html(begun), "one pair has no interval"
    assert str(Path.home()) not in result.model_dump_json()
    lines = [line for line in served_markdown(result).splitlines() if "openai_server.py" in line]
    started = ["PYTHON", program, "--port", "PORT", "--first-ms", "4"]
    assert [shlex.split(line) for line in lines] == [started]
    assert served_lines(result)


def test_both_processes_of_a_pair_are_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(pairs: int) -> list[str]:
        job = replace(JOB, process_pairs=pairs, points=POINTS[:1])
        result = compare_served(job, (SLOW, FAST), tmp_path, silent)
        return [one.machine for one in result.processes]

    here = compared(1)
    assert here[0] == here[1] != ""
    [folder] = tmp_path.glob("served-*")
    whole = {path: path.read_bytes() for path in folder.glob("pair-0-*")}
    (half,) = compared(2)[2:3]
    assert half == here[0]
    (folder / "pair-1-baseline.json").unlink()
    left = (folder / "pair-1-patched.json").read_bytes()
    assert compared(2) == here * 2
    assert (folder / "pair-1-patched.json").read_bytes() == left
    (folder / "pair-1-baseline.json").unlink()
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    there = compared(2)
    assert there[:2] == here
    assert there[2] == there[3] != here[0]
    assert {path: path.read_bytes() for path in whole} == whole


def test_no_process_that_is_measured_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "compiles", lambda engine: engine == WORKLOAD.engine)

    def starts(pairs: int) -> list[str]:
        told: list[str] = []
        job = replace(JOB, process_pairs=pairs, points=POINTS[:1])
        compare_served(job, (SLOW, FAST), tmp_path, lambda phase, said, *at: told.append(said))
        return [one.partition(", ")[2] for one in told if one.startswith("starting the server")]

    both = {f"{arm}, which only compiles" for arm in served.ARMS}
    first = starts(1)
    assert (set(first[:2]), first[2:]) == (both, list(served.ARMS))
    assert starts(2) == ["patched", "baseline"], "it finds on disk what those before compiled"
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert set(starts(3)[:2]) == both


def test_both_sides_compile_at_once_where_both_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "compiles", lambda engine: engine == WORKLOAD.engine)
    job = replace(JOB, process_pairs=1, points=POINTS[:1])

    def told(place: str, **more: JsonValue) -> list[str]:
        said: list[str] = []
        sides = (SLOW.beside(more), FAST.beside(more))
        compare_served(job, sides, tmp_path / place, lambda phase, each, *at: said.append(each))
        return [one for one in said if one.startswith(("starting", "both sides"))]

    # each of the two waits until the other is there, so that one after the other never serves
    (tmp_path / "met").mkdir()
    assert len(told("beside", meet=str(tmp_path / "met"))) == 4
    # without room each starts alone, and that is said
    alone = told("alone", takes_all=True)
    assert "one by one: the baseline server ended" in alone[2]
    assert "out of memory" in alone[2]
    assert [one.removeprefix("starting the server, ") for one in alone[3:]] == [
        f"{arm}{note}" for arm in served.ARMS for note in (", which only compiles", "")
    ]


def test_sides_with_one_port_start_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's servers share a port, so that one would answer for the other."""
    monkeypatch.setattr(served, "compiles", lambda engine: engine == WORKLOAD.engine)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said: list[str] = []
    job = replace(JOB, process_pairs=1, points=POINTS[:1], port=port)
    # given a share of the memory, as both are where they start at once, they end
    sides = SLOW.beside({"takes_all": True}), FAST.beside({"takes_all": True})
    compare_served(job, sides, tmp_path, lambda phase, each, *at: said.append(each))
    assert not [one for one in said if one.startswith("both sides")]
    assert len([one for one in said if one.startswith("starting the server")]) == 4


def test_two_commands_never_serve_at_one_port(tmp_path: Path) -> None:
    """Though the other one's server does not listen yet."""
    port = server.free_port()
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    place = (tmp_path, port, "/health")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineServer, "_await", lambda *_: None)
        first = EngineServer("first", waits, os.environ, *place)
        with first, pytest.raises(UsageError, match=f"port {port} is in use: another command"):
            compare_served(replace(JOB, port=port), (SLOW, FAST), tmp_path, silent)
    job = replace(JOB, port=port, process_pairs=1, points=POINTS[:1])
    assert compare_served(job, (SLOW, FAST), tmp_path, silent).processes


def test_an_error_of_one_side_that_nobody_expects_is_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "compiles", lambda engine: engine == WORKLOAD.engine)

    def compile_(_: Any, arm: Arm, *more: Any) -> None:
        raise PatcherError("it ended") if arm == "baseline" else ZeroDivisionError

    monkeypatch.setattr(served.Taking, "compile", compile_)
    job = replace(JOB, process_pairs=1, points=POINTS[:1])
    with pytest.raises(ZeroDivisionError):
        compare_served(job, (SLOW, FAST), tmp_path, silent)


def test_ctrl_c_ends_servers_that_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "compiles", lambda engine: engine == WORKLOAD.engine)
    monkeypatch.setattr(server, "START_S", 60)
    ends: list[str] = []

    def failed(_: Any, how: str) -> PatcherError:
        ends.append(how)
        return PatcherError(how)

    monkeypatch.setattr(EngineServer, "failed", failed)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*.here")) and time.monotonic() < deadline:
            time.sleep(0.02)
        signal.pthread_kill(main, signal.SIGINT)

    # it waits for another one, which never comes
    sides = SLOW.beside({"meet": str(tmp_path)}), FAST
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compare_served(replace(JOB, process_pairs=1), sides, tmp_path / "kept", silent)
    thread.join()
    assert any(how.startswith("ended") for how in ends), ends
    [waiting] = tmp_path.glob("*.here")
    with pytest.raises(ProcessLookupError):
        os.kill(int(waiting.stem), 0)


def test_ctrl_c_waits_for_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 20)
    main, asked, said = threading.main_thread().ident, threading.Event(), list[str]()
    assert main is not None
    post = EngineServer._post

    def spy(self: EngineServer, *more: Any) -> str:
        asked.set()
        said.append(post(self, *more))
        return said[-1]

    def interrupt() -> None:
        asked.wait(60)
        time.sleep(0.5)  # until it waits for the answer
        signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(EngineServer, "_post", spy)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compare_served(JOB, (SLOW.beside({"hang": True}), FAST), tmp_path, silent)
    thread.join()
    assert said
    assert not any("timed out" in one for one in said), "the server's end is the request's"


def test_several_gpus_share_the_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of the same command at a time, here threads; each stands for a GPU of one host."""
    monkeypatch.setattr(served, "compiles", lambda engine: engine == WORKLOAD.engine)
    monkeypatch.setattr(served, "WAIT_S", 0.05)
    told: list[str] = []

    def compared(job: ServedJob) -> ServedResult:
        return compare_served(
            job, (SLOW, FAST), tmp_path, lambda phase, said, *at: told.append(said)
        )

    job = replace(JOB, process_pairs=4, points=POINTS[:1])
    with ThreadPoolExecutor(2) as pool:
        one, other = (task.result() for task in [pool.submit(compared, job) for _ in range(2)])
    assert one.processes == other.processes
    assert one.comparison == other.comparison
    starts = Counter(said for said in told if said.startswith("starting the server"))
    assert starts == {
        **{f"starting the server, {arm}": 4 for arm in served.ARMS},
        **{f"starting the server, {arm}, which only compiles": 1 for arm in served.ARMS},
    }
    # a pair whose holder ends without it is taken by who waits
    [folder] = tmp_path.glob("served-*")
    waits = "another process measures pair 4"
    with ThreadPoolExecutor(1) as pool, held_alone(folder / "pair-4.lock", "measures it"):
        five = pool.submit(compared, replace(job, process_pairs=5))
        deadline = time.monotonic() + 60
        while waits not in told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert folder.joinpath("pair-4.lock").is_file()
    assert waits in told
    assert len(five.result(timeout=60).processes) == 10


def test_pairs_of_another_host_count_once_and_only_for_the_same_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(JOB, process_pairs=1, points=POINTS[:1])
    here, told = tmp_path / "here", list[str]()
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    there = compare_served(job, (SLOW, FAST), tmp_path / "there", silent)
    monkeypatch.undo()
    serve_by_doubles(tmp_path, monkeypatch)
    monkeypatch.setattr(served, "compiles", lambda engine: False)
    joined = compare_served(
        replace(job, process_pairs=3, earlier=(there, there)),
        (SLOW, FAST),
        here,
        lambda phase, said, *at: told.append(said),
    )
    assert "1 of 2 earlier pairs count" in told[0]
    assert [one.machine == there.processes[0].machine for one in joined.processes] == (
        [True] * 2 + [False] * 4
    )
    assert joined.processes[:2] == there.processes
    assert sum("starting the server" in said for said in told) == 4
    # an odd pair began with the other side, and stays odd
    odd = joined.model_copy(update={"processes": joined.processes[2:4]})
    again = compare_served(
        replace(job, process_pairs=2, earlier=(odd,)), (SLOW, FAST), tmp_path / "again", silent
    )
    assert again.processes[2:] == odd.processes
    for other, said in (
        ({"fingerprint": "another"}, "another device, driver or version"),
        ({"sides": there.header.sides[::-1]}, "another pair of sides"),
        ({"workload": WORKLOAD.model_copy(update={"dtype": "float16"})}, "another dtype"),
        ({"config": "of another"}, "another config.json or weights"),
    ):
        header = there.header.model_copy(update=other)
        foreign = there.model_copy(update={"header": header})
        with pytest.raises(UsageError, match=said):
            compare_served(replace(job, earlier=(foreign,)), (SLOW, FAST), here, silent)
    before = there.model_copy(update={"header": there.header.model_copy(update={"config": ""})})
    compare_served(replace(job, earlier=(before,)), (SLOW, FAST), tmp_path / "before", silent)
    nameless = [one.model_copy(update={"machine": ""}) for one in there.processes]
    older = there.model_copy(update={"processes": tuple(nameless)})
    with pytest.raises(UsageError, match="which machine"):
        compare_served(replace(job, earlier=(older,)), (SLOW, FAST), here, silent)


def test_the_margin_is_the_one_that_was_declared_before(tmp_path: Path) -> None:
    job = replace(JOB, process_pairs=1, points=POINTS[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.Taking, "process", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compare_served(replace(job, margin_pct=1.0), (SLOW, FAST), tmp_path, silent)
    found = compare_served(job, (SLOW, FAST), tmp_path, silent)
    with pytest.raises(UsageError, match=r"declared before it was measured: 0\.5 %"):
        compare_served(replace(job, margin_pct=0.0), (SLOW, FAST), tmp_path, silent)
    other = replace(job, margin_pct=2.0, earlier=(found,))
    with pytest.raises(UsageError, match="declared before it was measured: 2 %"):
        compare_served(other, (SLOW, FAST), tmp_path / "there", silent)
    assert compare_served(job, (SLOW, FAST), tmp_path, silent).comparison == found.comparison


def test_arguments_that_a_side_does_not_name_are_told(tmp_path: Path) -> None:
    stock = SideSetup("stock", {"token_ms": 4})
    job = replace(JOB, process_pairs=1, points=POINTS[:1])
    found = compare_served(job, (stock, SideSetup("token_ms=2", {"token_ms": 2})), tmp_path, silent)
    shown = [line.plain for line in served_lines(found) if isinstance(line, Text)]
    for lines in (shown, re.findall("<li>(.*?)</li>", served_html(found))):
        told = [line for line in lines if line.startswith(("baseline:", "patched:"))]
        assert told[0].endswith("stock with token_ms=4")
        assert told[1].endswith(f"{found.header.sides[1].version} token_ms=2")


def test_pairs_that_nobody_measured_do_not_count(tmp_path: Path) -> None:
    job = replace(JOB, process_pairs=2, points=POINTS[:1])
    there = compare_served(job, (SLOW, FAST), tmp_path / "there", silent)
    first, second = there.processes[:2]

    def joined(*processes: ServedProcess) -> ServedResult:
        given = there.model_copy(update={"processes": processes})
        more = replace(job, process_pairs=4, earlier=(given,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platform, "node", lambda: "elsewhere")
            return compare_served(more, (SLOW, FAST), tmp_path / "here", silent)

    def changed(**update: Any) -> ServedProcess:
        return second.model_copy(update=update)

    other = second.runs[0].model_copy(update={"point": POINTS[1]})
    for damaged in (
        (first,),
        (first, first),
        (first, second, second),
        (first, changed(arm="baseline")),
        (first, changed(machine="another")),
        (first, changed(runs=())),
        (first, changed(runs=(other,))),
    ):
        with pytest.raises(UsageError, match="that result is damaged"):
            joined(*damaged)
    # a pair that is there twice counts once
    twice = [one.model_copy(update={"pair": 2}) for one in (first, second)]
    found = joined(first, second, *twice)
    assert [one.machine == first.machine for one in found.processes] == [True] * 2 + [False] * 6
    [folder] = (tmp_path / "here").glob("served-*")
    (folder / "pair-1-patched.json").write_bytes((folder / "pair-0-patched.json").read_bytes())
    with pytest.raises(VerificationError, match=r"pair-1-patched.json holds another process"):
        compare_served(job, (SLOW, FAST), tmp_path / "here", silent)


def test_names_and_reasons_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    job = replace(JOB, process_pairs=1, points=POINTS[:1])
    found = compare_served(job, (SLOW, FAST), tmp_path, silent)
    model, hostile = f"{tmp_path}/[/x]\x1b[2J", "[/y]<script>\u202e\x1b[2J"
    sides = tuple(one.model_copy(update={"name": hostile}) for one in found.header.sides)
    workload = found.header.workload.model_copy(update={"model": model})
    header = found.header.model_copy(update={"sides": sides, "workload": workload})
    verdict = found.comparison.model_copy(update={"reasons": (hostile,)})
    result = found.model_copy(update={"header": header, "comparison": verdict})
    told = io.StringIO()
    console = Console(file=told, width=200)
    for line in served_lines(result):
        console.print(line)
    shown = told.getvalue()
    assert shown.count("[/y]<script><U+202E><U+001B>[2J") == 3
    assert "/[/x]<U+001B>[2J" in shown
    for text in (shown, served_html(result), served_markdown(result)):
        assert not {"\x1b", "\u202e"} & set(text)
    assert "<script" not in served_html(result)


@pytest.mark.parametrize(
    "update",
    [
        {"output_tokens_per_s": 0},
        {"output_tokens_per_s": -3},
        {"output_tokens_per_s": None},
        {"tpot_ms": {"p50": 1}},
        {"tpot_ms": {"p50": 0, "p95": 0, "p99": 0}},
        {"duration_s": "inf"},
        {"point": {"trace": "fixed", "concurrency": 1, "rate": 2}, "tpot_ms": {}},
    ],
)
def test_a_file_with_figures_that_cannot_be_is_no_result(update: dict[str, Any]) -> None:
    fields = run_at(POINTS[0], 8).model_dump()
    with pytest.raises(ValidationError):
        ServedRun.model_validate_json(json.dumps(fields | update))


def test_a_folder_that_holds_another_model_is_another_comparison(tmp_path: Path) -> None:
    job = replace(JOB, workload=JOB.workload.model_copy(update={"model": str(tmp_path)}))
    names = []
    for layers in (1, 2, 1):
        config = full_config("gpt-oss-tiny") | {"num_hidden_layers": layers, "layer_types": None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        names.append(header_of(job, (SLOW, FAST))[0].folder_name)
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("at", [0, 100_000, 299_999])
def test_a_folder_whose_weights_changed_is_another_comparison(tmp_path: Path, at: int) -> None:
    config = full_config("gpt-oss-tiny") | {"layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = bytearray(300_000)
    real = JOB.workload.model_copy(update={"model": str(tmp_path), "weights": "local"})
    trial = ABJob(workload=real, process_pairs=3)
    names, folders = [], []
    for changed in (0, 1, 0):
        weights[at : at + 40_000] = [changed] * len(weights[at : at + 40_000])
        (tmp_path / "model.safetensors").write_bytes(weights)
        names.append(model_digest(real))
        with blocks_folder(trial, (), tmp_path / "runs") as folder:
            folders.append(folder)
    assert names[0] == names[2] != names[1]
    assert folders[0] == folders[2] != folders[1]
    drawn = JOB.workload.model_copy(update={"model": str(tmp_path)})
    assert model_digest(drawn) != model_digest(real), "random weights come from no file"


def test_at_a_rate_of_requests_a_user_gains_and_the_mean_is_of_concurrencies(
    tmp_path: Path,
) -> None:
    points = points_of("fixed", [1], [0.5, 8])
    assert [one.label for one in points] == [
        "fixed, 1 at a time",
        "fixed, 0.5 requests/s",
        "fixed, 8 requests/s",
    ]
    assert [traces()["fixed"].requests(1, rate) for rate in (None, 0.5, 8)] == [12, 64, 160]
    found = compare_served(replace(JOB, points=points), (SLOW, FAST), tmp_path, silent)
    closed, slow, fast = found.comparison.points
    for one in (slow, fast):
        both = one.figures["baseline"], one.figures["patched"]
        assert both[0].output_tokens_per_s == both[1].output_tokens_per_s
        users = [each.user_tokens_per_s or math.nan for each in both]
        assert users[1] / users[0] == pytest.approx(2)
        assert one.gain_pct == pytest.approx(100)
    assert fast.figures["patched"].output_tokens_per_s == pytest.approx(8 * 256)
    assert found.comparison.gain_pct == pytest.approx(closed.gain_pct)
    assert found.comparison.gain_pct == pytest.approx(100 * (1024 / 514 - 1))
    page = served_html(found)
    assert page.count("of a user</td>") == 2
    assert "the GPU serves what arrives" in page
    alone = replace(JOB, points=points[1:])
    rates = compare_served(alone, (FAST, SLOW), tmp_path, silent).comparison
    assert rates.verdict == "reject"
    assert "-50.00 % tokens/s of a user, mean of 2 points" in rates.reasons[0]
    without = replace(JOB, points=points, serving=CLIENT.model_copy(update={"rate": ()}))
    with pytest.raises(UsageError, match="double has no rate of requests"):
        compare_served(without, (SLOW, FAST), tmp_path, silent)


def test_a_patch_that_never_ran_is_rejected(tmp_path: Path) -> None:
    silent_one = PatchedSide("fast", {"token_ms": 2})
    job = replace(JOB, process_pairs=1, points=POINTS[:1])
    found = compare_served(job, (SLOW, silent_one), tmp_path, silent).comparison
    assert found.verdict == "reject"
    assert found.reasons[1:] == (f"{ID} never ran while fast was measured",)


def test_a_server_that_dies_says_its_last_words(tmp_path: Path) -> None:
    dying = SideSetup("dying", {"die_after": 7})
    with pytest.raises(PatcherError, match=r"baseline server ended \(exit code 3\): out of luck"):
        compare_served(JOB, (dying, FAST), tmp_path, silent)
    broken = SideSetup("broken", {"no_such_option": 1})
    with pytest.raises(PatcherError, match="unrecognized arguments: --no-such-option"):
        compare_served(JOB, (broken, FAST), tmp_path, silent)
    assert not list(tmp_path.glob("served-*/pair-*.json"))


FAILING_CLIENT = """
import http.client, json, sys
port, requests, _, result = sys.argv[1:]
try:
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", int(port))
        connection.request("POST", "/v1/completions", '{"max_tokens": 1}')
        connection.getresponse().read()
except (OSError, http.client.HTTPException):
    pass  # it died
none = [0] * len(open(requests).readlines())
found = {"duration": 1, "input_lens": none, "output_lens": none, "ttfts": none}
found |= {"itls": [[] for _ in none], "errors": ["Internal Server Error" for _ in none]}
open(result, "w").write(json.dumps(found))
"""


def test_requests_that_fail_are_told_with_what_the_server_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "DYING_S", 1)
    (tmp_path / "failing_client.py").write_text(FAILING_CLIENT)
    bench = ("failing_client", *CLIENT.bench[1:])
    job = replace(JOB, serving=CLIENT.model_copy(update={"bench": bench}))
    dying = SideSetup("dying", {"die_after": 31})  # after the warm-up
    with pytest.raises(PatcherError, match=r"baseline server ended \(exit code 3\): out of luck"):
        compare_served(job, (dying, FAST), tmp_path, silent)
    with pytest.raises(PatcherError, match=r"12 of 12 requests failed .* Internal") as alive:
        compare_served(job, (SLOW, FAST), tmp_path, silent)
    assert "its output is in" in alive.value.hint


def test_requests_that_arrive_slowly_have_the_time_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_client, "RUN_S", 0.0)
    # 200 requests arrive in 20 s; without a limit for what comes after, the run has these
    script = "import runpy, sys, time; time.sleep(0.6); "
    script += "runpy.run_module('served_client_double', run_name='__main__')"
    (tmp_path / "slow_client.py").write_text(script)
    bench = ("slow_client", *CLIENT.bench[1:])
    points = points_of("fixed", [1], [10])[1:]
    serving = CLIENT.model_copy(update={"bench": bench})
    job = replace(JOB, serving=serving, points=points, process_pairs=1)
    assert compare_served(job, (SLOW, FAST), tmp_path, silent).processes
    closed = replace(job, points=POINTS[:1])
    serving = CLIENT.model_copy(update={"bench": ("asleep", *CLIENT.bench[1:])})
    (tmp_path / "asleep.py").write_text("import time; time.sleep(60)")
    with pytest.raises(PatcherError, match="double took longer than 0 s"):
        compare_served(replace(closed, serving=serving), (SLOW, FAST), tmp_path, silent)


def test_a_port_in_use_a_broken_client_and_what_is_missing_are_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use"):
            compare_served(replace(JOB, port=port), (SLOW, FAST), tmp_path, silent)
    (tmp_path / "broken_client.py").write_text("raise ValueError('no trace')")
    broken = CLIENT.model_copy(update={"bench": ("broken_client",)})
    with pytest.raises(PatcherError, match=r"double failed .* no trace"):
        compare_served(replace(JOB, serving=broken), (SLOW, FAST), tmp_path, silent)
    (tmp_path / "broken_client.py").write_text("import sys; sys.exit('no tokenizer here')")
    with pytest.raises(PatcherError, match=r"double failed \(exit code 1\): no tokenizer here"):
        compare_served(replace(JOB, serving=broken), (SLOW, FAST), tmp_path, silent)
    (tmp_path / "idle_client.py").touch()
    idle = CLIENT.model_copy(update={"bench": ("idle_client",)})
    with pytest.raises(PatcherError, match="wrote no result"):
        compare_served(replace(JOB, serving=idle), (SLOW, FAST), tmp_path, silent)
    for update, said in (
        ({"package": "no-such-engine"}, "has no no-such-engine"),
        ({"needs": ("no_such_module",)}, "the client needs no_such_module"),
    ):
        with pytest.raises(MissingError, match=said):
            installation(CLIENT.model_copy(update=update), sys.executable)
    with pytest.raises(UsageError, match="no Python"):
        installation(CLIENT, "/no/such/python")
    trained = CLIENT.model_copy(update={"random_weights": ()})
    with pytest.raises(UsageError, match="cannot serve random weights"):
        compare_served(replace(JOB, serving=trained), (SLOW, FAST), tmp_path, silent)


def run_at(point: ServedPoint, rate: float, stalled: bool = False) -> ServedRun:
    figures = {"p50": 1e3 / rate, "p95": 1e3 / rate, "p99": 1e3 / rate}
    return ServedRun(
        point=point, requests=8, duration_s=1, input_tokens=8, output_tokens=8,
        output_tokens_per_s=rate, total_tokens_per_s=2 * rate, goodput_per_s=1, ttft_ms=figures,
        tpot_ms=figures, itl_ms=figures, longest_gap_ms=1, stalled=stalled,
    )  # fmt: skip


def judged(
    gains_pct: Sequence[float],
    pairs: int = 3,
    noise_pct: float | Sequence[float] = 0.5,
    stalled: bool = False,
    arguments: Mapping[str, Any] | None = None,
    flags_no_faster: bool = True,
    ran: Mapping[Arm, bool] | None = None,
    receipts: Sequence[Receipt] | None = None,
    patches: Mapping[str, str] | None = None,
    seed: int = 1,
) -> Any:
    """The verdict on planted gains by point, with normal noise of each process at each point, of
    one size or of one for each point."""
    noises = [noise_pct] * len(gains_pct) if isinstance(noise_pct, float | int) else noise_pct
    points = tuple(ServedPoint(trace="fixed", concurrency=2**k) for k in range(len(gains_pct)))
    rng, processes = random.Random(seed), []
    where = {"baseline": False, "patched": True} if ran is None else ran
    for pair, arm in arm_orders(pairs):
        runs = tuple(
            run_at(
                point,
                100
                * math.exp(rng.gauss(0, noise / 100))
                * (1 + (gain / 100 if arm == "patched" else 0)),
                stalled and pair == 0,
            )
            for point, gain, noise in zip(points, gains_pct, noises, strict=True)
        )
        calls = {"kernel": 5} if where[arm] else {}
        own = [Receipt(patch_id=ID, digest=DIGEST, pid=1, calls=calls)]
        if receipts is not None:
            own = list(receipts) if arm == "patched" else []
        processes.append(
            ServedProcess(
                pair=pair,
                arm=arm,
                start_s=1,
                took_s=1,
                warm_ups={},
                runs=runs,
                stalled=(),
                receipts=tuple(own),
            )
        )
    stock = ServedSide(name="stock", version="1", arguments={}, patches={})
    patched = stock.model_copy(
        update={
            "name": "patched",
            "patches": dict(patches or {ID: DIGEST}),
            "arguments": dict(arguments or {}),
        }
    )
    header = ServedHeader(
        fingerprint="f", workload=WORKLOAD, client="double", traces={}, points=points,
        sides=(stock, patched), serve=(), bench=(),
    )  # fmt: skip
    return judge_served(header, processes, 0.5, flags_no_faster)


@pytest.mark.parametrize(
    ("gains", "more", "verdict", "said"),
    [
        ((20, 15, 5, 1), {}, "accept", "above the margin"),
        ((20, 15, 5, 1), {"pairs": 2}, "accept", "over 2 process pairs"),
        ((20, 15, 5, -6), {}, "reject", "8 at a time loses beyond its noise: -6"),
        ((20, 15, 5, -0.3), {}, "accept", "no point loses beyond its noise"),
        ((0.1, 0, -0.1, 0), {"noise_pct": 0.05}, "reject", "below the margin of 0.5 %"),
        ((1, 1, 1, 1), {"noise_pct": 3}, "inconclusive", "holds the margin"),
        ((20,), {"pairs": 1}, "inconclusive", "one process pair does not show"),
        ((20, 15), {"stalled": True}, "inconclusive", "4 runs stalled"),
        ((20, -50), {"stalled": True}, "inconclusive", "4 runs stalled"),
        ((20, 15), {"arguments": {"x": 1}, "flags_no_faster": False}, "inconclusive", "differ"),
        ((20, 15), {"arguments": {"x": 1}}, "accept", "above the margin"),
        ((20,), {"ran": {"baseline": False, "patched": False}}, "reject", "never ran"),
        ((20,), {"ran": {"baseline": True, "patched": True}}, "reject", "ran while stock"),
    ],
)
def test_planted_gains_and_losses_are_judged(
    gains: Sequence[float], more: dict[str, Any], verdict: str, said: str
) -> None:
    found = judged(gains, **more)
    assert (found.verdict, said in " ".join(found.reasons)) == (verdict, True), found.reasons


def test_what_falls_back_under_an_option_is_told_and_what_does_nothing_is_rejected() -> None:
    other = "double.cache"

    def found(norm: dict[str, Any], cache: dict[str, Any]) -> Any:
        whole = [
            Receipt(patch_id=name, digest=DIGEST, pid=1, **more)
            for name, more in ((ID, norm), (other, cache))
        ]
        return judged((20, 15), receipts=whole, patches={ID: DIGEST, other: DIGEST})

    ran, fp8 = {"calls": {"kernel": 5}}, {"fallbacks": {"dtype: float8": 7, "rank": 1}}
    told = found(ran, fp8)
    assert told.verdict == "accept"
    said = told.reasons[-1]
    assert said.endswith(f"24 calls fell back; {other} had no effect: dtype: float8")
    refused = found(ran, {"layers_taken": 0, "layers_refused": {"the cache is of float8": 24}})
    assert refused.reasons[-1].endswith(f"{other} had no effect: the cache is of float8")
    for norm, cache, why in (
        (fp8, fp8, f"{ID} had no effect while patched was measured: dtype: float8"),
        (ran, {}, f"{other} never ran while patched was measured"),
        ({"failure": "no compiler"}, fp8, f"{ID} had no effect .*: no compiler"),
    ):
        wrong = found(norm, cache)
        assert wrong.verdict == "reject"
        assert re.search(why, " ".join(wrong.reasons))


def test_intervals_cover_what_was_planted_and_the_noise_is_found() -> None:
    found = judged((20, 10, 5, 2, 1, 0), pairs=40, noise_pct=1.0)
    assert found.noise_pct == pytest.approx(math.sqrt(2), rel=0.15)  # of a ratio of two processes
    every = [judged((8, 0), pairs=3, noise_pct=1.0, seed=seed) for seed in range(200)]
    mean = 100 * (math.sqrt(1.08) - 1)
    assert 184 <= sum(one.gain_low_pct < mean < one.gain_high_pct for one in every) <= 196
    covered = sum(one.points[1].gain_low_pct < 0 < one.points[1].gain_high_pct for one in every)
    assert 184 <= covered <= 196
    single = judged((20,), pairs=1)
    assert (single.noise_pct, single.points[0].loses) == (None, False)
    json.loads(single.model_dump_json())  # its interval is finite
    assert single.points[0].said.endswith("%, no interval")


def test_a_quiet_point_is_not_judged_by_the_scatter_of_a_noisy_one() -> None:
    found = judged((40, 40), pairs=4, noise_pct=(0.5, 8.0))
    quiet, noisy = (one.gain_high_pct - one.gain_low_pct for one in found.points)
    assert quiet < 6 < 12 < noisy
    for noise in ((0.5, 8.0), (8.0, 0.5)):
        every = [judged((0, 0), pairs=4, noise_pct=noise, seed=seed) for seed in range(200)]
        for at in (0, 1):
            covered = sum(
                one.points[at].gain_low_pct < 0 < one.points[at].gain_high_pct for one in every
            )
            assert 184 <= covered <= 196
    two = judged((40, 40), pairs=2, noise_pct=(0.5, 8.0)).points
    widths = [math.log1p(one.gain_high_pct / 100) - math.log1p(one.gain_pct / 100) for one in two]
    assert widths[0] == pytest.approx(widths[1])  # one spread for both


def test_warm_up_goes_on_until_nothing_is_faster() -> None:
    asked: list[int] = []
    seconds = iter([2.0] * 4 + [1.0] * 4 + [0.95] * 4 + [0.1] * 4)

    def send(users: int) -> float:
        asked.append(users)
        return next(seconds)

    assert warm_up(send, 6).passes_s == (8.0, 4.0, 3.8)
    assert asked == [1, 2, 4, 6] * 3
    falling = iter([64.0, 32.0, 16.0, 8.0, 4.0, 2.0])
    assert warm_up(lambda _: next(falling), 1).passes_s == (64.0, 32.0, 16.0, 8.0, 4.0)
    limit = WarmUp(passes_s=(1, 1), last_s={1: 0.1, 8: 0.4}).limit_ms(4)
    assert limit == pytest.approx(800)


def test_a_run_that_stalls_is_taken_again(tmp_path: Path) -> None:
    script = (
        "import json, pathlib, sys; a = pathlib.Path('seen'); n = int(a.read_text()) if a.exists() "
        "else 0; a.write_text(str(n + 1)); json.dump(dict(duration=1, input_lens=[1] * 12, "
        "output_lens=[256] * 12, ttfts=[900 if n < WHEN else 0.1] * 12, itls=[[0.1]] * 12), "
        "open(sys.argv[1], 'w'))"
    )
    job = replace(JOB, process_pairs=1, points=POINTS[:1])
    for when, kept, stalled in ((2, 100, False), (9, 900_000, True)):
        (tmp_path / f"stalls_{when}.py").write_text(script.replace("WHEN", str(when)))
        bench = (f"stalls_{when}", "{folder}/{result}")
        serving = CLIENT.model_copy(update={"bench": bench})
        found = compare_served(
            replace(job, serving=serving), (SLOW, FAST), tmp_path / str(when), silent
        )
        for one in found.processes:
            assert [each.longest_gap_ms for each in one.stalled] == [900_000, 900_000]
            assert one.runs[0].longest_gap_ms == pytest.approx(kept)
            assert one.runs[0].stalled is stalled


def test_figures_are_those_of_the_requests() -> None:
    point, trace = ServedPoint(trace="fixed", concurrency=2), traces()["fixed"]
    found: dict[str, Any] = {
        "duration": 2.0,
        "input_lens": [10, 20],
        "output_lens": [3, 5],
        "ttfts": [0.1, 3.0],
        "itls": [[0.01, 0.03], [0.02, 0.02]],  # two tokens came at once, twice
    }
    run = run_of(point, trace, found)
    assert run.output_tokens_per_s == 4
    assert run.total_tokens_per_s == 19
    assert run.tpot_ms["p50"] == pytest.approx(15)  # of 20 and 10
    assert run.longest_gap_ms == 3000
    assert run.goodput_per_s == 0  # one has too long between tokens, one came too late
    with pytest.raises(PatcherError, match="1 of 2 requests failed at fixed, 2 at a time: refused"):
        run_of(point, trace, found | {"output_lens": [3, 0], "errors": ["", "Traceback\nrefused"]})


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"duration": 0}, "division by zero"),
        ({"duration": -1}, "greater than 0"),
        ({"duration": math.nan}, "finite"),
        ({"duration": math.inf}, "greater than 0"),
        ({"duration": 1e-320}, "finite"),
        ({"output_lens": [math.inf, 5]}, "infinity"),
        ({"output_lens": [10**400, 5]}, "too large"),
        ({"input_lens": [-50, 5]}, "greater than or equal to 0"),
        ({"ttfts": [math.nan, 0.1]}, "no time in seconds"),
        ({"ttfts": [math.inf, 0.1]}, "no time in seconds"),
        ({"itls": [[-0.1, 0.5], [0.1]]}, "no time in seconds"),
        ({"itls": [[], []]}, "came whole"),
        ({"itls": [[0, 0], [0]]}, "came whole"),
    ],
)
def test_a_result_that_no_server_could_give_is_none(update: dict[str, Any], said: str) -> None:
    found = {"duration": 2.0, "input_lens": [10, 20], "output_lens": [3, 5], "ttfts": [0.1, 3.0]}
    found |= {"itls": [[0.01, 0.03], [0.02, 0.02]]}
    expected = (PatcherError, ValueError, ArithmeticError)
    with pytest.raises(expected, match=said):
        run_of(POINTS[1], traces()["fixed"], found | update)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("found['duration'] = 0", "wrote no result that can be read: ZeroDivisionError"),
        ("found['duration'] = float('nan')", "wrote no result .*duration_s: .* finite number$"),
        ("found = {name: value[:-1] for name, value in found.items()}", "11 requests"),
        ("found['output_lens'] = [128] * 12", "12 requests got 1,536 .* 12 with 3,072 were asked"),
    ],
)
def test_what_was_not_asked_for_is_not_measured(change: str, said: str, tmp_path: Path) -> None:
    """Fewer tokens, such as of a model that stops early, are another load."""
    lines = [
        "import json, sys",
        "found = dict(input_lens=[1] * 12, output_lens=[256] * 12)",
        "found |= dict(ttfts=[0.1] * 12, itls=[[0.1]] * 12)",
        change,
        "found.setdefault('duration', 1)",
        "json.dump(found, open(sys.argv[1], 'w'))",
    ]
    (tmp_path / "absurd_client.py").write_text("\n".join(lines))
    serving = CLIENT.model_copy(update={"bench": ("absurd_client", "{folder}/{result}")})
    job = replace(JOB, serving=serving, process_pairs=1, points=POINTS[:1])
    with pytest.raises(PatcherError, match=said):
        compare_served(job, (SLOW, FAST), tmp_path, silent)
    assert not list(tmp_path.glob("served-*/pair-*.json"))


def test_a_damaged_tokenizer_is_told(tmp_path: Path) -> None:
    real = WORKLOAD.model_copy(update={"model": str(tmp_path), "weights": "local"})
    (tmp_path / "config.json").write_text(json.dumps(full_config("gpt-oss-tiny")))
    fast = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (tmp_path / "tokenizer_config.json").write_text(fast)
    for damaged in ("{", '{"version": "1.0"}', "[]", '{"added_tokens": [], "model": 3}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(UsageError, match=r"the tokenizer of .* cannot be read: ."):
            ServedPrompts(real)


def test_an_answer_has_the_length_that_is_asked_for_with_a_trained_tokenizer(
    tmp_path: Path,
) -> None:
    """Some clients take the length of an answer from its text."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "a": 1, "aa": 2, "b": 3}
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "a")]))
    base.decoder = decoders.ByteLevel()
    base.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=base, bos_token="<s>").save_pretrained(tmp_path)
    real = WORKLOAD.model_copy(update={"model": str(tmp_path), "weights": "local"})
    (tmp_path / "config.json").write_text(json.dumps(full_config("gpt-oss-tiny")))
    prompts, tokenizer = ServedPrompts(real), AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer.encode(prompts.text([1, 1]))) == 2, "both were joined"
    assert [len(tokenizer.encode(prompts.answer(length))) for length in (2, 256)] == [2, 256]
    drawn = ServedPrompts(WORKLOAD)
    assert len(drawn.answer(5000).split()) == 5000 > max(drawn.vocabulary)


def test_prompts_are_equal_for_both_arms_new_for_each_run_and_share_what_they_should() -> None:
    mixed = traces()["mixed"]
    words = range(2, 1000)
    one, same, other = (requests_of(mixed, 60, words, seed) for seed in (1500, 1500, 1510))
    assert one == same
    assert not {tuple(each.prompt) for each in one} & {tuple(each.prompt) for each in other}
    cached = [each.prompt[:2304] for each in one + other if len(each.prompt) == 2560]
    assert len(cached) > 4
    assert len({tuple(prompt) for prompt in cached}) == 2
    assert {len(each.prompt) for each in one} == {part.input_len for part in mixed.parts}


def test_a_checkout_is_announced_to_the_engine(tmp_path: Path) -> None:
    announce_plugin(CLIENT, tmp_path)
    [found] = importlib.metadata.distributions(path=[str(tmp_path)])
    [entry] = found.entry_points
    assert (entry.group, entry.name) == ("vllm.general_plugins", "patcher")
    assert entry.load() is vllm_plugin.register


def test_traces_and_clients_are_data() -> None:
    assert [one.label for one in points_of("fixed", [1, 128])][1] == "fixed, 128 at a time"
    assert [traces()["fixed"].requests(users) for users in (1, 8, 16, 64)] == [12, 64, 64, 192]
    for names, users in (("no", None), ("fixed,fixed", None), ("fixed", [8, 8])):
        with pytest.raises(UsageError):
            points_of(names, users)
    assert client_of(None, "vllm")[0] == "vllm-bench"
    for name, engine in (("vllm-bench", "sglang"), ("no", "vllm"), (None, "transformers")):
        with pytest.raises(UsageError, match=r"client|engine") as raised:
            client_of(name, engine)
        assert "sglang-bench (--engine sglang)" in raised.value.hint
    for one in clients().values():
        assert one.offline or json.loads(request_line(one.request, 'a "b" {answer}', "c", 7))
    given: dict[str, JsonValue] = {
        "a_b": True,
        "c": False,
        "d": {"e": 1},
        "f": None,
        "g": 0.5,
        "h": "i",
    }
    assert flags(given) == ["--a-b", "--no-c", "--d", '{"e": 1}', "--g", "0.5", "--h", "i"]


def test_the_command_line_measures_decides_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "clients", lambda: {"double": CLIENT})
    monkeypatch.setenv("PATCHER_RUNS_DIR", str(tmp_path / "runs"))
    what = ("gpt-oss-tiny", "--engine", "vllm", "--device", "cpu")
    points = ("--trace", "fixed", "--concurrency", "1")
    files = ("--out", str(tmp_path / "out.json"), "--report", str(tmp_path / "page"))
    sides = ("token_ms=4", "token_ms=2")
    for pairs, code in (("1", 1), ("2", 0)):
        words = ["throughput", "compare-engines", *what, *sides, *points, *files, "--json"]
        found = CliRunner().invoke(app, [*words, "--processes", pairs], standalone_mode=False)
        assert found.return_value == code, found.output
        result = ServedResult.model_validate_json((tmp_path / "out.json").read_bytes())
        assert [side.name for side in result.header.sides] == list(sides)
        assert json.loads(found.stdout)["comparison"] == result.comparison.model_dump(mode="json")
        assert "<svg" in (tmp_path / "page" / "report.html").read_text()


def test_a_side_names_its_interpreter_from_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "clients", lambda: {"double": CLIENT})
    monkeypatch.setenv("PATCHER_RUNS_DIR", str(tmp_path / "runs"))
    python = tmp_path / "an engine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    sides = ("token_ms=4", '"python=an engine/bin/python" token_ms=2')
    words = ["throughput", "compare-engines", "gpt-oss-tiny", "--engine", "vllm", "--device", "cpu"]
    words += [*sides, "--trace", "fixed", "--concurrency", "1", "--processes", "1", "--json"]
    found = CliRunner().invoke(app, words, standalone_mode=False)
    assert found.exception is None, found.output
    assert json.loads(found.stdout)["comparison"]["process_pairs"] == 1


@pytest.mark.parametrize("given", ["0.30", "1.0", "true", "null", "~/a store"])
def test_a_path_of_a_side_is_taken_as_it_is_written(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Path(os.path.expanduser(given))
    python = folder / "bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    one = {"id": "norm-1", "digest": DIGEST, "engine": "vllm", "point": "norm", "op": "x"}
    (folder / "applied.json").write_text(json.dumps({"applied": [one]}))
    with ExitStack() as stack:
        text = f"'store={given}' 'python={given}/bin/python'"
        side = side_of(text, "vllm", SideSetup("stock", {}), stack)
        assert side.store is not None
        assert side.store.absolute() == folder.absolute()
        assert side.python == str(python.absolute())
        with pytest.raises(UsageError, match="no patch of sglang is applied"):
            side_of(text, "sglang", SideSetup("stock", {}), stack)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("store=none", "no patch of vllm is applied in none"),
        ("store=~nobody-here/store", "no patch of vllm is applied in ~nobody-here/store"),
        ("patch=~nobody-here/patch", "~nobody-here/patch is not a patch bundle"),
        ("'store=a", "No closing quotation"),
        ("x=1 x=2", "says x twice"),
        ("python=a python=b", "says python twice"),
        ("x_y=1 x-y=2", "says x_y twice"),
        ("port=9000", "patcher gives each engine its port"),
    ],
)
def test_a_side_that_would_be_another_one_is_refused(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack, pytest.raises(UsageError, match=re.escape(said)):
        side_of(text, "vllm", SideSetup("stock", {}), stack)


def test_a_home_of_nobody_is_a_folder_that_is_not_there() -> None:
    words = ["profile", "~nobody-here/model", "--device", "cpu"]
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, PatcherError), found.exception
    assert server.interpreter("~nobody-here/python") == "~nobody-here/python"


def test_importing_the_loop_of_clients_leaves_the_path_alone() -> None:
    check = "import sys; path = [*sys.path]; import patcher.ab.bench_loop; assert sys.path == path"
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch 8 --pairs 9", "without --batch and --pairs"),
        ("--quick", "measured alone"),
        ("--profile x", "not profiled"),
        ("--concurrency 0", "--concurrency '0'"),
        ("--concurrency ,", "--concurrency ','"),
        ("--trace no", "unknown trace 'no'"),
        ("--trace=", "unknown trace ''"),
        ("--rate 0", "--rate 0 is no list of requests a second"),
        ("--rate 1e-320", "--rate 1e-320 is no list of requests a second"),
        ("--concurrency 1,99999999999999", "--concurrency 99999999999999"),
        ("--rate 2,x", "--rate 2,x is no list of requests a second"),
        ("--rate 2,2", "a point is there twice"),
        ("--with served.json", "cannot read served.json"),
        ("--processes 0", "no process pair"),
        ("--engine-arg port=9", "patcher gives each engine its port"),
        ("--engine-arg dtype=float16", "a dtype is an option of patcher"),
        ("--client no", "unknown client 'no'"),
    ],
)
def test_what_a_client_cannot_do_is_said_before_the_work(words: str, said: str) -> None:
    what = ("gpt-oss-tiny", "--engine", "vllm", "--device", "cpu", "--patch", "p")
    own = ["throughput", "compare", *what, "--client", "vllm-bench", *words.split()]
    found = CliRunner().invoke(app, own)
    assert isinstance(found.exception, UsageError)
    assert said in found.exception.message


def test_an_argument_that_a_patch_needs_is_no_gain_of_the_patch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "engine_wants", lambda engine, points: {"moe_backend": "triton"})
    target = SimpleNamespace(engine="vllm", point="experts.sum.oai")
    patch: Any = SimpleNamespace(
        manifest=SimpleNamespace(id=ID, target=target),
        digest=DIGEST,
        verify_target=lambda: None,
        calls_per_layer=lambda *together: None,
    )
    for backend, wanted in ((None, {}), ("triton", {}), ("marlin", {"moe_backend": "triton"})):
        stock = SideSetup("stock", {"moe_backend": backend} if backend else {})
        job, patched = with_patches(JOB, stock, [patch])
        assert patched.arguments == {**stock.arguments, **wanted}
        assert job.flags_no_faster is not bool(wanted)
    other = replace(JOB, workload=WORKLOAD.model_copy(update={"engine": "sglang"}))
    with pytest.raises(UsageError, match="is for vllm, not for sglang"):
        with_patches(other, stock, [patch])
    with pytest.raises(UsageError, match="given twice"):
        with_patches(JOB, stock, [patch, patch])
