"""Asking a model as a step of the run: within the budget, again when it fails, with more room when
its reply was cut off, in other words when it declined."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from patcher.bench import PatcherError, UsageError, WaitingError
from patcher.models import (
    TOKENS_CEILING,
    Model,
    ModelCall,
    ModelError,
    Reply,
    Request,
    Trouble,
)
from patcher.models.api import ApiModel
from patcher.models.batch import Batches
from patcher.models.budget import Budget, time_is_up
from patcher.models.ceilings import Amount
from patcher.models.limits import LimitsFile
from patcher.models.prices import same_model
from patcher.models.repetition import ends_in_a_loop
from patcher.models.replay import ReplayModel
from patcher.models.retry import Clock, TimeUp, pause_s
from patcher.runs.run import Run

CALL_LIMIT_S = 2400.0
"""The longest that one call may take, where there is a ceiling on time."""
LEARNED = "learned"
"""The subject of the note on a limit that a server named."""
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
        self._recalled: list[ApiModel] = []
        """Those whose limits were looked up."""
        self._batches = Batches(budget, self._worst_in_batch, self._clock, self._tell)

    def ask(self, model: Model, request: Request) -> ModelCall:
        """Ask as a step of the run. The question and the answer are stored as they were. A reply
        that was cut off is asked for again with twice the room, unless it ends in a loop. A
        refused question is put once more in other words. Each is a step of its own below
        `request.step`.

        Returns:
            The last question and its reply, with the usage of all replies.

        Raises:
            WaitingError: the answer comes later; of a batch, after `answered` sent it.
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

    def answered(self) -> bool:
        """Send together what was asked for a batch, and wait as long as the models' entries say.
        Returns whether answers have come, so that the same questions are to be asked again."""
        return self._batches.answered()

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
            self._settle(model, asked, worst, took_s)
        return asked

    def _settle(self, model: Model, asked: ModelCall, worst: Amount, took_s: float | None) -> None:
        """Book a reply: its counts, or its worst case where there are none that can be true."""
        reply, usage = asked.reply, asked.reply.usage
        if isinstance(model, ApiModel) and usage.input_tokens is None:
            worst = _at_least(model, asked.request, worst, reply.received_characters or 0)
        tokens = (usage.input_tokens or 0) + (usage.output_tokens or 0)
        known = usage.input_tokens is not None and usage.output_tokens is not None
        usd, unsure_usd = _dollars(model, reply, worst)
        spent = Amount(
            usd=usd,
            tokens=tokens if known else worst.tokens,
            wall_s=worst.wall_s if took_s is None else took_s,
        )
        unknown = Amount(usd=unsure_usd, tokens=0 if known else spent.tokens)
        if isinstance(model, ApiModel):
            self._budget.spend(
                asked.request.step,
                spent,
                unknown,
                model=reply.model,
                price=model.entry.price_source,
                input_tokens=usage.input_tokens or 0,
                output_tokens=usage.output_tokens or 0,
                cached_tokens=usage.cached_tokens or 0,
            )
        else:
            self._budget.spend(asked.request.step, spent)
        for repair in reply.repairs:
            self._tell(f"the reply to {asked.request.step}: {repair}")

    def _tries(self, model: Model, request: Request) -> tuple[Reply, float]:
        """The reply, and the seconds that the try took which gave it."""
        if (reply := self._in_batch(model, request)) is not None:
            return reply, 0.0
        failed: Counter[Trouble] = Counter()
        while True:
            try:
                return self._try(model, request)
            except ModelError as error:
                failed[error.trouble] += 1
                pause = pause_s(error, failed, self._clock.jitter())
                if pause is None:
                    raise
                self._tell(f"{error.message}; asking again in {pause:.0f} s")
            self._budget.spend_time(request.step, "the pause before the next try", pause)
            self._clock.sleep(pause)

    def _in_batch(self, model: Model, request: Request) -> Reply | None:
        """The reply of a batch; None: it is to be asked without one."""
        if not isinstance(model, ApiModel):
            return None
        if not (model.entry.batch or self._batches.holds(request.step)):
            return None
        self._recall(model)
        before = model.max_output_tokens
        try:
            return self._batches.reply(model, request)
        finally:
            self._remember(model, before)

    def _worst_in_batch(self, model: ApiModel, request: Request) -> Amount:
        return Amount(usd=self._worst_usd(model, request), tokens=model.worst_tokens(request))

    def _try(self, model: Model, request: Request) -> tuple[Reply, float]:
        limit = self._reserve(model, request)
        before = model.max_output_tokens if isinstance(model, ApiModel) else None
        begun_s = self._clock.now()
        try:
            reply = self._asked(model, request, limit)
        except WaitingError:
            self._budget.waits(request.step)
            raise
        except BaseException as error:
            worst = self._budget.reserved(request.step)
            if worst is not None:
                free = isinstance(error, PatcherError) and not getattr(error, "charged", False)
                unknown = Amount() if free else Amount(usd=worst.usd, tokens=worst.tokens)
                why = {}
                if isinstance(error, ModelError):
                    why = {"trouble": error.trouble}
                    if isinstance(model, ApiModel) and not free:
                        came = error.received_characters
                        unknown = _at_least(model, request, unknown, came)
                spent = unknown.model_copy(update={"wall_s": self._clock.now() - begun_s})
                self._budget.spend(request.step, spent, unknown, **why)
            if isinstance(error, TimeUp):
                raise time_is_up(f"the call of {model.name}", limit) from None
            raise
        finally:
            self._remember(model, before)
        return reply, self._clock.now() - begun_s

    def _asked(self, model: Model, request: Request, limit: float | None) -> Reply:
        """Ask within the time that there is. Without a ceiling a server still has an end: the HTTP
        client alone would wait for ever while a byte of a header comes now and then."""
        main = threading.current_thread() is threading.main_thread()  # alarms ring there alone
        if limit is not None or not isinstance(model, ApiModel) or not main:
            with self._clock.alarm(limit):
                return model.ask(request)
        try:
            with self._clock.alarm(model.patience_s(request)):
                return model.ask(request)
        except TimeUp:
            raise model.late(request) from None

    def _remember(self, model: Model, before: int | None) -> None:
        """Write down a limit that a server named, for this run, for later ones, and for the person
        who runs it.

        Args:
            before: the room of the model before it was asked, in tokens.
        """
        if not isinstance(model, ApiModel) or before is None or model.max_output_tokens >= before:
            return
        room, named = model.max_output_tokens, model.named
        self._budget.run.note(LEARNED, model=model.name, max_output_tokens=room)
        self._tell(
            f"the server of {model.name} gives a reply at most {room:,} tokens: set "
            f"max_output_tokens = {room} in [models.NAME] of patcher.toml"
        )
        context = named.context if named else None
        try:
            LimitsFile.of(model.entry.address, model.name).keep(None if context else room, context)
        except PatcherError as error:
            self._tell(f"later runs will not know it: {error.message}")

    def _recall(self, model: ApiModel) -> None:
        """Take over, once, what the model's server named earlier in this run or in another one."""
        if any(each is model for each in self._recalled):
            return
        self._recalled.append(model)
        if known := _learned(self._budget.run, model.name):
            model.max_output_tokens = min(model.max_output_tokens, known)
        try:
            earlier = LimitsFile.of(model.entry.address, model.name).read()
        except PatcherError as error:
            self._tell(f"{error.message}; {error.hint}")
            return
        if earlier is None:
            return
        own = "max_output_tokens" in model.entry.model_fields_set  # a person's word counts
        said = []
        if (room := earlier.max_output_tokens) and not own and room < model.max_output_tokens:
            model.max_output_tokens = room
            said.append(f"{room:,} tokens for a reply")
        if earlier.context_tokens:
            model.context_tokens = earlier.context_tokens
            said.append(f"{earlier.context_tokens:,} tokens for prompt and reply")
        if said:
            self._tell(
                f"the server of {model.name} gave at most {' and '.join(said)} on "
                f"{earlier.named_on}, which is kept to (patcher models)"
            )

    def _tell(self, what: str) -> None:
        if self._say:
            self._say(f"  {what}")

    def _reserve(self, model: Model, request: Request) -> float | None:
        """Reserve the worst case of one try; returns the seconds that it may take."""
        if isinstance(model, ApiModel):
            self._recall(model)
        usd = self._worst_usd(model, request)
        if not isinstance(model, ApiModel):  # a file or a recording: no tokens, no time
            self._budget.reserve(request.step, Amount(usd=usd))
            return None
        limit = self._budget.time_limit("a call", CALL_LIMIT_S, ("wall_s",))
        worst = Amount(usd=usd, tokens=model.worst_tokens(request), wall_s=limit or 0.0)
        self._budget.reserve(request.step, worst)
        return limit

    def _worst_usd(self, model: Model, request: Request) -> float:
        usd = model.worst_cost_usd(request)
        if usd is None and self._budget.ceilings.usd is not None:
            raise UsageError(
                f"no price is known for {model.name}, so a budget in dollars cannot be enforced",
                "give its prices in [models.NAME] of patcher.toml, or run without --budget-usd",
            )
        return usd or 0.0


