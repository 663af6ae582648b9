"""Memory and the user's levers in the whole loop, with recorded replies; and the commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_sample import DEVICE, OP, Judge, Line, advice, code, diagnosis, recording
from memory_sample import HONEYTOKEN, broken

from patcher import pipeline
from patcher.agent import run_loop
from patcher.attempts import LoopResult
from patcher.bench import (
    Candidate,
    Environment,
    Evaluation,
    Language,
    Outcome,
    UsageError,
    WaitingError,
    load_op,
)
from patcher.cli import main
from patcher.kernel_search.context import MACHINE_INDEPENDENT, run_levers
from patcher.kernel_search.memory import experiences, learn_from_run, recall_for_run
from patcher.levers.load import load_levers
from patcher.levers.scoring import Scorer
from patcher.memory import Memory, MemoryText
from patcher.models import Role
from patcher.runs.run import Run
from patcher.settings import resolve

CPU = Environment(device="a CPU", device_kind="cpu", python="3.11", packages={})
SWEEP = load_op(OP).sweep("cpu")


class Timed(Judge):
    """The scripted verdicts, on the op's real sweep."""

    def __call__(self, candidate: Candidate) -> Evaluation:
        said = super().__call__(candidate).model_copy(update={"environment": CPU})
        if not said.timings:
            text = f"unit.cpp:1:9: error: '{HONEYTOKEN}' was not declared in this scope\n"
            return said.model_copy(update={"log": text})
        points = [point.axes for point in SWEEP.points()]
        timings = tuple(said.timings[0].model_copy(update={"axes": axes}) for axes in points)
        return said.model_copy(update={"timings": timings, "sweep": SWEEP.name})


def secret_code(marker: str) -> str:
    return code(marker).replace("() {}", f'() {{ const char* key = "{HONEYTOKEN}"; }}')


LINES: list[Line] = [
    ("0/generate", secret_code("typo")),
    ("1/diagnose", diagnosis(f"The helper of {HONEYTOKEN} is used and never declared")),
    ("1/generate", secret_code("fixed")),
    ("2/analyse", advice(f"Vectorise the loads of {HONEYTOKEN}", 3.0)),
    ("2/generate", secret_code("vector")),
    ("3/analyse", advice(f"Unroll the loop in {HONEYTOKEN}", 3.0)),
    ("3/generate", secret_code("slower")),
]
VERDICTS: dict[str, float | Outcome] = {
    "typo": Outcome.COMPILATION_FAILURE,
    "fixed": 1.2,
    "vector": 1.8,
    "slower": 1.5,
}


def ask_for(run: Run, tmp_path: Path, iterations: int = 4, **more: Any) -> LoopResult:
    model = recording(tmp_path, LINES)
    op = load_op(OP)
    return run_loop(run, op, Language.CPP, model, Timed(VERDICTS), iterations, DEVICE, **more)


def new_run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", command="optimize")


def test_a_loop_teaches_gains_between_parent_and_child_and_no_text_of_its_own(
    tmp_path: Path,
) -> None:
    run, memory = new_run(tmp_path), Memory(tmp_path / "memory")
    found = ask_for(run, tmp_path, extra=lambda role, at: HONEYTOKEN)
    said: list[str] = []
    learn_from_run(run, memory, load_op(OP), found, said.append)
    gains = {gain.technique: gain.gain for gain in memory.techniques()}
    assert gains == pytest.approx({"vector loads": 1.8 / 1.2, "unrolling": 1.5 / 1.8}, rel=1e-4)
    assert {gain.architecture for gain in memory.techniques()} == {"cpu"}
    [rule] = memory.rules()
    assert (rule.failure, rule.count) == ("undeclared name", 1)
    assert rule.text.endswith("(once: the helper of ... is used and never declared)")
    assert HONEYTOKEN in (run.path / f"ops/{OP}/0/generate.prompt.md").read_text()
    for path in memory.folder.iterdir():
        assert HONEYTOKEN not in path.read_text()
    assert said == [f"memory: 1 rules, {len(memory.techniques())} techniques in {memory.folder}"]
    before = {path.name: path.read_bytes() for path in memory.folder.iterdir()}
    learn_from_run(run, memory, load_op(OP), found, said.append)
    assert {path.name: path.read_bytes() for path in memory.folder.iterdir()} == before


def test_a_duplicate_teaches_nothing_more(tmp_path: Path) -> None:
    lines: list[Line] = [
        ("0/generate", code("a")),
        ("1/analyse", advice("unroll")),
        ("1/generate", code("a")),
    ]
    run = new_run(tmp_path)
    judge = Timed({"a": 1.5})
    model = recording(tmp_path, lines)
    found = run_loop(run, load_op(OP), Language.CPP, model, judge, 2, DEVICE)
    assert len(list(experiences(run, found))) == 1


