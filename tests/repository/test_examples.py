"""The examples run as they stand, each in a process and a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
PRINTS = {
    "compare_throughput": r"<ThroughputResult fused_add_rms_norm-cpp-\w+: (accept|reject|inconcl)",
    "evaluate_kernel": r"<EvaluationResult fused_add_rms_norm \(cpp\): (correct|guard_violation)",
    "patch_transformers": r"\d+ calls, 0 fallbacks>[\s\S]*same tokens with the patch: True",
    "plug_in_strategy": r"<RunReport [\w-]+: \d candidates[\s\S]*it ended: (?!not yet)",
    "rank_profile": r"\b1 +27\.8% +37\.07 [\s\S]*\bmoe_matmul_swiglu +27\.77",
    "read_run": r"\b0 +(correct|too_slow|guard_violation)\b",
    "replay_loop": r"<RunReport [\w-]+: 1 candidates",
    "write_op": r"wrong\.cpp: mismatch[\s\S]*relu_squared\.cpp: (correct|guard_violation)",
}
"""What an example must print, besides ending well."""
LONG = {"compare_throughput", "plug_in_strategy", "read_run", "replay_loop", "write_op"}
BUSY = "this machine is too busy"
TRIES = 4


def test_there_are_some_and_each_is_known() -> None:
    assert {path.stem for path in SCRIPTS} == set(PRINTS)
    assert NOTEBOOKS


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(script)],
        cwd=folder,
        env={**os.environ, "PATCHER_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])
        for path in SCRIPTS
    ],
)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    for number in range(TRIES):  # where other programs run, a clock may be doubted
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run(script, folder)
        if script.stem == "write_op" and "relu_squared.cpp: too_slow" in done.stdout:
            continue  # its clock was right, and the machine was not
        if done.returncode == 0:
            assert re.search(PRINTS[script.stem], done.stdout), done.stdout
            return
        assert BUSY in done.stderr or "this is guard_violation" in done.stderr, done.stderr
    pytest.skip("other programs keep this machine too busy to time anything")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_is(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert len(text.splitlines()) <= 70


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_says(notebook: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install '.[dev]'")
    nbformat = pytest.importorskip("nbformat", reason="pip install '.[dev]'")
    kept = nbformat.read(notebook, as_version=4)
    assert notebook.stat().st_size < 200_000, "outputs are committed, and small"
    fresh = nbformat.read(notebook, as_version=4)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = nbclient.NotebookClient(
        fresh, timeout=300, resources={"metadata": {"path": str(notebook.parent)}}
    )
    client.execute()
    assert [kinds(cell) for cell in fresh.cells] == [kinds(cell) for cell in kept.cells]
    assert texts(fresh) == texts(kept), "run it again and commit its outputs"


def kinds(cell: object) -> list[str]:
    """The kinds of output of a cell, as a reader sees them."""
    outputs = getattr(cell, "outputs", [])
    return [kind for one in outputs for kind in sorted(one.get("data", {"text": ""}))]


def texts(notebook: object) -> list[str]:
    """What its cells print and show as HTML; data frames have ids that change."""
    cells = getattr(notebook, "cells", [])
    outputs = [one for cell in cells for one in getattr(cell, "outputs", [])]
    return [one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs]
