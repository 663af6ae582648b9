"""Recorded loops on KernelBench's problems, replayed, and what their page says of them."""

from __future__ import annotations

import json
import re
import statistics
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import fisher_exact

from patcher.bench import Evaluation, Language
from patcher.bench.judge.evaluation import geomean
from patcher.bench.lab.kernelbench_narrow import names_narrower
from patcher.bench.lab.loop_runs import Estimated, bootstrap_geomean
from patcher.bench.stats.shares import wilson
from patcher.kernel_search.recording import (
    EVALUATIONS,
    REPLIES,
    TABLE,
    LoopRecording,
    read,
    replay,
    table,
)
from patcher.kernel_search.recording_archive import recordings
from patcher.prompting.extract import extract_source

KEPT = Path(__file__).parents[3] / "bench/results/loop"
PAGE = (KEPT / "README.md").read_text(encoding="utf-8")
LOCAL, LOOPS = KEPT / "kernelbench-local.tar.xz", KEPT / "kernelbench.tar.xz"
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


@pytest.fixture(scope="module")
def loops() -> Iterator[Path]:
    with recordings(LOOPS) as folders:
        yield folders[0].parent


@pytest.mark.parametrize("name", [*names(LOCAL), *names(LOOPS)])
def test_loops_replay(
    name: str, local: Path, loops: Path, ops: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(ops))
    folder = (local if name in names(LOCAL) else loops) / name
    assert replay(folder) == []
    assert (folder / TABLE).read_text(encoding="utf-8") == table(read(folder))


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


def verdicts(folder: Path) -> dict[str, Evaluation]:
    """Of a recording, by the digest of the candidate."""
    lines = (folder / EVALUATIONS).read_text(encoding="utf-8").splitlines()
    return {one.digest: one for one in map(Evaluation.model_validate_json, lines)}


def sources(folder: Path, op: str) -> list[str]:
    """What each reply gave, in order."""
    lines = (folder / REPLIES).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["reply"]["text"] for line in lines]
    found = [extract_source(text, Language.TRITON, op) for text in texts]
    return [each for each in found if isinstance(each, str)]


def test_the_page_says_what_the_loops_came_to(
    loops: Path, ops: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(ops))
    folders = sorted(loops.iterdir(), key=lambda each: int(each.name.rpartition("-")[2]))
    problems = [each.name.rpartition("-")[2] for each in folders]
    assert f"({', '.join(problems)})" in PAGE
    half_widths: list[float] = []
    seconds: list[float] = []
    first: list[float] = []
    best: list[float] = []
    in_column: list[float] = []
    count = right = asking = 0
    for problem, folder in zip(problems, folders, strict=True):
        made, judged = read(folder), verdicts(folder)
        assert (made.language, made.search.strategy, made.iterations) == ("triton", "refine", 5)
        told, known = [], []
        tried = made.optimisation.iterations
        for one, source in zip(tried, sources(folder, made.op), strict=True):
            count += 1
            asking += "triton.tools.tensor_descriptor" in source
            if one.geomean_speedup is None:
                told.append("wrong")
                continue
            narrow = names_narrower(source, made.op, Language.TRITON)
            told.append(f"{one.geomean_speedup:.2f}{' (float16)' if narrow else ''}")
            known.append((one.geomean_speedup, narrow))
            seconds.append(judged[one.digest].total_s or 0)
            half_widths += [
                max(timed.speedup_high / timed.speedup, timed.speedup / timed.speedup_low) - 1
                for timed in judged[one.digest].timings
            ]
        right += len(known)
        first.append(known[0][0])
        best.append(max(speedup for speedup, _ in known))
        in_column.append(max(speedup for speedup, narrow in known if not narrow))
        row = re.search(rf"^\| {problem} \| ([^|]*) \|", PAGE, re.MULTILINE)
        assert row is not None
        assert row[1].replace("**", "").partition(":")[0].strip() == "; ".join(told)
        [bold] = re.findall(r"\*\*([\d.]+)\*\*", row[1])
        assert bold == f"{best[-1]:.2f}"
    assert f"Of {count} candidates {right} are right" in PAGE
    assert f"{asking} of these {count} candidates ask that question" in PAGE
    assert f"reaches {100 * max(half_widths):.1f} % to either side at most" in PAGE
    whole, kept = bootstrap_geomean(best), bootstrap_geomean(in_column)
    for where in (PAGE, RESULTS):
        assert f"{whole.value:.2f} (95 %, bootstrap over problems: {interval(whole)})" in where
        assert f"{kept.value:.2f} ({interval(kept)}) without float16" in where
    assert f"already came to {geomean(first):.2f}" in PAGE
    over = [sum(speedup > least for speedup in best) for least in (1.0, 1.2)]
    assert f"{WORDS[over[0]]} are over 1, {WORDS[over[1]]} over 1.2" in PAGE
    assert f"took {min(seconds):.0f} to {max(seconds):.0f} s of a judge" in PAGE
    assert f"| {len(best)} of {len(best)} |" in RESULTS
    assert f"| {statistics.median(best):.2f}, {statistics.fmean(best):.2f} |" in RESULTS
    assert f"| {over[0]} and {over[1]} of {len(best)} |" in RESULTS
    summed = [speedup for speedup in best if speedup > 2]
    assert len(summed) == 3
    assert f"come to {min(summed):.1f}x to {max(summed):.1f}x" in RESULTS
    assert f"{WORDS[sum(speedup < 1 for speedup in best)]} stay below cuBLAS" in RESULTS


