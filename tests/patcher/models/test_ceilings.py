"""Ceilings on money, tokens, time and GPU time hold, whatever happens: prices, usages, failures,
delays on a simulated clock, and kills with a resume, at random."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from model_servers import ModelDouble

from patcher.bench import BudgetError, Evaluation, Language, MissingError, Outcome, PatcherError
from patcher.judges.meter import JudgeMeter
from patcher.models import ModelError, Reply, Request, Trouble
from patcher.models.budget import SHORTEST_S, Budget
from patcher.models.ceilings import RESOURCES, Amount, SpendingLimits
from patcher.models.client import ModelClient
from patcher.models.registry import ModelEntry
from patcher.models.retry import Clock, TimeUp, alarm
from patcher.runs.run import Run

EVALUATION = Evaluation(op="op", language=Language.CUDA, digest="0" * 64, outcome=Outcome.MISMATCH)


class Killed(BaseException):
    """The process is gone: nothing more is written."""


def killed(run: Run) -> None:
    run.close()
    raise Killed


def dying(run: Run, after: int, written: bool) -> None:
    """Kill at a later note of the journal: before it, or once it is there."""
    note, left = run.note, [after]

    def counted(*words: Any, **data: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not written:
            killed(run)
        found = note(*words, **data)
        if left[0] == 0:
            killed(run)
        return found

    run.note = counted  # type: ignore[method-assign]


class World:
    """What truly happened: time passes only in calls, pauses and judgements."""

    def __init__(self) -> None:
        self.used = Amount()
        self.deadline: float | None = None

    @property
    def now(self) -> float:
        return self.used.wall_s

    def pass_(self, seconds: float, gpu: bool = False) -> None:
        left = seconds if self.deadline is None else min(seconds, self.deadline - self.now)
        self.used += Amount(wall_s=left, gpu_s=left if gpu else 0.0)
        if left < seconds:
            raise TimeUp

    @contextmanager
    def alarm(self, seconds: float | None) -> Iterator[None]:
        self.deadline = None if seconds is None else self.now + seconds
        try:
            yield
        finally:
            self.deadline = None

    def clock(self, jitter: float) -> Clock:
        return Clock(
            now=lambda: self.now, sleep=self.pass_, jitter=lambda: jitter, alarm=self.alarm
        )


class Simulated(ModelDouble):
    """A double for a paid API: what it does, takes and bills is drawn."""

    def __init__(self, entry: ModelEntry, world: World, draw: st.DrawFn, kill: Any) -> None:
        super().__init__(entry)
        self.world, self.draw, self.kill = world, draw, kill

    def _once(self, request: Request) -> Reply:
        draw, room = self.draw, self._room(request)
        share = draw(st.sampled_from([0.0, 0.3, 1.0]))
        tokens = int(share * (self.worst_tokens(request) - room)), int(share * room)
        price = self.entry.price
        billed = Amount(usd=price.cost_usd(*tokens) if price else 0.0, tokens=sum(tokens))
        end = draw(st.sampled_from(["reply", "cut", "refusal", "silent", "fails", "quota", "kill"]))
        charged = end not in ("fails", "quota") or draw(st.booleans())
        if charged and end != "quota":
            self.world.used += billed
        self.world.pass_(draw(st.sampled_from([0.0, 1.0, 100.0, 3000.0])))
        if end == "kill":
            self.kill()
        if end == "quota":
            raise BudgetError("the account cannot pay")
        if end == "fails":
            raise ModelError(
                "fails",
                trouble=draw(st.sampled_from(get_args(Trouble))),
                charged=charged,
                retry_after_s=draw(st.sampled_from([None, 0.0, 200.0, 1e6])),
            )
        stop = {"cut": "max_tokens", "refusal": "refusal"}.get(end, "end_turn")
        return self.reply(request, stop, None if end == "silent" else tokens)


def ceilings() -> st.SearchStrategy[dict[str, float | None]]:
    def one(*values: float) -> st.SearchStrategy[float | None]:
        return st.sampled_from([None, *values])

    return st.fixed_dictionaries(
        {
            "budget_usd": one(0.05, 0.5, 3.0, 10.0),
            "budget_tokens": one(0, 50_000, 300_000),
            "budget_minutes": one(2.0, 60.0, 300.0),
            "budget_gpu_minutes": one(1.0, 30.0, 90.0),
        }
    )


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(data=st.data(), given_=ceilings())
def test_no_ceiling_is_ever_crossed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, given_: dict[str, Any]
) -> None:
    draw = data.draw
    prices = draw(st.sampled_from([(0.0, 0.0), (0.1, 0.5), (10.0, 50.0), (None, None)]))
    entry = ModelEntry(
        provider="anthropic",
        model="m",
        base_url="http://nowhere",
        input_usd_per_mtok=prices[0],
        output_usd_per_mtok=prices[1],
        max_output_tokens=16_000,
    )
    world = World()
    clock = world.clock(draw(st.sampled_from([0.0, 1.0])))
    run = Run.create(tmp_path_factory.mktemp("runs"), command="optimize", settings=given_)
    most = SpendingLimits.of_run(given_, ())

    def kill() -> None:
        killed(run)

    def judge() -> Evaluation:
        world.pass_(draw(st.sampled_from([0.0, 50.0, 900.0, 5000.0])), gpu=True)
        end = draw(st.sampled_from(["verdict", "verdict", "error", "kill"]))
        if end == "kill":
            kill()
        if end == "error":
            raise MissingError("no GPU")
        return EVALUATION

    try:
        for number in range(draw(st.integers(1, 6))):
            if draw(st.booleans()):
                dying(run, draw(st.integers(1, 6)), draw(st.booleans()))
            client, meter = payers(Budget(run), clock, on_gpu=True)
            model = Simulated(entry, world, draw, kill)
            request = Request(
                step=f"op/{number // 2}/ask",
                role="generate",
                system="",
                prompt="x" * draw(st.sampled_from([1, 5000])),
                max_tokens=draw(st.sampled_from([1000, 32_000])),
            )
            try:
                if draw(st.booleans()):
                    client.ask(model, request)
                else:
                    meter.judge(f"op/{number // 2}/judge", judge)
            except (PatcherError, Killed) as error:
                event(type(error).__name__)  # the next one is asked all the same
            except ValueError:
                assert run._journal is None  # a killed process cannot write
            for name in RESOURCES:
                ceiling = most.of(name)
                used = getattr(world.used, name)
                assert ceiling is None or used <= ceiling + 1e-6, name
                if ceiling is not None:
                    # a resumed run knows of all of it, too
                    assert getattr(Budget(run).account.committed, name) >= used - 1e-6, name
            if draw(st.booleans()):
                run.close()  # a kill leaves the lock to the kernel
            if run._journal is None:
                run = Run.open(run.path)
    finally:
        run.close()


def question(step: str) -> Request:
    return Request(step=step, role="generate", system="", prompt="x", max_tokens=1000)


def payers(budget: Budget, clock: Clock, *, on_gpu: bool) -> tuple[ModelClient, JudgeMeter]:
    """What takes from a budget."""
    return ModelClient(budget, clock=clock), JudgeMeter(budget, on_gpu=on_gpu, clock=clock)


class Steady(ModelDouble):
    """A double that takes its time and answers."""

    def __init__(self, world: World, seconds: float, fails: ModelError | None = None) -> None:
        super().__init__(ModelEntry(provider="anthropic", model="m", base_url="http://nowhere"))
        self.world, self.seconds, self.fails = world, seconds, fails

    def _once(self, request: Request) -> Reply:
        self.world.pass_(self.seconds)
        if self.fails:
            raise self.fails
        return self.reply(request, "end_turn", (100, 200))


def test_what_was_used_is_what_was_noted(run: Run) -> None:
    world = World()
    budget = Budget(run)
    client, meter = payers(budget, world.clock(0.5), on_gpu=True)
    client.ask(Steady(world, 20.0), question("a"))

    def judge() -> Evaluation:
        world.pass_(40.0, gpu=True)
        return EVALUATION

    for _ in range(2):
        assert meter.judge("b", judge) == EVALUATION
    assert budget.account.spent == Amount(tokens=300, wall_s=60.0, gpu_s=40.0)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("at", range(1, 8))
def test_killed_at_each_note_nothing_is_forgotten(tmp_path: Path, at: int, written: bool) -> None:
    """A failure that may have been billed, a pause, a reply, a judgement: seven notes."""
    world = World()
    run = Run.create(tmp_path, command="optimize", settings={"budget_minutes": 600.0})
    troubles = [ModelError("broke off", trouble="broken", charged=True)]

    class Failing(Steady):
        def _once(self, request: Request) -> Reply:
            self.fails = troubles.pop() if troubles else None
            world.used += Amount(tokens=300)
            return super()._once(request)

    def judge() -> Evaluation:
        world.pass_(40.0, gpu=True)
        return EVALUATION

    def work() -> Budget:
        ceilings = SpendingLimits(minutes=600.0, gpu_minutes=60.0)
        budget = Budget(run, ceilings)
        client, meter = payers(budget, world.clock(0.5), on_gpu=True)
        client.ask(Failing(world, 20.0), question("a"))
        meter.judge("b", judge)
        return budget

    dying(run, at, written)
    with pytest.raises((Killed, ValueError)):
        work()
    with Run.open(run.path) as run:
        account = work().account
        assert not account.reserved
        for name in RESOURCES:
            assert getattr(account.spent, name) >= getattr(world.used, name), name


def test_a_judgement_is_stopped_at_the_ceiling_and_resumed_with_more(run: Run) -> None:
    world = World()

    def judge() -> Evaluation:
        world.pass_(100.0, gpu=True)
        return EVALUATION

    clock = world.clock(0.5)
    budget = Budget(run, SpendingLimits(gpu_minutes=1.0))
    _, meter = payers(budget, clock, on_gpu=True)
    with pytest.raises(BudgetError, match="stopped after 60 s"):
        meter.judge("op/0/evaluate", judge)
    with pytest.raises(BudgetError, match="GPU minutes") as caught:
        meter.judge("op/0/evaluate", judge)
    assert "--budget-gpu-minutes" in caught.value.hint
    assert world.used.gpu_s == 60.0
    assert budget.account.spent == Amount(wall_s=60.0, gpu_s=60.0)
    SpendingLimits(gpu_minutes=4.0).note_in(run)
    _, again = payers(Budget(run), clock, on_gpu=True)
    assert again.judge("op/0/evaluate", judge) == EVALUATION
    _, on_cpu = payers(Budget(run, SpendingLimits(gpu_minutes=0.0)), clock, on_gpu=False)
    assert on_cpu.judge("op/1/evaluate", judge) == EVALUATION


def test_no_pause_is_begun_that_would_cross_the_ceiling(run: Run) -> None:
    world = World()
    busy = ModelError("busy", trouble="rate_limit", retry_after_s=200.0)
    budget = Budget(run, SpendingLimits(minutes=3.0))
    client, _ = payers(budget, world.clock(0.5), on_gpu=False)
    with pytest.raises(BudgetError, match="pause"):
        client.ask(Steady(world, 10.0, busy), question("a"))
    assert world.now == budget.account.committed.wall_s == 10.0
    with pytest.raises(BudgetError, match="stopped"):
        client.ask(Steady(world, 1000.0), question("b"))
    assert world.now == 180.0
    assert 180.0 - SHORTEST_S > 0


def test_waiting_for_tokens_is_refused_before_the_call(run: Run) -> None:
    world = World()
    client, _ = payers(Budget(run, SpendingLimits(tokens=2000)), world.clock(0.5), on_gpu=False)
    client.ask(Steady(world, 1.0), question("a"))
    with pytest.raises(BudgetError, match=r"300 tokens of the budget of 2,000 tokens") as caught:
        client.ask(Steady(world, 1.0), question("b").model_copy(update={"prompt": "x" * 999}))
    assert "--budget-tokens" in caught.value.hint
    assert world.now == 1.0


def test_the_alarm_ends_a_wait_and_leaves_no_trace() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeUp), alarm(0.01):
        time.sleep(60)
    with alarm(60.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_question_that_is_not_asked_is_free(run: Run) -> None:
    """Wrong keys and the like: nothing was billed, nothing stays reserved."""

    class Keyless(Steady):
        def _once(self, request: Request) -> Reply:
            raise MissingError("no key")

    budget = Budget(run, SpendingLimits(tokens=5000))
    with pytest.raises(MissingError):
        ModelClient(budget).ask(Keyless(World(), 0.0), question("a"))
    assert (budget.account.spent.tokens, budget.account.reserved) == (0, {})
