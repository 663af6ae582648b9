"""A step's ledger as people see it: in a terminal of any width, in the report, as JSON."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from report_page import Page
from report_sample import sample
from rich.console import Console
from typer.testing import CliRunner

import patcher
from patcher.bench import UsageError
from patcher.commands.console import app
from patcher.hotspot import Profile, read
from patcher.ledgers import with_ledger, with_ledger_if_known
from patcher.report import Report, render_html, render_markdown
from patcher.show.step_ledger import ledger_tables
from patcher.visible import visible
from patcher.workloads import workload_for

EXPORT = Path(__file__).parents[2] / "data/nsys/decode.sqlite"
SUMMARY = Path(__file__).parents[2] / "data/nsys/cuda_gpu_kern_sum.csv"
MODEL = "gpt-oss-20b"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return with_ledger(read(EXPORT, MODEL), MODEL, gpu="H200")


def printed(profile: Profile, width: int) -> str:
    assert profile.ledger is not None
    text = io.StringIO()
    console = Console(file=text, width=width, no_color=True)
    for table in ledger_tables(profile.ledger, "a title"):
        console.print(table)
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_tables_fit_a_terminal_with_whole_figures(profile: Profile, width: int) -> None:
    assert profile.ledger is not None
    lines = printed(profile, width).splitlines()
    assert max(map(len, lines)) <= width
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    experts = ["experts gate/up", "4,448", "1,033", "890", "-144", "116%", "unexplained"]
    assert experts in rows
    assert ["step", "9,337", "2,169", "3,890", "1,721", "56%", ""] in rows
    kernels = [row for row in rows if row[0].isdigit()]
    assert [row[0] for row in kernels] == [str(n + 1) for n in range(len(profile.ledger.kernels))]
    assert kernels[0][1:6] == ["22.9%", "890", "24", "no", "untried"]


def test_what_is_said_names_kernels_by_their_number(profile: Profile) -> None:
    shown = " ".join(printed(profile, 120).split())
    assert "fusible? 10, 15: yes: MoE combine + add + norm: op reduce_add_rms_norm" in shown
    assert "step 3.89 ms, floor 2.17 ms: 55.8 % of the speed of light" in shown
    assert "9.34 GB at 4.3 TB/s, reached by a copy, by gpus.toml; H200" in shown
    assert "21.0 of 32 experts a layer, if routing is even" in shown


def test_the_report_has_the_ledger(profile: Profile) -> None:
    report = sample(profile=profile)
    page = Page(render_html(report))
    assert "How far is a step from the floor?" in page.text
    assert "55.8 % of the speed of light" in page.text
    assert "a kernel of op linear ships for it, and does not run here" in page.text
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    text = render_markdown(report)
    assert "### A step against the floor" in text
    assert re.search(r"\| experts gate/up \| 4,448 \|", text)
    again = Report.model_validate_json(report.model_dump_json())
    assert again.profile is not None
    assert again.profile.ledger == profile.ledger


def test_a_report_without_a_ledger_says_nothing_of_it() -> None:
    assert "floor-h" not in render_html(sample())
    assert "against the floor" not in render_markdown(sample())


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "| a\n@b `c`", "\x1b[31m\x00"])
def test_names_in_a_ledger_are_shown_and_never_obeyed(profile: Profile, text: str) -> None:
    assert profile.ledger is not None
    first, *others = profile.ledger.kernels
    kernel = first.model_copy(update={"name": text, "neighbours": (text,), "faster_reason": text})
    changed = profile.ledger.model_copy(update={"kernels": (kernel, *others)})
    report = sample(profile=profile.model_copy(update={"ledger": changed}))
    page = Page(render_html(report))
    assert not [tag for tag, _ in page.tags if tag == "script" and "alert" in str(_)]
    assert "\x1b" not in render_html(report) + render_markdown(report)
    assert visible(text).split()[0][:5] in page.text


def test_python_and_a_file_that_names_no_gpu() -> None:
    found = patcher.profile(SUMMARY, MODEL, steps=24, ledger=True, gpu="H200", batch=1)
    assert found.ledger is not None
    assert found.ledger.floor_ns == pytest.approx(0.868e6, rel=0.01)
    assert json.loads(found.model_dump_json())["ledger"]["batch"] == 1
    longer = patcher.profile(SUMMARY, MODEL, steps=24, ledger=True, input_len=2048)
    assert longer.ledger is not None
    assert longer.ledger.context == 2048
    assert patcher.profile(SUMMARY, MODEL).ledger is None


def test_what_a_ledger_needs_is_asked_for() -> None:
    with pytest.raises(UsageError, match="the number of steps is not known"):
        patcher.profile(SUMMARY, MODEL, ledger=True)
    with pytest.raises(UsageError, match="needs the model's sizes"):
        patcher.profile(SUMMARY, ledger=True)
    with pytest.raises(UsageError, match="gpu names the GPU of a file"):
        patcher.profile(SUMMARY, MODEL, gpu="H200")
    with pytest.raises(UsageError, match="depend on its traffic"):
        with_ledger(read(EXPORT), "model")


def test_a_run_goes_on_without_a_ledger_and_says_why() -> None:
    workload = workload_for(MODEL, "cuda", engine="vllm")
    found = with_ledger_if_known(read(SUMMARY, MODEL), workload)
    assert found.ledger is None
    assert found.warnings[-1].message == "no ledger: the number of steps is not known"
    assert with_ledger_if_known(read(EXPORT, MODEL), workload).ledger is not None


def test_the_command_prints_the_ledger() -> None:
    said = CliRunner().invoke(
        app, ["profile", MODEL, "--from", str(EXPORT), "--ledger", "--gpu", "H200", "--json"]
    )
    assert json.loads(said.stdout)["ledger"]["launches"] == 499
