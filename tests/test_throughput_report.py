"""`patcher throughput --report`: a verdict on one patch as a page, by the real command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from patch_sample import OP, evaluation
from test_cli import patcher

from bench import Language, load_op
from integrate import Patch
from patcher.endtoend.measured import Judged
from patcher.report import Report

WORDS = ("--batch", "2", "--input-len", "8", "--output-len", "12", "--quality-steps", "4")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [candidate] = [one for info, one in OP.solutions() if info.language == Language.CPP]
    folder = tmp_path_factory.mktemp("bundle") / "patch"
    Patch.create(
        folder, OP, candidate, evaluation(candidate), engine="transformers", made_by="test"
    )
    return folder


def test_a_verdict_has_a_report_and_counts_its_windows_alone(bundle: Path) -> None:
    home = bundle.parent
    words = ("throughput", "gpt-oss-tiny", "--patch", "patch", "--pairs", "6", "--threads", "1")
    done = patcher(*words, *WORDS, "--report", "seen/here", cwd=home)
    assert done.returncode in (0, 1), done.stderr
    assert "report: seen/here/report.html" in done.stdout.replace("\n", "")
    folder = home / "seen/here"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("report.html", "report.json", "report.md")
    ]
    found = Report.model_validate_json((folder / "report.json").read_text())
    patch = Patch.load(bundle)
    assert found.commands == (" ".join(["patcher", *words, *WORDS, "--report", "seen/here"]),)
    assert found.candidate_source == patch.candidate().source
    assert found.best == patch.evaluation
    assert found.decision is not None
    assert found.throughput is not None
    assert found.receipt is not None
    windows = [one.kernel_calls or 0 for one in found.throughput.windows]
    assert sum(found.receipt.calls.values()) == sum(windows) > 0
    page = (folder / "report.html").read_text()
    assert "inline float" in page
    assert f"{found.decision.gain_pct:+.2f}" in page.replace("\u2212", "-")


def test_several_patches_are_in_together_and_have_one_verdict(bundle: Path) -> None:
    home, rope = bundle.parent, load_op("rope")
    [candidate] = [one for info, one in rope.solutions() if info.language == Language.TORCH]
    judged = evaluation(candidate).model_copy(update={"op": "rope"})
    Patch.create(home / "rope", rope, candidate, judged, engine="transformers", made_by="test")
    patches = [Patch.load(folder) for folder in (bundle, home / "rope")]
    words = ("throughput", "gpt-oss-tiny", "--pairs", "6", "--threads", "1", *WORDS)
    both = ("--patch", "patch", "--patch", "rope")
    done = patcher(*words, *both, "--report", "both", "--json", cwd=home)
    assert done.returncode in (0, 1), done.stderr
    judged_together = Judged.model_validate_json(done.stdout)
    ids = tuple(patch.manifest.id for patch in patches)
    assert judged_together.patches == ids
    assert all(one.receipt.total_calls > 0 for one in judged_together.measured)
    found = Report.model_validate_json((home / "both/report.json").read_text())
    assert found.patch_id == " + ".join(ids)
    assert found.decision == judged_together.decision
    assert found.receipt is not None
    assert {key.split(": ")[0] for key in found.receipt.calls} == {OP.name, "rope"}
    assert found.reconciliation is not None
    assert {row.name for row in found.reconciliation.rows} == {OP.name, "rope"}
    for patch in patches:
        assert patch.candidate().source in (found.candidate_source or "")
        assert patch.manifest.id in (home / "both/report.html").read_text()
    twice = patcher(*words, "--patch", "patch", "--patch", "patch", cwd=home)
    assert twice.returncode == 2
    assert "a patch was given twice" in twice.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--self-test", "--report", "rep"), "a report is of one verdict"),
        (
            ("--patch", "p", "--patch", "q", "--best-set", "--profile", "x"),
            "a report is of one verdict",
        ),
        (("--patch", "p", "--report", "file/rep"), "cannot make file/rep"),
    ],
)
def test_a_report_that_cannot_be_is_refused_before_the_work(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").touch()
    done = patcher("throughput", "gpt-oss-tiny", *words, "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert said in json.loads(done.stdout)["error"]["message"]
