"""Asking a model as a step of the run: within the budget, again when it fails, with more room when
its reply was cut off, in other words when it declined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from patcher.bench import PatcherError, UsageError
from patcher.models import TOKENS_CEILING, Model, ModelCall, ModelError, Reply, Request, Trouble
from patcher.models.api import ApiModel
from patcher.models.budget import Budget, time_is_up
from patcher.models.ceilings import Amount
from patcher.models.replay import ReplayModel
from patcher.models.retry import Clock, TimeUp, pause_s

CALL_LIMIT_S = 2400.0
"""The longest that one call may take, where there is a ceiling on time."""
REPHRASED = (
    "This is ordinary performance engineering: a kernel for one numerical operation of an open "
    "model, whose source the user owns. It is compiled, tested and timed on the user's own machine "
    "in a sandbox. Please answer the request.\n\n"
)
"""Put before a prompt that a model declined."""


class ModelClient:
    """Asks models for one run, each question once, ever.

    Args:
        budget: pays for the calls.
        clock: time and chance; a test gives its own.
        say: told of calls that failed and are tried again.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        clock: Clock | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._budget = budget
        self._clock = clock or Clock()
        self._say = say

    def ask(self, model: Model, request: Request) -> ModelCall:
        """Ask as a step of the run. The question and the answer are stored as they were. A reply
        that was cut off is asked for again with twice the room, a refused question is put once
        more in other words, each as a step of its own below `request.step`.

        Returns:
            The last question and its reply, with the usage of all replies.

        Raises:
            BudgetError: the call could cross a ceiling, or the provider's account is empty.
            UsageError: a ceiling is set on money and the model's price is unknown.
            ModelError: it went on failing; and whatever else `model.ask` raises.
        """
        asked = self._step(model, request)
        usage = asked.reply.usage
        while again := _follow_up(model, asked):
            asked = self._step(model, again)
            usage += asked.reply.usage
        return asked.model_copy(update={"reply": asked.reply.model_copy(update={"usage": usage})})

    def _step(self, model: Model, request: Request) -> ModelCall:
        """One question; what it took is settled once the reply is safe on the disk: a kill before
        that leaves the reservation."""
        took_s: float | None = None

        def tries() -> ModelCall:
            nonlocal took_s
            reply, took_s = self._tries(model, request)
            return ModelCall(request=request, reply=reply)

        asked = self._budget.run.step(request.step, tries, ModelCall)
        if (worst := self._budget.reserved(request.step)) is not None:
            usage = asked.reply.usage
            known = usage.input_tokens is not None and usage.output_tokens is not None
            tokens = (usage.input_tokens or 0) + (usage.output_tokens or 0)
            spent = Amount(
                usd=worst.usd if usage.cost_usd is None else usage.cost_usd,
                tokens=tokens if known else worst.tokens,
                wall_s=worst.wall_s if took_s is None else took_s,
            )
            self._budget.spend(request.step, spent)
        return asked

    def _tries(self, model: Model, request: Request) -> tuple[Reply, float]:
        """The reply, and the seconds that the try took which gave it."""
        failed: Counter[Trouble] = Counter()
        while True:
            try:
                return self._try(model, request)
            except ModelError as error:
                failed[error.trouble] += 1
                pause = pause_s(error, failed, self._clock.jitter())
                if pause is None:
                    raise
                if self._say:
                    self._say(f"  {error.message}; asking again in {pause:.0f} s")
            self._budget.spend_time(request.step, "the pause before the next try", pause)
            self._clock.sleep(pause)

    def _try(self, model: Model, request: Request) -> tuple[Reply, float]:
        limit = self._reserve(model, request)
        begun_s = self._clock.now()
        try:
            with self._clock.alarm(limit):
                reply = model.ask(request)
        except BaseException as error:
            worst = self._budget.reserved(request.step)
            if worst is not None:
                free = isinstance(error, PatcherError) and not getattr(error, "charged", False)
                took_s = self._clock.now() - begun_s
                spent = Amount() if free else Amount(usd=worst.usd, tokens=worst.tokens)
                why = {"trouble": error.trouble} if isinstance(error, ModelError) else {}
                self._budget.spend(request.step, spent.model_copy(update={"wall_s": took_s}), **why)
            if isinstance(error, TimeUp):
                raise time_is_up(f"the call of {model.name}", limit) from None
            raise
        return reply, self._clock.now() - begun_s

    def _reserve(self, model: Model, request: Request) -> float | None:
        """Reserve the worst case of one try; returns the seconds that it may take."""
        usd = model.worst_cost_usd(request)
        if usd is None and self._budget.ceilings.usd is not None:
            raise UsageError(
                f"no price is known for {model.name}, so a budget in dollars cannot be enforced",
                "give its prices in [models.NAME] of patcher.toml, or run without --budget-usd",
            )
        if not isinstance(model, ApiModel):  # a file or a recording: no tokens, no time
            self._budget.reserve(request.step, Amount(usd=usd or 0.0))
            return None
        limit = self._budget.time_limit("a call", CALL_LIMIT_S, ("wall_s",))
        tokens = model.worst_tokens(request)
        worst = Amount(usd=usd or 0.0, tokens=tokens, wall_s=limit or 0.0)
        self._budget.reserve(request.step, worst)
        return limit


def more_room(room: int, most: int) -> int | None:
    """The room to ask with again after a reply that was cut off, in tokens; None when it was the
    most that the server gives."""
    most = min(most, TOKENS_CEILING)
    return min(2 * room, most) if room < most else None


def _follow_up(model: Model, asked: ModelCall) -> Request | None:
    """The question to put after a reply that is of no use, if any."""
    again = _again(model, asked)
    if again and isinstance(model, ReplayModel) and not model.holds(again.step):
        return None
    return again


def _again(model: Model, asked: ModelCall) -> Request | None:
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
