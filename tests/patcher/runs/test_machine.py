"""A run resumed on another machine, or after an update of this one."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing_stories import OP
from machine_sample import (
    Bench,
    begin,
)

import patcher.bench.machine.environment
from patcher import pipeline
from patcher.agent import best_candidate
from patcher.bench import VerificationError
from patcher.bench.machine.environment import facts
from patcher.kernel_search.context import MACHINE_INDEPENDENT, run_levers
from patcher.report.gather import gather
from patcher.runs import machine
from patcher.runs.run import Run


def update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine gets another compiler."""
    versions = {"g++": "g++ 99.1.0"}
    monkeypatch.setattr(patcher.bench.machine.environment, "compiler_version", versions.get)


def test_the_facts_are_those_that_figures_depend_on_and_name_no_machine() -> None:
    found = facts("cpu")
    assert {"processor", "instructions", "python", "g++", "torch"} <= set(found)
    assert {"GPU", "driver", "nvcc", "CUDA of torch"} <= set(facts("cuda"))
    assert "GPU" not in found  # what was not used may change
    assert not any("/" in value and value.startswith("/") for value in found.values())
    assert found == facts("cpu")


def test_the_same_machine_goes_on(tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        assert run.config.machine == facts("cpu")
        assert machine.same_machine(run, "cpu", MACHINE_INDEPENDENT) == []
        assert (
            machine.same_machine(run, "cpu", MACHINE_INDEPENDENT, changed=True) == []
        )  # nothing to start over for
        assert [note.step for note in run.state.notes] == ["run"]


def test_another_machine_is_refused_and_what_changed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(tmp_path) as run:
        before = run.config.machine or {}
    update(monkeypatch)
    with Run.open(run.path) as again:
        with pytest.raises(VerificationError) as caught:
            pipeline.execute(again, lambda *_: None, print)
        assert f"g++: {before['g++']} before, g++ 99.1.0 now" in caught.value.message
        assert caught.value.hint.endswith(f"patcher resume {run.id} --machine-changed")
        assert "processor" not in caught.value.message
        assert set(again.state.results) == {"levers"}, "read when the run began"


def test_told_that_it_changed_all_is_judged_again_and_no_reply_is_paid_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(tmp_path) as run:
        levers = run_levers(run)
        here = Bench([1.1, 2.0, 1.5])
        first = here.work(run)
    assert (first.best_iteration, here.judged) == (1, ["0", "1", "2"])
    update(monkeypatch)
    there = Bench([3.0, 1.2, 1.6])
    with Run.open(run.path) as again:
        changed = machine.same_machine(again, "cpu", MACHINE_INDEPENDENT, changed=True)
        assert len(changed) == 1
        assert gather(again).attempts == ()  # no figure of the machine before is shown
        assert (
            machine.same_machine(again, "cpu", MACHINE_INDEPENDENT) == []
        )  # from now on this is its machine
        assert run_levers(again) == levers
        assert again.state.results["levers"]  # what the user asked for is not read anew
        second = there.work(again)
        assert best_candidate(again, second) is not None
    assert there.asked == []
    assert there.judged == ["0", "1", "2"]
    assert (second.best_iteration, second.best_speedup) == (0, 3.0)
    assert second.usage == first.usage
    with Run.open(run.path) as third:
        assert there.work(third) == second
        assert there.judged == ["0", "1", "2"]


def test_a_verdict_killed_before_its_result_is_not_taken_over_from_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(tmp_path) as run:
        here = Bench([1.1, 2.0, 1.5])
        here.work(run, 1)
    journal = run.path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    results = [n for n, line in enumerate(lines) if b'"result"' in line and b"/0/evaluate" in line]
    journal.write_bytes(b"".join(lines[: results[0]]))
    update(monkeypatch)
    there = Bench([3.0])
    with Run.open(run.path) as again:
        assert again.state.pending == (f"{OP}/0/evaluate",)
        machine.same_machine(again, "cpu", MACHINE_INDEPENDENT, changed=True)
        assert there.work(again, 1).best_speedup == 3.0
    assert (there.asked, there.judged) == ([], ["0"])
