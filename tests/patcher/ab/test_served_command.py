"""Ways to serve, compared over HTTP: what the command line takes and refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served_sample import (
    CLIENT,
    JOB,
    WORKLOAD,
    serve_by_doubles,
)
from typer.testing import CliRunner

from patcher.ab import served, server
from patcher.ab.served import with_patches
from patcher.ab.served_records import (
    ServedResult,
    SideSetup,
)
from patcher.bench import PatcherError, UsageError
from patcher.bench.engines import serving
from patcher.bench.machine.environment import ROOT, python_path
from patcher.commands.console import app
from patcher.commands.throughput_sides import side_of

ID, DIGEST = "double.norm", "0" * 64


@pytest.fixture(autouse=True)
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_doubles(tmp_path, monkeypatch)


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
