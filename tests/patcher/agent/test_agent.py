"""The agent loop on recorded replies, with a judge function that gives scripted verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_sample import (
    DEVICE,
    OP,
    Judge,
    Line,
    advice,
    code,
    diagnosis,
    recording,
    verdict,
)

from patcher.agent import MAX_FUNCTIONAL_FAILURES, MAX_TOKENS, best_candidate, run_loop
from patcher.attempts import LoopResult, Progress
from patcher.attempts.history import CandidateRequest, RequestRound
from patcher.bench import (
    BudgetError,
    Candidate,
    Evaluation,
    Language,
    Op,
    Outcome,
    VerificationError,
    WaitingError,
    load_op,
)
from patcher.models import Reply, Request
from patcher.models.exchange import ExchangeModel
from patcher.prompting.extract import WHOLE_FILES
from patcher.runs.run import Run


@pytest.fixture
def op() -> Op:
    return load_op(OP)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", command="optimize")


Loop = Callable[..., LoopResult]


def names(found: LoopResult) -> list[tuple[str, str]]:
    return [(attempt.phase, attempt.outcome.value) for attempt in found.iterations]


STORY: list[Line] = [
    ("0/generate", code("typo")),
    ("1/diagnose", diagnosis("a brace is missing")),
    ("1/generate", code("fixed")),
    ("2/analyse", "Here it is:\n```json\n" + advice("vectorise", 3.0) + "\n```"),
    ("2/generate", code("vector")),
    ("3/analyse", advice("prefetch", 4.0)),
    ("3/generate", code("prefetch")),
]
STORY_VERDICTS: dict[str, float | Outcome] = {
    "typo": Outcome.COMPILATION_FAILURE,
    "fixed": 0.9,
    "vector": 2.5,
    "prefetch": 1.7,
}


def test_from_a_failure_to_the_best(op: Op, run: Run, tmp_path: Path) -> None:
    judge, told = Judge(STORY_VERDICTS), list[Progress]()
    model = recording(tmp_path, STORY)
    found = run_loop(run, op, Language.CPP, model, judge, 4, DEVICE, on_event=told.append)
    assert names(found) == [
        ("functional", "compilation_failure"),
        ("functional", "too_slow"),
        ("optimisation", "correct"),
        ("optimisation", "correct"),
    ]
    assert (found.best_iteration, found.best_speedup, found.stopped) == (2, 2.5, "iterations")
    assert judge.seen == ["typo", "fixed", "vector", "prefetch"]
    assert found.usage.output_tokens == 7 * 50
    assert found.iterations[2].usage.output_tokens == 2 * 50
    recommendation = found.iterations[2].recommendation
    assert recommendation is not None
    assert (recommendation.change, recommendation.expected_speedup) == ("vectorise", 3.0)
    best = best_candidate(run, found)
    assert best is not None
    assert best.digest == found.best_digest
    assert [item.stage for item in told[:3]] == ["generate", "evaluate", "done"]
    assert told[-1].attempt == found.iterations[-1]

    folder = run.path / "ops" / OP
    repair = (folder / "1/generate.prompt.md").read_text()
    assert "// typo" in repair
    assert "expected ';' before '}' token" in repair
    assert "expected ';' before '}' token" in found.iterations[0].detail
    assert "detail of the failed check" in repair
    assert "Critical issue: a brace is missing" in repair
    assert found.iterations[1].diagnosis is not None
    assert found.iterations[1].parents == (0,)
    diagnose = (folder / "1/diagnose.prompt.md").read_text()
    assert "You audit compute kernels" in diagnose
    assert "expected ';' before '}' token" in diagnose
    analyse = (folder / "3/analyse.prompt.md").read_text()
    assert "// vector" in analyse  # the best source
    assert "2.500 (2.450 to 2.550)" in analyse
    assert "| 2 | correct | 2.500 | 3.000 | vectorise |" in analyse
    # how far off the analyst was
    assert "| 2 | 0.900 | 3.000 | 2.500 | -17 % | vectorise |" in analyse
    assert "On average 83 % of the expected speedup was measured" in analyse
    optimise = (folder / "3/generate.prompt.md").read_text()
    assert "Change: prefetch" in optimise
    assert "// prefetch" not in optimise
    assert (folder / "2/generate.reply.md").read_text() == code("vector")
    assert (folder / "2/candidate.cpp").read_text() == best.source
    assert json.loads((folder / "2/evaluation.json").read_text())["geomean_speedup"] == 2.5
    stored = (folder / "optimisation.json").read_text()
    assert LoopResult.model_validate_json(stored) == found


def test_resumed_after_every_step_the_end_is_the_same(op: Op, tmp_path: Path) -> None:
    """Interrupt the loop at each effect in turn: nothing is done twice, the result is equal."""
    model = recording(tmp_path, STORY)

    class Interrupting:
        """The model and the judge together: count effects, and stop before the given one."""

        name = "interrupting"

        def __init__(self, at: int, judge: Judge) -> None:
            self.left, self.inner, self.asked = at, judge, list[str]()

        def worst_cost_usd(self, request: Request) -> float | None:
            return 0.0

        def _count(self) -> None:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1

        def ask(self, request: Request) -> Reply:
            self._count()
            self.asked.append(request.step)
            return model.ask(request)

        def judge(self, candidate: Candidate) -> Evaluation:
            self._count()
            return self.inner(candidate)

    def whole(at: int) -> tuple[LoopResult, int]:
        judge = Judge(STORY_VERDICTS)
        first, second = Interrupting(at, judge), Interrupting(-1, judge)
        run = Run.create(tmp_path / "runs", command="optimize")
        with run, pytest.raises(KeyboardInterrupt):
            run_loop(run, op, Language.CPP, first, first.judge, 4, DEVICE)
        with Run.open(run.path) as again:
            found = run_loop(again, op, Language.CPP, second, second.judge, 4, DEVICE)
            third = run_loop(again, op, Language.CPP, model, Judge({}), 4, DEVICE)
        assert third == found
        assert judge.seen == ["typo", "fixed", "vector", "prefetch"]
        asked = first.asked + second.asked
        assert asked == [f"{OP}/{step.replace('/', '/ask-')}" for step, *_ in STORY]
        return found, len(asked) + len(judge.seen)

    results = [whole(at) for at in range(11)]
    assert {effects for _, effects in results} == {11}
    assert all(found == results[0][0] for found, _ in results)


def test_rounds_of_before_are_read_as_before(op: Op, run: Run, tmp_path: Path) -> None:
    """A reply that is a file and no block was none, and its loop went on from there."""
    file = f"// {OP}\nvoid {OP}(int a) {{\n}}"
    model = recording(tmp_path, [("0/generate", file), ("1/generate", file)])
    asked = RequestRound(asks=(CandidateRequest(kind="generate"),))
    run.step(f"{OP}/round-0", lambda: asked, RequestRound)
    found = run_loop(run, op, Language.CPP, model, lambda one: verdict(one, 2.0), 2, DEVICE)
    assert names(found) == [("functional", "generation_failure"), ("functional", "correct")]
    assert run.load(f"{OP}/round-1", RequestRound).reading == WHOLE_FILES


def test_the_same_source_is_judged_once(op: Op, run: Run, tmp_path: Path) -> None:
    lines: list[Line] = [
        ("0/generate", code("a")),
        ("1/analyse", advice("x")),
        ("1/generate", code("a")),
    ]
    judge = Judge({"a": 1.5})
    found = run_loop(run, op, Language.CPP, recording(tmp_path, lines), judge, 2, DEVICE)
    assert judge.seen == ["a"]
    assert found.iterations[1].duplicate_of == 0
    assert found.iterations[1].geomean_speedup == 1.5
    assert found.best_iteration == 0


def test_gives_up_after_failures_in_a_row(op: Op, run: Run, tmp_path: Path) -> None:
    lines: list[Line] = [(f"{n}/generate", code(f"bad{n}")) for n in range(9)]
    judge = Judge({f"bad{n}": Outcome.MISMATCH for n in range(9)})
    found = run_loop(run, op, Language.CPP, recording(tmp_path, lines), judge, 9, DEVICE)
    assert len(found.iterations) == MAX_FUNCTIONAL_FAILURES
    assert found.stopped == "functional_failures"
    assert found.best_digest is None
    assert best_candidate(run, found) is None


def test_a_cut_off_reply_is_no_code_and_gets_more_room(op: Op, run: Run, tmp_path: Path) -> None:
    lines: list[Line] = [
        ("0/generate", code("whole, but said to be cut"), "max_tokens"),
        ("1/generate", "no code at all"),
        ("2/generate", code("good")),
    ]
    judge = Judge({"good": 1.2})
    found = run_loop(run, op, Language.CPP, recording(tmp_path, lines), judge, 3, DEVICE)
    assert [attempt.outcome.value for attempt in found.iterations] == [
        "generation_failure",
        "generation_failure",
        "correct",
    ]
    assert found.iterations[0].digest is None
    assert judge.seen == ["good"]
    stored = json.loads((run.path / f"steps/{OP}/1/ask-generate.json").read_text())
    assert stored["request"]["max_tokens"] == 2 * MAX_TOKENS["generate"]
    assert "cut off" in stored["request"]["prompt"]
    prompt = (run.path / f"ops/{OP}/2/generate.prompt.md").read_text()
    assert "no fenced code block" in prompt


def test_a_reply_that_went_in_circles_gets_no_more_room(op: Op, run: Run, tmp_path: Path) -> None:
    lines: list[Line] = [
        ("0/generate", "```cpp\n" + 100 * "x = x + 1;\n", "max_tokens"),
        ("1/generate", code("bad")),
        ("2/diagnose", diagnosis("d")),
        ("2/generate", code("bad")),
        ("3/diagnose", diagnosis("d")),
        ("3/generate", code("good")),
    ]
    judge = Judge({"good": 1.2, "bad": Outcome.MISMATCH})
    found = run_loop(run, op, Language.CPP, recording(tmp_path, lines), judge, 4, DEVICE)
    assert found.iterations[0].outcome is Outcome.GENERATION_FAILURE
    stored = json.loads((run.path / f"steps/{OP}/1/ask-generate.json").read_text())
    assert stored["request"]["max_tokens"] == MAX_TOKENS["generate"]
    assert "repeated one piece again and again" in stored["request"]["prompt"]
    asked = [(run.path / f"ops/{OP}/{n}/generate.prompt.md").read_text() for n in (2, 3)]
    assert ["given more than once" in prompt for prompt in asked] == [False, True]
    assert found.best_iteration == 3


def test_a_broken_optimisation_is_repaired_once_then_left(op: Op, run: Run, tmp_path: Path) -> None:
    lines: list[Line] = [
        ("0/generate", code("good")),
        ("1/analyse", advice("one")),
        ("1/generate", code("broken")),
        ("2/generate", code("still broken")),
        ("3/analyse", "I would rather not say."),
        ("3/generate", code("better")),
    ]
    judge = Judge(
        {
            "good": 1.2,
            "broken": Outcome.RUNTIME_ERROR,
            "still broken": Outcome.MISMATCH,
            "better": 1.4,
        }
    )
    found = run_loop(run, op, Language.CPP, recording(tmp_path, lines), judge, 4, DEVICE)
    assert [phase for phase, _ in names(found)] == [
        "functional",
        "optimisation",
        "functional",
        "optimisation",
    ]
    assert "// good" in (run.path / f"ops/{OP}/3/generate.prompt.md").read_text()
    assert found.best_iteration == 3
    assert found.iterations[3].recommendation is None
    assert "no JSON" in (found.iterations[3].analysis_failure or "")


@pytest.mark.parametrize(
    "said",
    [
        '{"change": "x"}',
        '{"bottleneck": "a", "change": ""}',
        '{"bottleneck": "a", "change": "b", "expected_speedup": -1}',
        '{"bottleneck": "a", "change": "b", "expected_speedup": "fast"}',
        '{"bottleneck": "a", "change": ["b"]}',
    ],
)
def test_a_recommendation_that_does_not_fit_is_left_out(
    op: Op, run: Run, tmp_path: Path, said: str
) -> None:
    lines: list[Line] = [
        ("0/generate", code("a")),
        ("1/analyse", said),
        ("1/generate", code("b")),
    ]
    model = recording(tmp_path, lines)
    found = run_loop(run, op, Language.CPP, model, Judge({"a": 1.1, "b": 1.2}), 2, DEVICE)
    assert found.iterations[1].recommendation is None
    assert "does not fit" in (found.iterations[1].analysis_failure or "")


def test_slower_than_the_baseline_is_no_patch(op: Op, run: Run, tmp_path: Path) -> None:
    model = recording(tmp_path, [("0/generate", code("slow"))])
    found = run_loop(run, op, Language.CPP, model, Judge({"slow": 0.8}), 1, DEVICE)
    assert found.best_digest is None
    assert found.iterations[0].geomean_speedup == 0.8


def test_a_recording_that_ends(op: Op, run: Run, tmp_path: Path) -> None:
    model = recording(tmp_path, STORY[:3])
    found = run_loop(run, op, Language.CPP, model, Judge(STORY_VERDICTS), 4, DEVICE)
    assert (len(found.iterations), found.stopped) == (2, "recording_ended")
    other = recording(tmp_path, [("7/generate", code("never asked for"))])
    fresh = Run.create(tmp_path / "runs", command="optimize")
    with fresh, pytest.raises(BudgetError, match="no reply"):
        run_loop(fresh, op, Language.CPP, other, Judge({}), 4, DEVICE)


def test_two_agents(op: Op, run: Run, tmp_path: Path) -> None:
    (tmp_path / "analyst").mkdir()
    model = recording(tmp_path, [line for line in STORY if "analyse" not in line[0]])
    analyst = recording(tmp_path / "analyst", [line for line in STORY if "analyse" in line[0]])
    judge = Judge(STORY_VERDICTS)
    found = run_loop(run, op, Language.CPP, model, judge, 4, DEVICE, analyst=analyst)
    assert found.best_iteration == 2


def test_an_adviser_that_is_off_is_not_asked(op: Op, run: Run, tmp_path: Path) -> None:
    alone = [line for line in STORY if line[0].endswith("generate")]
    judge = Judge(STORY_VERDICTS)
    model = recording(tmp_path, alone)
    found = run_loop(
        run, op, Language.CPP, model, judge, 4, DEVICE, without=("analyse", "diagnose")
    )
    assert judge.seen == ["typo", "fixed", "vector", "prefetch"]
    assert found.best_iteration == 2
    assert found.usage.output_tokens == 4 * 50
    assert all(one.recommendation is one.diagnosis is None for one in found.iterations)
    assert all(one.analysis_failure is None for one in found.iterations)
    folder = run.path / "ops" / OP
    assert not list(folder.rglob("analyse.*"))
    assert not list(folder.rglob("diagnose.*"))
    # what failed, and what was measured, is told all the same
    assert "expected ';' before '}' token" in (folder / "1/generate.prompt.md").read_text()
    assert "// vector" in (folder / "3/generate.prompt.md").read_text()


def test_answers_from_outside(op: Op, tmp_path: Path) -> None:
    judge = Judge(STORY_VERDICTS)
    model = ExchangeModel(tmp_path / "letters")
    with Run.create(tmp_path / "runs", command="optimize") as run:
        path = run.path
    for step, text, *_ in STORY:
        with Run.open(path) as run, pytest.raises(WaitingError) as caught:
            run_loop(run, op, Language.CPP, model, judge, 4, DEVICE)
        reply = Path(caught.value.hint.split("answer to ")[1].split(", then")[0])
        assert reply.name.endswith(f"{OP}-{step.replace('/', '-ask-')}.reply.md")
        reply.write_text(text)
    with Run.open(path) as run:
        found = run_loop(run, op, Language.CPP, model, judge, 4, DEVICE)
    assert (found.best_iteration, found.iterations[0].reply_source) == (2, "exchange")
    assert len(judge.seen) == 4
    assert len(list((tmp_path / "letters").iterdir())) == 2 * len(STORY)


def test_tampering_is_found(op: Op, tmp_path: Path) -> None:
    model = recording(tmp_path, STORY)

    def again(path: Path) -> LoopResult:
        with Run.open(path) as run:
            return run_loop(run, op, Language.CPP, model, Judge(STORY_VERDICTS), 4, DEVICE)

    for file, old, new in (
        (f"steps/{OP}/2/evaluate.json", "2.5", "9.5"),
        (f"steps/{OP}/2/ask-generate.json", "// vector", "// forged"),
    ):
        with Run.create(tmp_path / "runs", command="optimize") as run:
            run_loop(run, op, Language.CPP, model, Judge(STORY_VERDICTS), 4, DEVICE)
        target = run.path / file
        target.write_text(target.read_text().replace(old, new))
        with pytest.raises(VerificationError, match="changed"):
            again(run.path)

    with Run.create(tmp_path / "runs", command="optimize") as run:
        found = run_loop(run, op, Language.CPP, model, Judge(STORY_VERDICTS), 4, DEVICE)
        assert found.best_file is not None
        source = run.path / found.best_file
        source.write_text(source.read_text() + "// more\n")
        with pytest.raises(VerificationError, match="changed"):
            best_candidate(run, found)


def test_an_evaluation_of_another_candidate_is_refused(op: Op, run: Run, tmp_path: Path) -> None:
    other = Candidate(op=OP, language=Language.CPP, source="other")
    model = recording(tmp_path, STORY)
    with pytest.raises(VerificationError, match="another candidate"):
        run_loop(run, op, Language.CPP, model, lambda candidate: verdict(other, 2.0), 1, DEVICE)