def test_a_resumed_run_reads_the_memory_that_it_began_with(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory")
    memory.folder.mkdir()
    rules = memory.folder / "rules.toml"
    rules.write_text('[[rule]]\ntext = "you cannot sing because it is late"\n')
    run = new_run(tmp_path)
    op = load_op(OP)
    first = recall_for_run(run, memory, op, Language.CPP, "cpu")
    assert "You cannot sing" in first.text
    rules.write_text("broken")
    run.close()
    with Run.open(run.path) as again:
        assert recall_for_run(again, memory, op, Language.CPP, "cpu") == first
    with Run.create(tmp_path / "runs", command="optimize") as other, pytest.raises(UsageError):
        recall_for_run(other, memory, op, Language.CPP, "cpu")
    with Run.create(tmp_path / "runs", command="optimize") as other:
        assert recall_for_run(other, None, op, Language.CPP, "cpu") == MemoryText()


def test_on_another_machine_memory_and_levers_stay_and_scores_are_asked_again(
    tmp_path: Path,
) -> None:
    run, memory = new_run(tmp_path), Memory(tmp_path / "memory")
    recall_for_run(run, memory, load_op(OP), Language.CPP, "cpu")
    run_levers(run)
    script = score_by({"fixed": 5.0, "vector": 1.0, "slower": 9.0}, tmp_path)
    ask_for(run, tmp_path, score=Scorer.of(run, {"score": {"script": str(script)}}))
    assert run.done(f"{OP}/1/score")
    run.start_over({"processor": "another"}, MACHINE_INDEPENDENT)
    assert run.done(f"{OP}/recall")
    assert run.done("levers")
    assert not run.done(f"{OP}/1/score")


def test_a_memory_that_broke_meanwhile_costs_the_run_nothing(tmp_path: Path) -> None:
    run, memory = new_run(tmp_path), Memory(tmp_path / "memory")
    found = ask_for(run, tmp_path)
    memory.folder.mkdir()
    (memory.folder / "rules.toml").write_text("oops\n")
    said: list[str] = []
    learn_from_run(run, memory, load_op(OP), found, said.append)
    assert "nothing learned" in said[0]
    assert "line 1" in said[0]
    (memory.folder / "rules.toml").unlink()
    learn_from_run(run, memory, load_op(OP), found, said.append)
    assert memory.techniques(), "resuming tries again"


def test_prompts_carry_memory_and_levers_where_they_should(tmp_path: Path) -> None:
    (tmp_path / "mine.h").write_text("int helper();\n")
    settings = {
        "prompts": [{"append": "Think of the tail.", "agents": ["generate"], "iterations": "2-"}],
        "auxiliary": [{"file": "mine.h", "iterations": "0"}],
        "tripwires": {"banned": [r"\bgoto\b"]},
    }
    levers = load_levers(settings, tmp_path)

    def extra(role: Role, iteration: int) -> str:
        return levers.extra(OP, role, iteration, "- You cannot sing.")

    def adapt(role: Role, iteration: int, prompt: str) -> str:
        return levers.adapt(OP, role, iteration, prompt)

    run = new_run(tmp_path)
    ask_for(run, tmp_path, extra=extra, adapt=adapt)
    prompts = {
        path.parent.name + "/" + path.name.partition(".")[0]: path.read_text()
        for path in run.path.glob(f"ops/{OP}/*/*.prompt.md")
    }
    assert {name for name, text in prompts.items() if "You cannot sing" in text} == set(prompts)
    assert [name for name, text in prompts.items() if "int helper();" in text] == ["0/generate"]
    late = {name for name, text in prompts.items() if "Think of the tail." in text}
    assert late == {"2/generate", "3/generate"}
    assert {name for name, text in prompts.items() if "goto" in text} == {
        name for name in prompts if name.endswith("generate")
    }


def score_by(marks: dict[str, float], tmp_path: Path) -> Path:
    file = tmp_path / "score.py"
    file.write_text(
        "import json, sys\n"
        'source = open(json.load(sys.stdin)["artefacts"]["candidate"]).read()\n'
        'mark = source.rsplit("// ", 1)[-1].strip()\n'
        f'print(json.dumps({{"score": {marks!r}[mark]}}))\n'
    )
    return file


def test_a_score_ranks_what_is_right(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    script = score_by({"fixed": 5.0, "vector": 1.0, "slower": 9.0}, tmp_path)
    scorer = Scorer.of(run, {"score": {"script": str(script)}})
    found = ask_for(run, tmp_path, score=scorer)
    assert [attempt.score for attempt in found.iterations] == [None, 5.0, 1.0, 9.0]
    assert (found.best_iteration, found.best_speedup) == (3, 1.5)


def test_a_score_makes_nothing_right(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    script = score_by({"typo": 1e9, "fixed": 1.0, "slow": 1e9}, tmp_path)
    scorer = Scorer.of(run, {"score": {"script": str(script)}})
    lines = [
        *LINES[:3],
        ("2/analyse", LINES[3][1]),
        ("2/generate", secret_code("slow")),
    ]
    judge = Timed({**VERDICTS, "slow": 0.9})
    model = recording(tmp_path, lines)
    found = run_loop(run, load_op(OP), Language.CPP, model, judge, 3, DEVICE, score=scorer)
    outcomes = [(attempt.outcome.value, attempt.score) for attempt in found.iterations]
    assert outcomes == [("compilation_failure", None), ("correct", 1.0), ("too_slow", 1e9)]
    assert found.best_iteration == 1, "one that is not faster makes no patch, whatever its score"


def test_a_failing_score_stops_the_run_and_not_the_candidate(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    script = score_by({}, tmp_path)
    settings = {"score": {"script": str(script)}}
    with pytest.raises(UsageError, match=r"score script score\.py failed"):
        ask_for(run, tmp_path, score=Scorer.of(run, settings))
    run.close()
    script.write_text("print('{\"score\": 2.0}')")
    with Run.open(run.path) as again:
        found = ask_for(again, tmp_path, score=Scorer.of(again, settings))
    assert found.best_iteration == 1, "the first of those that score alike"
    results = [event.step for event in again.events if event.kind == "result"]
    assert len(results) == len(set(results)), "nothing was asked or judged twice"


# The pipeline and the commands


BROKEN = "```cpp\nvoid {op}() {{ {name}(); }} // {name}\n```\n"


def worked(model: str) -> Run:
    """One iteration of `patcher optimize`, with the real compiler."""
    settings = resolve({"model": model, "iterations": 1})
    plan = pipeline.RunPlan(op=OP, language=Language.CPP, whole=False)
    with (
        pipeline.start(settings, "optimize", None, None, plan) as run,
        contextlib.suppress(WaitingError),
    ):
        pipeline.execute(run, lambda *told: None, lambda text: None)
    return run


def test_what_one_run_learned_is_in_the_next_runs_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third candidate fails as two did before: the rule is promoted and the next run is told;
    nothing of a source gets there."""
    (tmp_path / "patcher.toml").write_text(
        'memory = "team"\n[[prompts]]\nappend = "Mind the tail."\niterations = 0\n'
    )
    memory = Memory(tmp_path / "team")
    earlier = [broken(number, 'identifier "x" is undefined') for number in range(2)]
    memory.learn("earlier", load_op(OP).contract, Language.CPP, earlier)
    monkeypatch.chdir(tmp_path)
    recording(tmp_path, [("0/generate", BROKEN.format(op=OP, name=HONEYTOKEN))])
    run = worked("replay:recording.jsonl")
    [rule] = memory.rules()
    assert (rule.count, rule.runs, rule.promoted) == (3, 2, True)
    assert rule.failure == "undeclared name"
    for path in memory.folder.iterdir():
        assert HONEYTOKEN not in path.read_text()

    (tmp_path / "patcher.toml").write_text('memory = "team"\n')
    again = worked("exchange:letters")
    first, second = (
        (each.path / f"ops/{OP}/0/generate.prompt.md").read_text() for each in (run, again)
    )
    assert "You cannot use a name without declaring it" not in first
    assert "You cannot use a name without declaring it" in second
    assert "Mind the tail." in first
    assert "Mind the tail." not in second
    assert HONEYTOKEN not in second
    assert again.load(f"{OP}/recall", MemoryText).rules == (rule.id,)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The command line in this process: exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["patcher", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return call


def test_memory_commands(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = command("memory", "path", "--json")
    assert (code, "memory is off (default)" in said) == (2, True)
    monkeypatch.setenv("PATCHER_MEMORY", "on")
    code, folder = command("memory", "path")
    assert (code, folder.strip()) == (0, str(tmp_path / "home/memory"))
    assert "memory is empty" in command("memory")[1]
    rules = tmp_path / "home/memory/rules.toml"
    rules.parent.mkdir(parents=True)
    rules.write_text('[[rule]]\nid = "mine"\ntext = "you cannot [red]sing[/]"\ncount = 7\n')
    assert "you cannot [red]sing[/]" in command("memory", "show")[1]
    [rule] = json.loads(command("memory", "show", "--json")[1])["rules"]
    assert (rule["id"], rule["count"], rule["promoted"]) == ("mine", 7, True)

    code, said = command("memory", "forget", "yours", "--json")
    assert (code, json.loads(said)["error"]["kind"]) == (2, "usage")
    code, said = command("memory", "forget", "--all", "--json")
    assert (code, "--yes" in json.loads(said)["error"]["hint"]) == (2, True)
    said = command("memory", "forget", "--all", "--dry-run", "--json")[1]
    assert json.loads(said)["forgotten"] == ["mine"]
    assert "mine" in rules.read_text()
    assert command("memory", "forget", "--all", "--yes") == (0, "forgot mine\n")
    assert "mine" not in rules.read_text()

    rules.write_text('[[rule]]\ntext = "a\n')
    code, said = command("memory", "--json")
    assert (code, "line 2" in json.loads(said)["error"]["message"]) == (2, True)
    monkeypatch.setenv("PATCHER_MEMORY", "off")
    code, said = command("memory", "--json")
    assert (code, "memory is off (PATCHER_MEMORY)" in said) == (2, True)


@pytest.mark.parametrize("name", ["show", "forget", "path"])
def test_help_has_examples(command: Callable[..., tuple[int, str]], name: str) -> None:
    assert f"patcher memory {name}" in command("memory", name, "--help")[1]
