"""Recordings, status and reports of loops that ended otherwise than by their iterations, or that
rank by the user's own score."""

from __future__ import annotations

import itertools
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_sample import OP, Line, advice, code, recording, verdict

from patcher import pipeline
from patcher.bench import (
    Candidate,
    Evaluation,
    Language,
    UsageError,
    VerificationError,
    WaitingError,
    load_op,
)
from patcher.bench.machine.environment import describe
from patcher.judges import meter
from patcher.kernel_search import stage
from patcher.kernel_search.recording import read, record, replay
from patcher.models.ceilings import SpendingLimits
from patcher.models.retry import Clock
from patcher.plan import RunPlan, RunResult
from patcher.report.gather import gather
from patcher.report.views import attempt_rows
from patcher.runs.run import Run
from patcher.settings import resolve
from patcher.status import status
from patcher.strategies.search import Search

SPEEDUPS = {"first": 1.2, "second": 3.0, "third": 2.0, "fourth": 1.5}
LINES: list[Line] = [
    ("0/generate", code("first")),
    *[(f"{at}/analyse", advice("widen the loads")) for at in (1, 2, 3)],
    *[(f"{at}/generate", code(name)) for at, name in enumerate(SPEEDUPS) if at],
]


def judged(candidates: list[Candidate]) -> list[Evaluation]:
    place = {"environment": describe("cpu")}
    names = [one.source.rsplit("// ", 1)[-1].strip() for one in candidates]
    return [
        verdict(one, SPEEDUPS[name]).model_copy(update=place)
        for one, name in zip(candidates, names, strict=True)
    ]


def begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str = "refine",
    op: str = OP,
    **settings: object,
) -> Run:
    """A run of scripted replies and verdicts, not yet worked on."""
    recording(tmp_path, LINES)
    judges = SimpleNamespace(evaluate=judged, prepare=None)
    monkeypatch.setattr(stage, "open_judges", lambda *_, **__: nullcontext(judges))
    monkeypatch.chdir(tmp_path)
    named = {"model": "replay:recording.jsonl", "iterations": 4, "memory": "off", **settings}
    plan = RunPlan(op=op, language=Language.CPP, whole=False, search=Search(strategy=strategy))
    return pipeline.start(resolve(named), "optimize", None, None, plan)


def execute(run: Run, **more: bool) -> RunResult:
    return pipeline.execute(run, lambda *_: None, lambda _: None, **more)


