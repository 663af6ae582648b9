"""Ceilings that hold: before each call and each judgement its worst case is reserved in the
journal, afterwards what it took is noted there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from patcher.bench import BudgetError, Evaluation, PatcherError, UsageError
from patcher.models import TOKENS_CEILING, Asked, Model, ModelError, Reply, Request, Trouble
from patcher.models.api import ApiModel
from patcher.models.ceilings import (
    RESERVED,
    SPENT,
    Account,
    Amount,
    Resource,
    SpendingLimits,
    account,
)
from patcher.models.replay import ReplayModel
from patcher.models.retry import Clock, TimeUp, pause_s
from patcher.runs.run import Run

CALL_LIMIT_S = 2400.0
"""The longest that one call may take, where there is a ceiling on time."""
JUDGE_LIMIT_S = 1200.0
"""Likewise one judgement, where there is a ceiling on time or GPU time."""
SHORTEST_S = 30.0
"""With less time left than this, nothing is begun."""
REPHRASED = (
    "This is ordinary performance engineering: a kernel for one numerical operation of an open "
    "model, whose source the user owns. It is compiled, tested and timed on the user's own machine "
    "in a sandbox. Please answer the request.\n\n"
)
"""Put before a prompt that a model declined."""


class Budget:
    """The purse of one run, from which every call and every judgement is paid.

    Ceilings on money, tokens and time, so that none is ever crossed. `judge_on_gpu` says whether a
    judgement takes GPU time: all of the step, a wait for the GPU's lock included.
    """

    def __init__(
        self,
        run: Run,
        ceilings: SpendingLimits | None = None,
        *,
        judge_on_gpu: bool = False,
        clock: Clock | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.run = run
        self.ceilings = ceilings or SpendingLimits.of_run(run.config.settings, run.events)
        self._judge_on_gpu = judge_on_gpu
        self._clock = clock or Clock()
        self._say = say
        self._took: dict[str, float] = {}
        """Seconds of steps done in this process, until they are noted."""

    @property
    def account(self) -> Account:
        return account(self.run.events)

    def ask(self, model: Model, request: Request) -> Asked:
        """Ask as a step of the run: once, ever. The question and the answer are stored as they
        were. A reply that was cut off is asked for again with twice the room, a refused question
        is put once more in other words, each as a step of its own below `request.step`.

        Returns:
            The last question and its reply, with the usage of all replies.

        Raises:
            BudgetError: the call could cross a ceiling, or the provider's account is empty.
            UsageError: a ceiling is set on money and the model's price is unknown.
            ModelError: it went on failing; and whatever else `model.ask` raises.
        """
        asked = self._asked(model, request)
        usage = asked.reply.usage
        while again := _follow_up(model, asked):
            asked = self._asked(model, again)
            usage += asked.reply.usage
        return asked.model_copy(update={"reply": asked.reply.model_copy(update={"usage": usage})})

    def judge(self, step: str, function: Callable[[], Evaluation]) -> Evaluation:
        """A judgement as a step of the run: once, ever.

        Raises:
            BudgetError: no time is left for it, or it was stopped at a ceiling.
        """
        time: tuple[Resource, ...] = ("wall_s", "gpu_s") if self._judge_on_gpu else ("wall_s",)

        def timed() -> Evaluation:
            limit = self._time_limit("a judgement", JUDGE_LIMIT_S, time)
            self._reserve(step, Amount.model_validate(dict.fromkeys(time, limit or 0.0)))
            begun = self._clock.now()
            try:
                with self._clock.alarm(limit):
                    evaluation = function()
            except BaseException as error:
                took = self._clock.now() - begun
                self._spend(step, Amount.model_validate(dict.fromkeys(time, took)))
                if isinstance(error, TimeUp):
                    raise _stopped("the judgement", limit) from None
                raise
            finally:
                self._took[step] = self._clock.now() - begun
            return evaluation

        evaluation = self.run.step(step, timed, Evaluation)
        took = self._took.pop(step, None)
        if took is not None:
            # where the judge runs elsewhere, only it knows how long it took
            took_there = max(took, evaluation.total_s or 0.0)
            gpu_s = took_there if self._judge_on_gpu else 0.0
            self._spend(step, Amount(wall_s=took, gpu_s=gpu_s))
        elif step in (reserved := self.account.reserved):
            self._spend(step, reserved[step])
        return evaluation

    def _asked(self, model: Model, request: Request) -> Asked:
        step = request.step
        asked = self.run.step(step, lambda: self._tries(model, request), Asked)
        # Settled after the reply is safe on the disk: a kill before this line leaves the
        # reservation.
        took = self._took.pop(step, None)
        if (worst := self.account.reserved.get(step)) is not None:
            usage = asked.reply.usage
            known = usage.input_tokens is not None and usage.output_tokens is not None
            tokens = (usage.input_tokens or 0) + (usage.output_tokens or 0)
            spent = Amount(
                usd=worst.usd if usage.cost_usd is None else usage.cost_usd,
                tokens=tokens if known else worst.tokens,
                wall_s=worst.wall_s if took is None else took,
            )
            self._spend(step, spent)
        return asked

    def _tries(self, model: Model, request: Request) -> Asked:
        failed: Counter[Trouble] = Counter()
        while True:
            try:
                return Asked(request=request, reply=self._try(model, request))
            except ModelError as error:
                failed[error.trouble] += 1
                pause = pause_s(error, failed, self._clock.jitter())
                if pause is None:
                    raise
                if self._say:
                    self._say(f"  {error.message}; asking again in {pause:.0f} s")
            self._pause(request.step, pause)

    def _try(self, model: Model, request: Request) -> Reply:
        limit = self._reserve_call(model, request)
        begun = self._clock.now()
        try:
            with self._clock.alarm(limit):
                return model.ask(request)
        except BaseException as error:
            worst = self.account.reserved.get(request.step)
            if worst is not None:
                free = isinstance(error, PatcherError) and not getattr(error, "charged", False)
                took = self._clock.now() - begun
                spent = Amount() if free else Amount(usd=worst.usd, tokens=worst.tokens)
                why = {"trouble": error.trouble} if isinstance(error, ModelError) else {}
                self._spend(request.step, spent.model_copy(update={"wall_s": took}), **why)
            if isinstance(error, TimeUp):
                raise _stopped(f"the call of {model.name}", limit) from None
            raise
        finally:
            self._took[request.step] = self._clock.now() - begun

    def _reserve_call(self, model: Model, request: Request) -> float | None:
        """Reserve the worst case of one try; returns the seconds that it may take."""
        usd = model.worst_cost_usd(request)
        if usd is None and self.ceilings.usd is not None:
            raise UsageError(
                f"no price is known for {model.name}, so a budget in dollars cannot hold",
                "give its prices in [models.NAME] of patcher.toml, or run without --budget-usd",
            )
        if not isinstance(model, ApiModel):  # a file or a recording: no tokens, no time
            self._reserve(request.step, Amount(usd=usd or 0.0))
            return None
        limit = self._time_limit("a call", CALL_LIMIT_S, ("wall_s",))
        tokens = model.worst_tokens(request)
        self._reserve(request.step, Amount(usd=usd or 0.0, tokens=tokens, wall_s=limit or 0.0))
        return limit

    def _time_limit(self, what: str, longest: float, time: tuple[Resource, ...]) -> float | None:
        """Seconds that may be used now; None where there is no ceiling on time."""
        used = self.account.committed
        limit: float | None = None
        for name in time:
            ceiling = self.ceilings.of(name)
            if ceiling is not None:
                left = ceiling - getattr(used, name)
                if left < SHORTEST_S:
                    raise self._crossed(name, what, SHORTEST_S)
                limit = min(left, longest if limit is None else limit)
        return limit

    def _reserve(self, step: str, worst: Amount) -> None:
        used = self.account.committed
        # Time is what `_time_limit` found to be left: adding it up again may round over a ceiling.
        for name in ("usd", "tokens"):
            more, ceiling = getattr(worst, name), self.ceilings.of(name)
            if more and ceiling is not None and getattr(used, name) + more > ceiling:
                raise self._crossed(name, "the next call", more)
        if worst != Amount():
            self.run.note(step, **worst.noted(RESERVED))

    def _spend(self, step: str, spent: Amount, **why: str) -> None:
        self.run.note(step, **spent.noted(SPENT), **why)

    def _pause(self, step: str, seconds: float) -> None:
        """Sleep, unless the ceiling on time would be crossed."""
        ceiling, used = self.ceilings.of("wall_s"), self.account.committed.wall_s
        if ceiling is not None and used + seconds > ceiling:
            raise self._crossed("wall_s", "the pause before the next try", seconds)
        self._spend(step, Amount(wall_s=seconds))
        self._clock.sleep(seconds)

    def _crossed(self, name: Resource, what: str, more: float) -> BudgetError:
        used, ceiling = getattr(self.account.committed, name), self.ceilings.of(name) or 0.0
        flag, unit = _FLAGS[name]
        enough = (used + 2 * more) / unit
        return BudgetError(
            f"{what} could take {_said(name, more)}; "
            f"{_said(name, used)} of the budget of {_said(name, ceiling)} are used",
            f"give it more: patcher resume --budget-{flag} {math.ceil(100 * enough) / 100:g}",
        )


_FLAGS: dict[Resource, tuple[str, float]] = {
    "usd": ("usd", 1.0),
    "tokens": ("tokens", 1.0),
    "wall_s": ("minutes", 60.0),
    "gpu_s": ("gpu-minutes", 60.0),
}


def _said(name: Resource, value: float) -> str:
    match name:
        case "usd":
            return f"${value:.2f}"
        case "tokens":
            return f"{value:,.0f} tokens"
        case "wall_s":
            return f"{value / 60:.1f} minutes"
        case "gpu_s":
            return f"{value / 60:.1f} GPU minutes"


def _stopped(what: str, limit: float | None) -> BudgetError:
    return BudgetError(
        f"{what} was stopped after {limit:.0f} s, the time that there was for it",
        "give it more: patcher resume --budget-minutes M (or --budget-gpu-minutes M)",
    )


def more_room(room: int, most: int) -> int | None:
    """The room to ask with again after a reply that was cut off, in tokens; None when it was the
    most that the server gives."""
    most = min(most, TOKENS_CEILING)
    return min(2 * room, most) if room < most else None


def _follow_up(model: Model, asked: Asked) -> Request | None:
    """The question to put after a reply that is of no use, if any."""
    again = _again(model, asked)
    if again and isinstance(model, ReplayModel) and not model.holds(again.step):
        return None
    return again


def _again(model: Model, asked: Asked) -> Request | None:
    request, reply = asked.request, asked.reply
    most = model.max_output_tokens if isinstance(model, ApiModel) else TOKENS_CEILING
    room = more_room(request.max_tokens, most)
    if reply.stop_reason == "max_tokens" and room is not None:
        step = f"{request.step}/room-{room}"
        return request.model_copy(update={"step": step, "max_tokens": room})
    if reply.stop_reason == "refusal" and not request.prompt.startswith(REPHRASED):
        step, prompt = f"{request.step}/rephrased", REPHRASED + request.prompt
        return request.model_copy(update={"step": step, "prompt": prompt})
    return None
