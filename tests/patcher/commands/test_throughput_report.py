"""`patcher throughput --report`: a verdict on one patch as a page, by the real command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import patcher
from patch_sample import OP, evaluation

from patcher.ab.result import ABResult
from patcher.bench import Language, load_op
from patcher.integrate import Patch, read_receipts
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


@pytest.mark.slow
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
    judged_together = ABResult.model_validate_json(done.stdout)
    ids = tuple(patch.manifest.id for patch in patches)
    assert judged_together.patches == ids
    assert {"pairs", "quality"} <= set(judged_together.took_s)
    assert all(seconds >= 0 for seconds in judged_together.took_s.values())
    first, second = json.loads(done.stdout)["measured"]
    assert {"throughput", "quality", "receipt"} <= set(first)
    assert "receipt" in second
    assert not {"throughput", "quality"} & set(second)
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
    own = (("ran twice",), ("ran once",))
    decisions = tuple(
        one.model_copy(update={"verdict": "accept", "reasons": ("faster", *each)})
        for one, each in zip(judged_together.decisions, own, strict=True)
    )
    told = judged_together.model_copy(update={"decisions": decisions}).decision
    assert told.reasons == ("faster", f"ran twice ({ids[0]})", f"ran once ({ids[1]})")
    wrong = decisions[1].model_copy(update={"verdict": "reject", "reasons": ("never ran",)})
    told = judged_together.model_copy(update={"decisions": (decisions[0], wrong)}).decision
    assert (told.verdict, told.reasons) == ("reject", (f"never ran ({ids[1]})",))
    (home / "both.json").write_text(done.stdout)
    again = ("throughput", "gpt-oss-tiny", "--from", "both.json", "--json")
    anew = patcher(*again, *both, "--report", "anew", cwd=home)
    assert anew.returncode == done.returncode
    assert ABResult.model_validate_json(anew.stdout) == judged_together
    shown = Report.model_validate_json((home / "anew/report.json").read_text())
    assert shown.throughput == found.throughput
    assert shown.created == judged_together.created
    assert shown.commands[0] == judged_together.command == found.commands[0]
    for word, said in (
        (("--margin-pct", "2"), "the margin was declared before it was measured"),
        (("--best-set",), "several things to do"),
    ):
        refused = patcher(*again, *both, *word, cwd=home)
        assert refused.returncode == 2
        assert said in refused.stdout
    named = patcher("throughput", "gpt-oss-20b", *again[2:], *both, cwd=home)
    assert "both.json is of gpt-oss-tiny, not of gpt-oss-20b" in named.stdout
    changed = judged_together.measured[0].receipt.model_copy(update={"digest": "other"})
    of_another = judged_together.measured[0].model_copy(update={"receipt": changed})
    (home / "other.json").write_text(
        judged_together.model_copy(
            update={"measured": (of_another, judged_together.measured[1])}
        ).model_dump_json()
    )
    refused = patcher(*again[:3], "other.json", "--json", *both, cwd=home)
    assert f"another bundle named {ids[0]} was measured" in refused.stdout
    other = patcher(*again, "--patch", "rope", cwd=home)
    assert other.returncode == 2
    assert f"both.json is for {ids[0]}, {ids[1]}, not for {ids[1]}" in other.stdout
    twice = patcher(*words, "--patch", "patch", "--patch", "patch", cwd=home)
    assert twice.returncode == 2
    assert "a patch was given twice" in twice.stderr


@pytest.mark.slow
def test_the_patched_engine_is_profiled(bundle: Path) -> None:
    home = bundle.parent
    words = ("profile", "gpt-oss-tiny", "--batch", "2", "--input-len", "8", "--output-len", "12")
    (home / "kept/receipts").mkdir(parents=True)
    (home / "kept/receipts/old.json").write_text("of an earlier capture")
    done = patcher(*words, "--patch", "patch", "--keep", "kept", cwd=home)
    assert done.returncode == 0, done.stderr
    name = Patch.load(bundle).manifest.id
    said = done.stderr.replace("\n", " ")
    [told] = re.findall(rf"{name} ran (\S+) times since the engine.s start", said)
    [receipt] = read_receipts(home / "kept/receipts")
    assert receipt.patch_id == name
    assert receipt.total_calls == int(told.replace(",", "")) > 0
    assert sorted(path.name for path in (home / "kept").iterdir()) == ["receipts", "torch.json"]
    for wrong, said in (
        (("--patch", "patch", "--engine", "vllm"), f"{name} is for transformers, not for vllm"),
        (("--patch", "patch", "--from", "kept/torch.json"), "--patch applies only to a capture"),
    ):
        refused = patcher(*words[:2], *wrong, cwd=home)
        assert refused.returncode == 2
        assert said in refused.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--self-test", "--report", "rep"), "a report is of one verdict"),
        (
            ("--patch", "p", "--patch", "q", "--best-set", "--profile", "x"),
            "a report is of one verdict",
        ),
        (("--patch", "p", "--report", "file/rep"), "cannot make file/rep"),
        (("--from", "file", "--patch", "p", "--best-set"), "several things to do"),
        (("--from", "file", "--self-test"), "several things to do"),
        (("--patch", "p", "--quick"), "a process for each arm"),
        (("--self-test", "--alone"), "a process for each arm"),
        (("--patch", "p", "--processes", "3", "--best-set", "--alone"), "a process for each arm"),
    ],
)
def test_a_report_that_cannot_be_is_refused_before_the_work(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").touch()
    done = patcher("throughput", "gpt-oss-tiny", *words, "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert said in json.loads(done.stdout)["error"]["message"]
