"""Whole loops of every strategy on a scripted model and a scripted judge: interrupted anywhere,
answered in any order, the end is the same and nothing is asked or judged twice."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tried_sample import OP, SHAPES, judged

from patcher.agent import ExtraText, StopRules, run_loop
from patcher.attempts import LoopResult, Stopped
from patcher.attempts.history import RequestRound
from patcher.bench import (
    BudgetError,
    Candidate,
    Evaluation,
    Language,
    Outcome,
    WaitingError,
    load_op,
)
from patcher.models import Reply, Request, Usage
from patcher.models.budget import Budget
from patcher.models.ceilings import Resource, SpendingLimits
from patcher.models.exchange import ExchangeModel
from patcher.runs.run import Run
from patcher.strategies import STRATEGIES, open_strategy

BROKEN = Outcome.MISMATCH
SEARCHES = sorted(STRATEGIES)
MEMORY = Path("/dev/shm")
"""Where it is there: the journal is flushed at each event, and no disk is tested here."""


def answer(request: Request, seed: int) -> str:
    """What the scripted model says: a function of the step and the seed alone."""
    draw = random.Random(f"{seed}/{request.step}")
    if request.role == "analyse":
        advice = {"bottleneck": "b", "change": f"c{draw.random()}", "expected_speedup": 2.0}
        return json.dumps(advice) if draw.random() < 0.8 else "I cannot say."
    if request.role == "diagnose":
        return json.dumps({"critical_issue": "x", "minimal_fix": "y"})
    if draw.random() < 0.1:
        return "no code"
    # a small number, so that the same source comes twice now and then
    number, shape = draw.randrange(30), draw.randrange(len(SHAPES))
    return f"```cpp\nvoid {OP}() {{ {SHAPES[shape]} }} // {number}\n```\n"


def verdict(candidate: Candidate) -> Evaluation:
    """What the scripted judge says: a function of the source alone."""
    draw = random.Random(candidate.digest)
    said: float | Outcome = BROKEN if draw.random() < 0.3 else draw.uniform(0.7, 3.0)
    return judged(said, candidate.source).model_copy(update={"digest": candidate.digest})


class Stopping(BaseException):
    """As if the process were killed here."""


class World:
    """The model and the judge. Each effect is counted; before or after some, the process ends, or
    the answer has to be waited for."""

    name = "scripted"

    def __init__(self, seed: int, trouble: Callable[[], str] = lambda: "") -> None:
        self.seed = seed
        self.trouble = trouble
        self.asked: list[str] = []
        self.judged: list[str] = []

    def worst_cost_usd(self, request: Request) -> float | None:
        return 0.0

    def ask(self, request: Request) -> Reply:
        self._perhaps()
        self.asked.append(request.step)
        return Reply(
            text=answer(request, self.seed),
            model="scripted-model",
            usage=Usage(input_tokens=10, output_tokens=5),
            stop_reason="end_turn",
            source="api",
            prompt_digest=request.digest,
        )

    def judge(self, candidate: Candidate) -> Evaluation:
        self._perhaps()
        self.judged.append(candidate.digest)
        return verdict(candidate)

    def _perhaps(self) -> None:
        match self.trouble():
            case "stop":
                raise Stopping
            case "wait":
                raise WaitingError("not yet", "come again")


def go(
    run: Run, world: World, name: str, iterations: int = 7, extra: ExtraText | None = None
) -> LoopResult:
    return run_loop(
        run,
        load_op(OP),
        Language.CPP,
        world,
        world.judge,
        iterations,
        "a CPU",
        strategy=open_strategy(name, seed=world.seed),
        rules=StopRules(patience=3),
        extra=extra,
    )


def artefacts(run: Run) -> dict[str, str]:
    """Every file of the loop but the journal."""
    found = [*run.path.glob("ops/**/*.*"), *run.path.glob("steps/**/*.json")]
    return {
        str(path.relative_to(run.path)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


@pytest.mark.parametrize("name", SEARCHES)
def test_a_loop_of_each_strategy(name: str, tmp_path: Path) -> None:
    world = World(seed=3)
    with Run.create(tmp_path, command="optimize") as run:
        found = go(run, world, name)
        assert found.strategy == name
        assert len(found.iterations) == len({one.iteration for one in found.iterations})
        assert [one.iteration for one in found.iterations] == list(range(len(found.iterations)))
        assert found.usage.output_tokens == 5 * len(world.asked)
        assert len(world.judged) == len(set(world.judged))
        stopped = run.load(f"{OP}/stopped", Stopped)
        assert (stopped.reason, stopped.detail) == (found.stopped, found.stopped_detail)
        assert stopped.iterations == len(found.iterations)
        rounds = found.iterations[-1].round + 1
        asks = [run.load(f"{OP}/round-{n}", RequestRound).asks for n in range(rounds)]
    assert sum(map(len, asks)) == len(found.iterations)
    if name in ("sample", "beam", "evolve"):
        assert len(asks[0]) == 4
    best = [one.geomean_speedup or 0 for one in found.iterations]
    assert found.best_speedup == (max(best) if max(best) > 1 else None)
    again = LoopResult.model_validate_json(found.model_dump_json())
    assert again == found


@settings(max_examples=16, deadline=None)
@given(name=st.sampled_from(SEARCHES), seed=st.integers(0, 50), data=st.data())
def test_stopped_and_made_to_wait_anywhere_the_end_is_the_same(
    name: str, seed: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        root = Path(folder)
        plain = World(seed)
        with Run.create(root / "plain", command="optimize") as run:
            whole = go(run, plain, name)
            expected = artefacts(run)

        troubles = data.draw(
            st.lists(st.sampled_from(["", "", "", "stop", "wait"]), max_size=40), label="troubles"
        )
        todo = iter(troubles)
        world = World(seed, lambda: next(todo, ""))
        with Run.create(root / "troubled", command="optimize") as run:
            path = run.path
        for _ in range(len(troubles) + 1):
            with Run.open(path) as run:
                try:
                    found = go(run, world, name)
                except (Stopping, WaitingError):
                    continue
                assert artefacts(run) == expected
            break
        assert found == whole
        assert sorted(world.asked) == sorted(plain.asked)
        assert sorted(world.judged) == sorted(plain.judged)
        assert len(set(world.asked)) == len(world.asked)
        silent = World(seed, lambda: "stop")
        with Run.open(path) as run:
            assert go(run, silent, name) == whole


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_a_rounds_prompts_are_all_written_before_a_reply_is_waited_for(
    order: str, tmp_path: Path
) -> None:
    letters = tmp_path / "letters"
    model, handed = ExchangeModel(letters), list[str]()

    def judge(candidate: Candidate) -> Evaluation:
        """Elsewhere: takes every candidate, and has no verdict at the first call."""
        if candidate.digest not in handed:
            handed.append(candidate.digest)
            raise WaitingError(f"waiting for {candidate.digest[:8]}", "serve the job")
        return judged(1.5, candidate.source).model_copy(update={"digest": candidate.digest})

    prepared: list[int] = []

    def prepare(candidates: Sequence[Candidate]) -> None:
        prepared.append(len(candidates))

    def attempt() -> LoopResult:
        with Run.open(path) as run:
            return run_loop(
                run,
                load_op(OP),
                Language.CPP,
                model,
                judge,
                3,
                "a CPU",
                strategy=open_strategy("sample", width=3),
                prepare=prepare,
            )

    with Run.create(tmp_path / "runs", command="optimize") as run:
        path = run.path
    with pytest.raises(WaitingError, match=r"and 2 more"):
        attempt()
    prompts = sorted(letters.glob("*.prompt.md"))
    assert len(prompts) == 3
    replies = [prompt.with_name(prompt.name.replace("prompt", "reply")) for prompt in prompts]
    numbered = list(enumerate(replies))
    for left, (number, reply) in enumerate(numbered if order == "forwards" else numbered[::-1]):
        assert not handed  # nothing is judged before the round is whole
        with pytest.raises(WaitingError, match=r"and 1 more" if left == 1 else "waiting for"):
            attempt()
        reply.write_text(f"```cpp\nvoid {OP}() {{}} // {number}\n```\n")
    with pytest.raises(WaitingError, match=r"waiting for .* \(and 2 more\)"):
        attempt()
    assert len(handed) == 3
    found = attempt()
    assert [one.outcome.value for one in found.iterations] == ["correct"] * 3
    assert [one.duplicate_of for one in found.iterations] == [None] * 3
    assert prepared == [3, 3]
    assert len(list(letters.glob("*.prompt.md"))) == 3


class Poor(World):
    """Costs a dollar a call."""

    def worst_cost_usd(self, request: Request) -> float | None:
        return 1.0

    def ask(self, request: Request) -> Reply:
        usage = Usage(input_tokens=1, output_tokens=1, cost_usd=1.0)
        return super().ask(request).model_copy(update={"usage": usage})


def poor(run: Run, world: Poor, budget: float, verdicts: float | Outcome) -> LoopResult:
    def judge(candidate: Candidate) -> Evaluation:
        world.judged.append(candidate.digest)
        found = judged(verdicts, candidate.source)
        return found.model_copy(update={"digest": candidate.digest})

    strategy = open_strategy("sample", width=4)
    return run_loop(
        run, load_op(OP), Language.CPP, world, judge, 8, "a CPU",
        strategy=strategy, budget=Budget(run, SpendingLimits(usd=budget)),
    )  # fmt: skip


def test_a_spent_budget_ends_a_loop_that_has_something_worth_a_patch(tmp_path: Path) -> None:
    """What was paid for is judged, the end is recorded, and more money does not change it."""
    world = Poor(seed=1)
    with Run.create(tmp_path, command="optimize") as run:
        found = poor(run, world, 6.0, 1.5)
        assert (found.stopped, len(found.iterations)) == ("budget", 6)
        assert "$6.00" in found.stopped_detail
        assert found.best_digest is not None
        assert found.usage.cost_usd == 6.0
    with Run.open(run.path) as run:
        assert poor(run, Poor(seed=1), 100.0, 1.5) == found


def test_an_end_by_budget_stands_until_the_run_is_given_more(tmp_path: Path) -> None:
    first, second = Poor(seed=1), Poor(seed=1)
    with Run.create(tmp_path, command="optimize") as run:
        poor(run, first, 6.0, 1.5)
        SpendingLimits(usd=7.0).note_in(run)
        found = poor(run, second, 7.0, 1.5)
        assert (found.stopped, len(found.iterations)) == ("budget", 7)
        SpendingLimits(usd=70.0).note_in(run)
        whole = poor(run, second, 70.0, 1.5)
        assert (whole.stopped, len(whole.iterations)) == ("iterations", 8)
        SpendingLimits(usd=700.0).note_in(run)
        assert poor(run, Poor(seed=1), 700.0, 1.5) == whole
    asked = first.asked + second.asked
    assert len(asked) == len(set(asked)) == 8


def test_pictures_go_to_an_analyst_that_sees(tmp_path: Path) -> None:
    class Seeing(World):
        images = True

        def ask(self, request: Request) -> Reply:
            if request.images:
                shown.append((request.role, [image.file for image in request.images]))
            return super().ask(request)

    shown: list[tuple[str, list[str]]] = []
    head = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\0\0\0\x02" * 2
    prompts = []
    for model in (Seeing(seed=3), World(seed=3)):
        with Run.create(tmp_path, command="optimize") as run:
            (run.path / "profile.png").write_bytes(head)
            run_loop(
                run, load_op(OP), Language.CPP, model, model.judge, 4, "a CPU",
                pictures=["profile.png"],
            )  # fmt: skip
            found = [path.read_text() for path in run.path.glob("ops/*/*/analyse.prompt.md")]
            prompts.append(all("The pictures show" in text for text in found) and bool(found))
    assert prompts == [True, False]
    assert shown
    assert {role for role, _ in shown} == {"analyse"}
    assert all(files == ["profile.png"] for _, files in shown)


def test_a_budget_that_ends_between_verdicts(tmp_path: Path) -> None:
    """The candidates of a round that are judged count, the others do not, now and ever after."""

    class Clocked(Budget):
        def time_limit(
            self, what: str, longest_s: float, clocks: tuple[Resource, ...]
        ) -> float | None:
            if what == "a judgement":
                if len(seen) == 3:
                    raise BudgetError("no time is left for a judgement", "raise it")
                seen.append(what)
            return super().time_limit(what, longest_s, clocks)

    def go() -> LoopResult:
        def judge(candidate: Candidate) -> Evaluation:
            return judged(1.5, candidate.source).model_copy(update={"digest": candidate.digest})

        strategy, world = open_strategy("sample", width=4), Poor(seed=1)
        return run_loop(
            run, load_op(OP), Language.CPP, world, judge, 8, "a CPU",
            strategy=strategy, budget=Clocked(run, SpendingLimits()),
        )  # fmt: skip

    seen: list[str] = []
    with Run.create(tmp_path, command="optimize") as run:
        found = go()
        assert found.stopped == "budget"
        done = len(found.iterations)
        assert 3 <= done < 8
    seen.clear()
    with Run.open(run.path) as run:
        assert go() == found


def test_a_spent_budget_with_nothing_to_show_waits_for_more(tmp_path: Path) -> None:
    world = Poor(seed=1)
    with (
        Run.create(tmp_path, command="optimize") as run,
        pytest.raises(BudgetError, match=r"6\.00"),
    ):
        poor(run, world, 6.0, BROKEN)
    assert len(world.asked) == 6
    with Run.open(run.path) as run:
        found = poor(run, world, 100.0, BROKEN)
    assert (found.stopped, len(found.iterations)) == ("iterations", 8)
    assert len(world.asked) == len(set(world.asked)) == 8


def test_text_of_the_callers_reaches_the_questions(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def extra(role: str, iteration: int) -> str:
        seen.append((role, iteration))
        return f"# Notes\nfor {role} in {iteration}"

    world = World(seed=3)
    with Run.create(tmp_path, command="optimize") as run:
        found = go(run, world, "refine", 6, extra)
    roles = {role for role, _ in seen}
    assert roles >= {"generate", "analyse"}
    for role, iteration in seen:
        prompt = (run.path / f"ops/{OP}/{iteration}/{role}.prompt.md").read_text()
        assert f"# Notes\nfor {role} in {iteration}\n" in prompt
    assert len({at for _, at in seen}) == len(found.iterations)


def test_questions_say_what_they_begin_with_alike_and_what_advice_looks_like(
    tmp_path: Path,
) -> None:
    class Listening(World):
        def ask(self, request: Request) -> Reply:
            asked.append(request)
            return super().ask(request)

    asked: list[Request] = []
    world = Listening(seed=3)
    with Run.create(tmp_path, command="optimize") as run:
        run_loop(run, load_op(OP), Language.CPP, world, world.judge, 6, "a CPU")
    heads = {one.role: {o.prompt[: o.head] for o in asked if o.role == one.role} for one in asked}
    assert {"generate", "analyse"} <= set(heads)
    assert all(len(found) == 1 and "" not in found for found in heads.values())
    keys = {one.role: (one.answer_schema or {}).get("required") for one in asked}
    assert keys["generate"] is None
    assert keys["analyse"] == ["bottleneck", "change", "expected_speedup"]