def slow_judge(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    ticks = itertools.count()
    clock = Clock(now=lambda: seconds * next(ticks))
    monkeypatch.setattr(meter, "Clock", lambda: clock)


@pytest.mark.parametrize("place", ["model", "judge"])
def test_a_run_resumed_elsewhere_asks_nobody_twice(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`exchange:DIR` is below the current folder."""
    (tmp_path / "home").mkdir()
    (tmp_path / "other").mkdir()
    with (
        monkeypatch.context() as inside,
        begun(tmp_path / "home", inside, **{place: "exchange:letters"}) as run,
    ):
        inside.undo()
        monkeypatch.chdir(tmp_path / "home")
        with pytest.raises(WaitingError):
            execute(run)
        monkeypatch.chdir(tmp_path / "other")
        recording(tmp_path / "other", LINES)
        with pytest.raises(UsageError, match=r"there is no letters here") as caught:
            execute(run)
        assert str(run.path.resolve()) in caught.value.hint
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["recording.jsonl"]
        monkeypatch.chdir(tmp_path / "home")
        with pytest.raises(WaitingError):
            execute(run)


def test_verdicts_of_a_run_are_about_one_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes an op edits it while a run waits."""
    library = tmp_path / "ops"
    shutil.copytree(load_op(OP).folder, library / "my_norm")
    for name in ("op.toml", "reference.py", "inputs.py", "baselines.py"):
        file = library / "my_norm" / name
        file.write_text(file.read_text().replace(OP, "my_norm"))
    monkeypatch.setenv("PATCHER_OPS", str(library))
    with begun(tmp_path, monkeypatch, op="my_norm", model="exchange:letters") as run:
        with pytest.raises(WaitingError):
            execute(run)
        edited = tmp_path / "edited"
        shutil.copytree(library, edited)
        with (edited / "my_norm" / "reference.py").open("a") as reference:
            reference.write("\n# one line more\n")
        monkeypatch.setenv("PATCHER_OPS", str(edited))
        with pytest.raises(VerificationError, match="my_norm is not the op that run") as caught:
            execute(run)
        assert "start a new run" in caught.value.hint
        monkeypatch.setenv("PATCHER_OPS", str(library))
        with pytest.raises(WaitingError):
            execute(run)


def test_a_judge_elsewhere_that_was_replaced_judges_all_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is seen here, so the user's word decides; replies stay."""
    device, asked = ["old"], list[str]()

    def elsewhere(candidates: list[Candidate]) -> list[Evaluation]:
        if len(asked) == 1 and "third" in candidates[0].source:
            device[0] = "new"
        place = {"environment": describe("cpu").model_copy(update={"device": device[0]})}
        return [each.model_copy(update=place) for each in judged(candidates)]

    def opened(_where: str, _settings: object, request_id: str, *_: object, **__: object) -> Any:
        asked.append(request_id)
        return nullcontext(SimpleNamespace(evaluate=elsewhere, prepare=None))

    with begun(tmp_path, monkeypatch, judge="exchange:jobs") as run:
        monkeypatch.setattr(stage, "open_judges", opened)
        with pytest.raises(VerificationError, match="was judged on old") as caught:
            execute(run)
        assert caught.value.hint.endswith(f"patcher resume {run.id} --machine-changed")
        (tmp_path / "jobs").mkdir()
        found = execute(run, machine_changed=True).optimisation
        assert found
        assert [one.geomean_speedup for one in found.iterations] == list(SPEEDUPS.values())
        assert asked == [run.id, f"{run.id}.1"]
        verdicts = [run.load(f"{OP}/{at}/evaluate", Evaluation) for at in range(4)]
        assert {one.environment.device for one in verdicts if one.environment} == {"new"}
        replies = [each for each in run.events if each.kind == "result" and "/ask-" in each.step]
        assert len({each.step for each in replies}) == len(replies) == 7
    record(run.path, tmp_path / "rec")
    assert replay(tmp_path / "rec") == []


@pytest.mark.parametrize("strategy", ["refine", "sample"])
def test_a_recording_of_a_loop_that_a_ceiling_ended_replays(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last replies were paid for and have no verdict."""
    slow_judge(monkeypatch, 40)
    with begun(tmp_path, monkeypatch, strategy, budget_minutes=1.5) as run:
        found = execute(run).optimisation
        assert found
        assert (found.stopped, len(found.iterations)) == ("budget", 2)
        now = status(run)
    assert now.step is None
    assert status(Run.open(run.path, read_only=True)).state == "finished"
    record(run.path, tmp_path / "rec")
    assert replay(tmp_path / "rec") == []


def test_a_loop_that_goes_on_is_not_recorded_as_it_ended_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_judge(monkeypatch, 40)
    with begun(tmp_path, monkeypatch, budget_minutes=1.5) as run:
        execute(run)
        SpendingLimits(minutes=100).note_in(run)
        with pytest.raises(UsageError, match="goes on"):
            record(run.path, tmp_path / "early")
        assert status(run).step == f"{OP}/2/evaluate"
        found = execute(run).optimisation
    assert found
    assert (found.stopped, len(found.iterations)) == ("iterations", 4)
    record(run.path, tmp_path / "rec")
    assert replay(tmp_path / "rec") == []


def test_a_score_decides_what_is_best_wherever_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's measure likes the slowest."""
    (tmp_path / "score.py").write_text(
        "import json, sys\n"
        'speedup = json.load(sys.stdin)["evaluation"]["geomean_speedup"]\n'
        'print(json.dumps({"score": -speedup}))\n'
    )
    score = {"script": "score.py"}
    with begun(tmp_path, monkeypatch, score=score) as run:
        found = execute(run).optimisation
    assert found
    assert (found.best_iteration, found.best_speedup) == (0, 1.2)
    now = status(Run.open(run.path, read_only=True))
    assert (now.best_iteration, now.best_speedup) == (0, 1.2)
    report = gather(Run.open(run.path, read_only=True))
    assert report.best
    assert report.best.digest == found.best_digest
    assert [row.iteration for row in attempt_rows(report.attempts) if row.best] == [0]
    page = (run.path / f"ops/{OP}/attempts.md").read_text()
    assert "[0](0/) **best**" in page

    record(run.path, tmp_path / "rec")
    assert replay(tmp_path / "rec") == []
    file = tmp_path / "rec" / "recording.json"
    about = json.loads(file.read_text())
    about["optimisation"]["best_iteration"] = 1
    file.write_text(json.dumps(about))
    assert replay(tmp_path / "rec") == ["best_iteration: 1 then, 0 now"]
    assert read(tmp_path / "rec").optimisation.iterations[1].score == -3.0


def test_a_loop_whose_replies_held_no_source_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path, monkeypatch, iterations=2, diagnoser="off") as run:
        recording(tmp_path, [(f"{at}/generate", "I cannot do that.") for at in (0, 1)])
        execute(run)
    made = record(run.path, tmp_path / "rec")
    assert made.environment is None
    assert [one.outcome for one in made.optimisation.iterations] == ["generation_failure"] * 2
    assert (
        "Nothing was judged; nothing right and faster; " in (tmp_path / "rec/README.md").read_text()
    )
    assert read(tmp_path / "rec") == made
    assert replay(tmp_path / "rec") == []