def _dollars(model: Model, reply: Reply, worst: Amount) -> tuple[float, float]:
    """What a reply is booked at, and the part of it of which nobody knows whether it was charged:
    all of it without a price, and what the model that was asked would have cost more than the one
    that says it answered. No server lowers its bill by a name."""
    usage = reply.usage
    if usage.cost_usd is None:
        return worst.usd, worst.usd
    asked_usd = 0.0
    other = not same_model(reply.model, model.name)
    if other and isinstance(model, ApiModel) and (price := model.entry.price):
        asked_usd = price.cost_usd(usage.input_tokens or 0, usage.output_tokens or 0)
    return max(asked_usd, usage.cost_usd), max(asked_usd - usage.cost_usd, 0.0)


def _at_least(model: ApiModel, request: Request, worst: Amount, characters: int) -> Amount:
    """The worst case, and more where more came than was asked for."""
    tokens, usd = model.over_room(request, characters)
    return worst.model_copy(update={"tokens": worst.tokens + tokens, "usd": worst.usd + usd})


def _learned(run: Run, model: str) -> int | None:
    """The most room that this model's server gives, by what it said earlier in the run."""
    found = [
        int(event.data["max_output_tokens"])
        for event in run.events
        if event.kind == "note" and event.step == LEARNED and event.data.get("model") == model
    ]
    return min(found, default=None)


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
    cut_off = reply.stop_reason == "max_tokens" and not ends_in_a_loop(reply.text)
    if cut_off and room is not None:
        step = f"{request.step}/room-{room}"
        return request.model_copy(update={"step": step, "max_tokens": room})
    if reply.stop_reason == "refusal" and not request.prompt.startswith(REPHRASED):
        step, prompt = f"{request.step}/rephrased", REPHRASED + request.prompt
        return request.model_copy(update={"step": step, "prompt": prompt})
    return None
