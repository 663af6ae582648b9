"""What is seen of a run while it works, and of one that was killed."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killing_stories import OP
from rich.console import Console
from stopping_sample import LIMIT_S, Stage, recorded

from patcher.attempts import Attempt, Phase, Progress
from patcher.attempts import Stage as Doing
from patcher.bench import Outcome
from patcher.models import Usage
from patcher.report.attempts_page import attempts_page
from patcher.show.attempts import attempts_table
from patcher.show.watching import Watch


def attempt(
    iteration: int,
    outcome: Outcome = Outcome.CORRECT,
    speedup: float | None = 1.5,
    cost: float | None = 0.25,
    detail: str = "fine",
    **more: Any,
) -> Attempt:
    return Attempt(
        iteration=iteration,
        phase="functional",
        digest="d" * 64,
        outcome=outcome,
        geomean_speedup=speedup,
        detail=detail,
        usage=Usage(output_tokens=100, cost_usd=cost),
        model="scripted",
        reply_source="api",
        **more,
    )


def event(iteration: int, stage: Doing, done: Attempt | None = None) -> Progress:
    phase: Phase = "functional"
    return Progress(
        op=OP, iteration=iteration, iterations=8, stage=stage, phase=phase, attempt=done
    )


def screen(height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, height=height)


def text_of(watch: Watch) -> str:
    plain = Console(file=io.StringIO(), width=120)
    plain.print(watch._shown())
    file = plain.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_rounds_candidates_are_rows_that_change_in_place() -> None:
    with Watch(screen(), quiet=False) as watch:
        for iteration in range(3):
            watch.hear(event(iteration, "generate"))
        watch.hear(event(0, "evaluate"))
        watch("judge", 3, 12)
        rows = text_of(watch)
        assert (rows.count("asking"), rows.count("judging")) == (2, 1)
        assert "3/12" in rows
        watch.hear(event(0, "done", attempt(0)))
        watch.hear(event(1, "done", attempt(1, speedup=2.0, round=0)))
        failed = attempt(2, Outcome.COMPILATION_FAILURE, None, detail="expected ';'")
        watch.hear(event(2, "done", failed))
        rows = text_of(watch)
        assert f"{OP}: 3 of 8 candidates, best 2.000x" in rows
        assert re.search(r"1 +│ +0 │ functional │ correct +│ 2\.000x \* │ +\$0\.50", rows)
        assert "compilation failure" in rows
        assert "$0.75" in rows
        assert "asking" not in rows


def test_a_long_run_fits_a_low_terminal() -> None:
    with Watch(screen(height=20), quiet=False) as watch:
        for iteration in range(100):
            watch.hear(event(iteration, "done", attempt(iteration, speedup=1 + iteration / 100)))
        lines = text_of(watch).splitlines()
    assert len(lines) < 20
    assert any("99 " in line for line in lines)


def test_what_a_model_wrote_cannot_steer_the_terminal() -> None:
    hostile = attempt(0, Outcome.RUNTIME_ERROR, None, detail="\x1b[2Jgone\x07 [red]x[/red]")
    with Watch(screen(), quiet=False) as watch:
        watch.hear(event(0, "done", hostile))
        assert "\x1b[2J" not in text_of(watch)
        assert "[red]x[/red]" in text_of(watch)
    plain = Console(file=io.StringIO(), width=200)
    with Watch(plain, quiet=False) as watch:
        watch.hear(event(0, "done", hostile))
    plain.print(attempts_table((hostile,)))  # at the end, on stdout
    assert isinstance(plain.file, io.StringIO)
    assert "\x1b" not in plain.file.getvalue()
    assert "<U+001B>[2Jgone" in plain.file.getvalue()


def test_without_a_terminal_each_candidate_is_a_line() -> None:
    plain = Console(file=io.StringIO(), width=200)
    with Watch(plain, quiet=False) as watch:
        watch.hear(event(0, "generate"))
        watch.hear(event(0, "evaluate"))
        watch.hear(event(0, "done", attempt(0, cost=None)))
    assert isinstance(plain.file, io.StringIO)
    assert plain.file.getvalue().splitlines() == [
        "  candidate 0 (1 of 8, functional): asking",
        "  candidate 0 (functional): correct, fine; best 1.500x; so far 100 tokens",
    ]
    quiet = Console(file=io.StringIO())
    with Watch(quiet, quiet=True) as watch:
        watch.hear(event(0, "done", attempt(0)))
        watch.say("nothing")
    assert isinstance(quiet.file, io.StringIO)
    assert quiet.file.getvalue() == ""


def test_the_page_of_candidates_links_what_is_there(tmp_path: Path) -> None:
    for number, names in enumerate((["generate.prompt.md", "generate.reply.md"], ["x.tmp"])):
        (tmp_path / str(number)).mkdir()
        for name in [*names, "attempt.json", ".hidden"]:
            (tmp_path / str(number) / name).touch()
    second = attempt(1, speedup=0.9, detail="a | b\n[x](http://e.com) <b>", duplicate_of=0)
    page = attempts_page(OP, [attempt(0), second], tmp_path)
    assert "[generate prompt](0/generate.prompt.md) [generate reply](0/generate.reply.md)" in page
    assert "[0](0/) **best**" in page
    assert "the same source as 0" in page
    assert "$0.50" in page
    assert "<b>" not in page
    assert "](http" not in page
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (tmp_path / link).exists()
    assert "Tokens:" not in page
    counted = Usage(input_tokens=7000, output_tokens=900, cached_tokens=5000)
    page = attempts_page(OP, [second.model_copy(update={"usage": counted})], tmp_path)
    assert "Tokens: 7,000 in, 5,000 of them read from a provider's cache; 900 out." in page


def test_on_a_terminal_the_table_is_drawn_and_the_cursor_given_back(tmp_path: Path) -> None:
    model = recorded(tmp_path / "recording.jsonl", "this is no candidate")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "patcher", "optimize", OP, "--language", "cpp"),
            *("--iterations", "1", "--model", model),
        ],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "140", "LINES": "40", "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert process.wait(LIMIT_S) == 1, shown.decode()
    text = shown.decode()
    assert f"{OP}: 1 of 1 candidates" in text
    assert "generation failure" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    [page] = tmp_path.glob("patcher-runs/*/ops/*/attempts.md")
    assert "generation failure" in page.read_text()


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_a_report_of_a_run_that_goes_on_and_of_one_that_was_killed(tmp_path: Path) -> None:
    def report() -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "patcher", "report", "latest", "--json"],
            cwd=tmp_path,
            capture_output=True,
            check=True,
            timeout=LIMIT_S,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    with socket.create_server(("127.0.0.1", 0)) as server:
        stage = Stage(
            tmp_path,
            *("optimize", OP, "--language", "cpp", "--iterations", "1", "--model", "anthropic"),
            ANTHROPIC_API_KEY="sk-ant-none",
            ANTHROPIC_BASE_URL=f"http://127.0.0.1:{server.getsockname()[1]}",
        )
        server.settimeout(LIMIT_S)
        connection, _ = server.accept()
        with connection:
            running = report()
            page = Path(running["files"][0])
            assert (running["state"], running["step"]) == ("running", f"{OP}/0/ask-generate")
            assert running["spent_usd"] > 0  # what the question may cost
            shown = tmp_path / page
            assert "the run is going on" in shown.read_text().lower()
            second = Stage(tmp_path, "resume")  # two processes cannot write one run
            said, _ = second.process.communicate(timeout=LIMIT_S)
            assert second.process.returncode == 2
            assert f"written by process {stage.process.pid}" in json.loads(said)["error"]["message"]
            stage.stop(signal.SIGKILL, "alone")
    stopped = report()
    assert (stopped["state"], stopped["step"]) == ("stopped", f"{OP}/0/ask-generate")
    assert "patcher resume" in shown.read_text()


@pytest.mark.parametrize("iterations", [1, 3])
def test_where_a_run_stands(tmp_path: Path, iterations: int) -> None:
    from machine_sample import Bench, begin

    from patcher.runs.run import Run
    from patcher.status import status

    with begin(tmp_path) as run:
        Bench([1.1, 2.0, 1.5]).work(run, iterations)
        seen = Run.open(run.path, read_only=True)
        assert status(seen).state == "running"
    now = status(seen)
    assert (now.state, now.step, now.candidates) == ("finished", None, iterations)
    assert (now.best_iteration, now.best_speedup) == ((0, 1.1) if iterations == 1 else (1, 2.0))
    assert now.sentence() == (
        f"run {run.id} is finished ({iterations} candidates, best {now.best_speedup:.3f}x; "
        f"${now.spent_usd:.2f} used)"
    )
