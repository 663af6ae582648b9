"""Recorded loops on KernelBench's problems, replayed, and what their page says of them."""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import fisher_exact

from patcher.bench.stats.shares import wilson
from patcher.kernel_search.recording import REPLIES, TABLE, LoopRecording, read, replay, table
from patcher.kernel_search.recording_archive import recordings

KEPT = Path(__file__).parents[3] / "bench/results/loop"
PAGE = (KEPT / "README.md").read_text(encoding="utf-8")
LOCAL = KEPT / "kernelbench-local.tar.xz"
WITHOUT = "-sample"
NO_SOURCE = ("no fenced code block", "is not closed", "again and again", "a comment and no code")


def names(archive: Path) -> list[str]:
    with tarfile.open(archive) as found:
        return sorted({name.partition("/")[0] for name in found.getnames()})


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ops")
    with tarfile.open(KEPT / "kernelbench-ops.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def local() -> Iterator[Path]:
    with recordings(LOCAL) as folders:
        yield folders[0].parent


@pytest.mark.parametrize("name", names(LOCAL))
def test_loops_of_a_local_model_replay(
    name: str, local: Path, ops: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(ops))
    assert replay(local / name) == []
    assert (local / name / TABLE).read_text(encoding="utf-8") == table(read(local / name))


def kind(outcome: str, detail: str) -> str:
    """The row of the page's table that counts a reply."""
    if outcome == "generation_failure":
        if any(words in detail for words in NO_SOURCE):
            return "no source"
        assert "the source defines no" in detail
        return "without the op's function"
    known = {"compilation_failure": "does not parse", "runtime_error": "fails when it is loaded"}
    return known.get(outcome) or {"mismatch": "wrong values"}[outcome]


def test_the_page_says_of_a_local_model_what_its_loops_came_to(local: Path) -> None:
    found: dict[bool, list[LoopRecording]] = {True: [], False: []}
    for folder in sorted(local.iterdir()):
        found[not folder.name.endswith(WITHOUT)].append(read(folder))
    ran = {}
    for feedback, loops in found.items():
        assert len(loops) == 10
        tried = [each for loop in loops for each in loop.optimisation.iterations]
        assert len(tried) == 50
        counts = Counter(kind(each.outcome.value, each.detail) for each in tried)
        counts["refused by Triton's compiler"] = sum("CompilationE" in one.detail for one in tried)
        for words, count in counts.items():
            assert said(words)[not feedback] == str(count), words
        can_run = [each for each in tried if kind(each.outcome.value, each.detail) in ABLE]
        by = Counter(each.iteration for each in can_run)
        [cells] = [said("by iteration, of 10 each")[not feedback]]
        assert cells == ", ".join(str(by[iteration]) for iteration in range(5))
        ran[feedback] = len(can_run)
        paths = [
            each for each in sorted(local.iterdir()) if each.name.endswith(WITHOUT) != feedback
        ]
        asked = [
            json.loads(line)["reply"]["usage"]
            for path in paths
            for line in (path / REPLIES).read_text(encoding="utf-8").splitlines()
        ]
        spent = [sum(each[f"{way}_tokens"] for each in asked) for way in ("input", "output")]
        told = f"{len(asked)}; {spent[0]:,}, {spent[1]:,}"
        assert said("model calls; tokens in, out")[not feedback] == told
    assert f"With feedback {ran[True]} replies of 50 can be run, without {ran[False]}" in PAGE
    chance = fisher_exact(np.array([[one, 50 - one] for one in ran.values()])).pvalue
    assert f"p = {chance:.2f}" in PAGE
    assert f"at most {100 * wilson(0, 50)[1]:.0f} %" in PAGE


ABLE = {"fails when it is loaded", "wrong values"}


def said(words: str) -> tuple[str, str]:
    row = re.search(rf"^\| [^|\n]*{re.escape(words)}[^|\n]*\| ([^|]*) \| ([^|]*) \|", PAGE, re.M)
    assert row is not None, words
    return row[1], row[2]