WORDS = {6: "six", 9: "nine"}
RESULTS = (KEPT.parents[2] / "docs/results.md").read_text(encoding="utf-8")


def interval(found: Estimated) -> str:
    assert found.low is not None
    assert found.high is not None
    return f"{found.low:.2f} to {found.high:.2f}"


def test_what_kernelbench_said_is_as_the_page_says(loops: Path) -> None:
    """Its answers are of candidates that the loops have, and counted by what the judge said."""
    answers = json.loads((KEPT / "kernelbench-checks.json").read_text(encoding="utf-8"))
    again = json.loads((KEPT / "kernelbench-again.json").read_text(encoding="utf-8"))
    told = "".join(each.get("loose_why", "") for each in answers.values())
    off = [float(each) for each in re.findall(r"[\d.]+", told)]
    assert len(off) == 5
    assert f"off by {min(off):.3f} to {max(off):.3f} (" in PAGE
    counts: Counter[tuple[bool, str]] = Counter()
    ratios = []
    for folder in loops.iterdir():
        made = read(folder)
        for one in made.optimisation.iterations:
            right = one.geomean_speedup is not None
            if twice := again.pop(f"{made.op}/{one.digest}", None):
                assert twice[0] == pytest.approx(one.geomean_speedup, abs=1e-4)
                ratios.append(twice[1] / twice[0])
            said = answers.pop(f"{made.op}/{one.digest}", None)
            if said is not None:
                assert said["by"] == "kernelbench"
                counts[right, "asked"] += 1
                counts[right, "1e-4"] += said["accepted"]
                counts[right, "1e-2"] += said["loose"]
    assert not answers
    assert not again
    assert f"{min(ratios):.3f} to {max(ratios):.3f} of the first verdict" in PAGE
    for right, word in ((True, "right"), (False, "wrong")):
        cells = [counts[right, what] for what in ("asked", "1e-4", "1e-2")]
        assert f"| {word}, {cells[0]} | {cells[1]} | {cells[2]} |" in PAGE


def test_what_tf32_itself_gains_is_as_the_page_says(loops: Path) -> None:
    plain = json.loads((KEPT / "kernelbench-fp32.json").read_text(encoding="utf-8"))["rows"]
    known = {f"{row['op']}_tf32": row for row in plain}
    gains = []
    for folder in sorted(loops.iterdir()):
        made = read(folder)
        if (row := known.get(made.op)) is None:
            continue
        right = [each for each in verdicts(folder).values() if each.right]
        [timing] = max(right, key=lambda each: each.geomean_speedup or 0).timings
        assert timing.axes == {"x_0": row["x_0"]}
        gains.append(row["baseline_us"] / timing.baseline_us)
    found = bootstrap_geomean(gains)
    assert f"to {found.value:.2f}x ({interval(found)}, bootstrap over {len(gains)} prob" in PAGE
