"""The judge's corpus: its cheats, quick faults and honest candidates, and the score card."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import error_of, patcher
from stopping_sample import Stage

from patcher import bench
from patcher.bench.judge.evaluation import Outcome
from patcher.bench.machine.environment import describe
from patcher.bench.selftest.cases import read_corpus
from patcher.bench.selftest.corpus import CaseResult
from patcher.bench.selftest.mutations import mutations
from patcher.bench.selftest.scorecard import ScoreCard, corpus_folder, run_corpus

CORPUS = corpus_folder()
SLOW = "hang|deadlock|deep_recursion|disk_full|compile_bomb|infinite_loop|inductor"
"""Each waits for a time limit or a compiler; `patcher selftest` runs them, too."""


def judged(kind: str, only: str) -> list[CaseResult]:
    found = run_corpus("cpu", only, lambda *_: None, CORPUS, kinds=(kind,))
    assert found
    return found


def wrong(results: list[CaseResult]) -> list[str]:
    return [f"{r.name}: {r.outcome}, {r.check}: {r.detail}" for r in results if not r.passed]


def test_every_cheat_is_caught_and_no_key_leaks() -> None:
    results = judged("cheat", f"^(?!.*({SLOW}))")
    assert wrong(results) == []
    assert not any(result.leaked for result in results)


@pytest.mark.slow
def test_faults_are_outcomes_and_the_next_clean_verdict_is_the_same() -> None:
    assert wrong(judged("fault", f"^(?!.*({SLOW}))")) == []


@pytest.mark.slow
def test_honest_candidates_are_not_accused() -> None:
    """At most one in fifty: the clocks of a busy machine look false now and then."""
    results = judged("honest", f"^(?!.*({SLOW}))")
    missed = wrong(results)
    assert len(missed) <= len(results) / 50, missed


def test_every_cheat_has_a_twin_and_the_gpu_part_can_be_read() -> None:
    for device, least in (("cpu", 100), ("cuda", 25)):
        entries = read_corpus(CORPUS, device)
        cheats = [entry.name for entry in entries if entry.kind == "cheat"]
        assert cheats == [entry.name for entry in entries if entry.kind == "twin"]
        assert len(cheats) >= least
    both = [entry for device in ("cpu", "cuda") for entry in read_corpus(CORPUS, device)]
    assert sum(entry.kind == "honest" for entry in both) >= 60
    numbers = {entry.number for entry in both if entry.kind == "cheat"}
    assert set(range(1, 97)) - numbers == set(range(87, 94))  # those are of the whole model


def test_mutations_fit_the_text_of_the_judge() -> None:
    names = [mutation.guard for mutation in mutations()]
    assert len(names) == len(set(names)) >= 18
    cheats = {f"{entry.kind}/{entry.name}" for entry in read_corpus(CORPUS, "cpu")}
    for mutation in mutations():
        assert any(re.search(mutation.only, name) for name in cheats), mutation.guard


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("CHEAT = True", "CHEAT = 1"), "exactly one line must set CHEAT"),
        (lambda text: text.replace("# op:", "# opp:"), "invalid header"),
        (lambda text: text.replace("mismatch", "guilty"), "invalid header"),
    ],
)
def test_a_header_that_does_not_fit_is_named(
    change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    for name in ("cheats", "honest", "faults"):
        (tmp_path / name).mkdir()
    text = (CORPUS / "cheats/66_constant_output.py").read_text(encoding="utf-8")
    (tmp_path / "cheats/66_constant_output.py").write_text(change(text), encoding="utf-8")
    with pytest.raises(bench.UsageError, match=message):
        read_corpus(tmp_path, "cpu")


def result(kind: str, passed: bool, leaked: bool = False, layer: str = "judge") -> CaseResult:
    return CaseResult.model_validate(
        {
            "name": "x",
            "kind": kind,
            "number": None,
            "title": "x",
            "expected": ["mismatch"],
            "outcome": "mismatch" if passed else "correct",
            "layer": layer,
            "check": "values",
            "detail": "",
            "passed": passed,
            "leaked": leaked,
            "seconds": 0.1,
            "sandbox": "R2",
        }
    )


def card(*results: CaseResult, without: tuple[CaseResult, ...] = ()) -> ScoreCard:
    return ScoreCard(
        device="cpu",
        environment=describe("cpu"),
        sandbox="R2",
        results=results,
        without_static=without,
    )


def test_the_score_card_counts_and_keeps_its_promises() -> None:
    honest = [result("honest", True)] * 60
    assert card(result("cheat", True), *honest).ok
    assert card(result("cheat", True), *honest).by_layer() == {"judge": 1}
    assert not card(result("cheat", False), *honest).ok
    assert not card(result("fault", False), *honest).ok
    assert not card(*honest, without=(result("cheat", False),)).ok
    assert not card(result("cheat", True, leaked=True), *honest).ok
    assert card(result("twin", False), *honest).ok  # one of 61 is within 2 %
    assert not card(result("twin", False), result("twin", False), *honest[:58]).ok


def test_selftest_prints_a_card(tmp_path: Path) -> None:
    out = tmp_path / "card.json"
    words = ("selftest", "--device", "cpu", "--only", "/66_", "--out", str(out))
    done = patcher(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cheats caught" in done.stdout
    found = ScoreCard.model_validate_json(out.read_text(encoding="utf-8"))
    assert [(r.kind, r.passed) for r in found.results] == [("cheat", True), ("twin", True)]
    assert found.results[0].outcome is Outcome.MISMATCH
    assert json.loads(out.read_text(encoding="utf-8"))["schema_version"] == 1


def test_no_case_that_matches_is_no_self_test(tmp_path: Path) -> None:
    for words in (("zzz",), ("(",), ("zzz", "--mutations")):
        done = patcher("selftest", "--device", "cpu", "--json", "--only", *words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert error_of(done)["kind"] == "usage"


def test_an_interrupted_self_test_leaves_what_was_judged(tmp_path: Path) -> None:
    out = tmp_path / "card.json"
    words = ("selftest", "--device", "cpu", "--only", "/6[0-9]_", "--out", str(out))
    stage = Stage(tmp_path, *words)
    stage.until(out.exists)
    stage.stop(signal.SIGINT, "alone")
    found = ScoreCard.model_validate_json(out.read_text(encoding="utf-8"))
    assert found.results
    assert not found.complete
    assert not found.ok
    assert list(tmp_path.iterdir()) == [out]
