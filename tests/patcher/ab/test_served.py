"""Ways to serve, compared over HTTP: the session against a double server."""

from __future__ import annotations

import io
import json
import math
import os
import platform
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
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

from patcher.ab import bench_client, served, server
from patcher.ab.block_folder import blocks_folder
from patcher.ab.job import ABJob
from patcher.ab.served import compare_served
from patcher.ab.served_records import (
    ServedJob,
    ServedProcess,
    ServedResult,
    SideSetup,
    header_of,
)
from patcher.ab.server import EngineServer, installation
from patcher.bench import MissingError, PatcherError, UsageError, VerificationError
from patcher.bench.ab.phases import silent
from patcher.bench.ab.served import (
    arm_orders,
    points_of,
    traces,
)
from patcher.bench.engines.architecture import full_config, model_digest
from patcher.bench.stats.comparison import Arm
from patcher.report.served import served_html, served_markdown
from patcher.runs.durable import held_alone
from patcher.show.served import served_lines

ID, DIGEST = "double.norm", "0" * 64


@pytest.fixture(autouse=True)
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_doubles(tmp_path, monkeypatch)


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
