"""A person's word: beside the rule's, with its reason, in the journal, in the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from measure_sample import decided as decided_on
from measure_sample import evidence
from patch_sample import evaluation, make_patch
from report_lanes_sample import decode
from report_sample import attempt, patched

from patcher.ab.decision import Decision
from patcher.ab.measurement import Measurement
from patcher.bench import Evaluation, Outcome, UsageError, VerificationError
from patcher.bench.stats.comparison import Verdict
from patcher.hotspot import Profile
from patcher.integrate import pack
from patcher.report import render_html, render_markdown
from patcher.report.gather import gather
from patcher.runs.patch import RunPatch
from patcher.runs.run import Run
from patcher.show.review import review_document
from patcher.verdicts.review import find_subject, run_words, say, words


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def decided(root: Path, verdict: Verdict = "accept", *, patch: bool = True) -> Run:
    """A run that ended so; its figures are those of other tests."""
    run = Run.create(root, command="run", model="gpt-oss-tiny")
    if patch:
        bundle = make_patch(run.path / "patch")
        made = RunPatch(folder="patch", id=bundle.manifest.id, digest=bundle.digest)
        run.step("patch", lambda: made, RunPatch)
    given = evidence(verdict=verdict)
    measured = Measurement(
        **{name: given[name] for name in Measurement.model_fields if name in given}
    )
    run.step("measure", lambda: measured, Measurement)
    run.step("decision", lambda: decided_on(**given), Decision)
    run.close()
    return run


def test_a_word_goes_beside_the_rules_and_never_over_it(tmp_path: Path) -> None:
    run = decided(tmp_path)
    before = (run.path / "steps/decision.json").read_bytes()
    subject = find_subject(tmp_path, "latest")
    agreed = say(subject, "accept", None)
    assert not agreed.overrules
    overruled = say(subject, "reject", "  nobody can maintain this  ", by="Ada")
    assert overruled.overrules
    assert overruled.reason == "nobody can maintain this"
    assert (run.path / "steps/decision.json").read_bytes() == before
    opened = Run.open(run.path, read_only=True)
    assert run_words(opened) == words(subject) == (agreed, overruled)
    report = gather(opened)
    assert report.decision is not None
    assert report.decision.verdict == "accept"
    assert report.words == (agreed, overruled)
    told = "Ada said reject: nobody can maintain this (the rule said accept, which stands"
    page = render_html(report)
    assert told in page
    assert '<h2 id="verdict-h">Accepted</h2>' in page
    assert "Ada said reject" in render_markdown(report)
    with Run.open(run.path) as resumed:  # a word is no step: nothing is done again
        assert resumed.done("decision")


@pytest.mark.parametrize("verdict", ["reject", "inconclusive"])
def test_overruling_needs_a_reason(verdict: Verdict, tmp_path: Path) -> None:
    decided(tmp_path, verdict)
    subject = find_subject(tmp_path, "latest")
    for nothing in (None, "", "  "):
        with pytest.raises(UsageError, match=f"the rule said {verdict}"):
            say(subject, "accept", nothing)
        with pytest.raises(UsageError, match="needs a reason"):
            say(subject, "reject", nothing)
    assert say(subject, "accept", "measured by hand").overrules
    assert say(subject, "reject", "too slow").overrules == (verdict == "inconclusive")


def test_a_patch_is_found_by_run_bundle_and_id(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = decided(runs)
    made = Run.open(run.path, read_only=True).load("patch", RunPatch)
    for text in (run.id, run.id[:12], str(run.path), "latest", made.id):
        assert find_subject(runs, text).run == run.path
    lone = find_subject(runs, str(run.path / "patch"))  # its manifest names no run
    assert lone.run is None
    assert lone.decision is None
    for text in ("nowhere", str(tmp_path / "none")):
        with pytest.raises(UsageError, match="is not a run, a bundle"):
            find_subject(runs, text)
    decided(runs)
    with pytest.raises(UsageError, match="several"):
        find_subject(runs, run.id[:6])


def test_words_on_a_bundle_without_a_run_are_kept_by_its_digest(tmp_path: Path, home: Path) -> None:
    bundle = make_patch(tmp_path / "patch")
    packed = tmp_path / "patch.zip"
    pack(bundle, packed)
    subject = find_subject(tmp_path, str(packed))
    with pytest.raises(UsageError, match="the rule said nothing"):
        say(subject, "accept", None)
    first = say(subject, "accept", "tried by hand")
    assert first.rule is None
    assert not first.overrules
    assert "no rule had decided" in first.told
    assert words(find_subject(tmp_path, str(tmp_path / "patch"))) == (first,)
    (home / "reviews.jsonl").write_text("{}\n")
    with pytest.raises(VerificationError, match="damaged"):
        words(subject)


@pytest.mark.parametrize(
    ("reason", "by"), [("so\x1b[2Jhe said", "Ann"), ("so", "Ann\nBob"), ("so", "Ann\tBob")]
)
def test_words_hold_no_control_characters(reason: str, by: str, tmp_path: Path) -> None:
    make_patch(tmp_path / "patch")
    subject = find_subject(tmp_path, str(tmp_path / "patch"))
    with pytest.raises(UsageError, match="control characters"):
        say(subject, "accept", reason, by=by)
    assert words(subject) == ()


def test_what_has_no_patch_cannot_be_accepted(tmp_path: Path) -> None:
    decided(tmp_path, "reject", patch=False)
    subject = find_subject(tmp_path, "latest")
    with pytest.raises(UsageError, match="no patch to accept"):
        say(subject, "accept", "because")
    assert say(subject, "reject", "nothing came of it").digest is None


def test_a_changed_bundle_is_not_reviewed(tmp_path: Path) -> None:
    run = decided(tmp_path)
    (run.path / "patch/manifest.json").write_text("{}")
    with pytest.raises(VerificationError):
        find_subject(tmp_path, run.id)


def test_the_review_holds_diff_checks_and_intervals(tmp_path: Path) -> None:
    decided(tmp_path)
    subject = find_subject(tmp_path, "latest")
    document = review_document(subject, words(subject))
    assert "+// fused_add_rms_norm" in document["diff"]
    assert "GptOssDecoderLayer" in document["diff"]
    assert document["comparison"]["gain_low_pct"] < document["comparison"]["gain_high_pct"]
    assert document["decision"]["verdict"] == "accept"
    assert len(document["timings"]) == len(evaluation().timings)
    assert json.dumps(document)


def cli(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "patcher", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_commands(tmp_path: Path) -> None:
    run = decided(tmp_path / "patcher-runs")
    shown = cli(tmp_path, "review", "latest")
    assert shown.returncode == 0, shown.stderr
    assert "the rule: accept" in shown.stdout
    assert "no person has decided yet" in shown.stdout
    assert "later?" not in shown.stdout + shown.stderr  # no terminal, no question
    refused = cli(tmp_path, "reject", run.id, "--json")
    assert refused.returncode == 2
    error: dict[str, Any] = json.loads(refused.stdout)["error"]
    assert error["message"] == "rejecting needs a reason"
    said = cli(tmp_path, "reject", run.id, "--reason", "no [bold]tests[/]", "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["overrules"] is True
    found = json.loads(cli(tmp_path, "review", run.id, "--json").stdout)
    assert [one["reason"] for one in found["words"]] == ["no [bold]tests[/]"]


def test_on_a_terminal_it_asks(tmp_path: Path) -> None:
    run = decided(tmp_path / "patcher-runs")
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "patcher", "review", "latest"],
        cwd=tmp_path,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.write(ours, b"reject\nno tests\n")
    shown, said = process.communicate(timeout=120)
    os.close(theirs)
    os.close(ours)
    assert process.returncode == 0, said
    assert "accept, reject, or later?" in shown + said
    [word] = run_words(Run.open(run.path, read_only=True))
    assert (word.word, word.reason, word.overrules) == ("reject", "no tests", True)


def test_a_profile_of_the_patched_engine_goes_into_the_report(tmp_path: Path) -> None:
    run = decided(tmp_path)
    before = decode()
    judged = evaluation()
    tried = attempt(0, "functional", Outcome.CORRECT, 2.0, "right").model_copy(
        update={"file": f"ops/{judged.op}/0/candidate.cpp"}
    )
    with Run.open(run.path) as writer:
        writer.step("profile", lambda: before, Profile)
        writer.step(f"{judged.op}/0/evaluate", lambda: judged, Evaluation)
        writer.write(f"ops/{judged.op}/0/attempt.json", tried.model_dump_json())
        writer.write(f"ops/{judged.op}/0/candidate.cpp", "// fused_add_rms_norm\n")
    opened = Run.open(run.path, read_only=True)
    assert gather(opened).profile_after is None
    report = gather(opened, patched(before))
    assert report.reconciliation is not None
    assert report.reconciliation.rows[0].kind == "kernel"
    assert any(row.kind == "moved" for row in report.reconciliation.rows)
    assert "After: the patched engine" in render_html(report)
