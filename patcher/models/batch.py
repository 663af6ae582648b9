"""Questions that go out together in a batch, and are answered later, perhaps to another process.

The journal says what was sent. The reservation of a question's worst case names its place in a
batch (`tag`, `custom_id`, `digest`). A note says that the batch is about to be sent, another one
how its server calls it. A run that was killed between the two looks for it among the account's
batches, so that nothing is paid twice.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from patcher.bench import BudgetError, PatcherError, UsageError, WaitingError
from patcher.models import ModelError, Reply, Request, Trouble
from patcher.models.api import ApiModel
from patcher.models.batch_endpoint import HINT, BatchLine, BatchResults, BatchState
from patcher.models.batch_questions import BATCH, SentQuestion, sent_questions
from patcher.models.budget import Budget
from patcher.models.ceilings import Amount
from patcher.models.faults import NoBatchError, words_of
from patcher.models.gate import inside
from patcher.models.retry import TRIES, Clock, TimeUp, pause_s

POLL_S = 30.0
"""Between two looks at a batch that is waited for."""
LOOK_LIMIT_S = 1800.0
"""The longest that one look may take, or one reading of results."""
SETTLE_S, SETTLED_S = 60.0, 3600.0
"""How long a batch may be on its way to the list, and when not."""
T = TypeVar("T")


@dataclass
class _Outgoing:
    """A batch that gathers questions."""

    model: ApiModel
    tag: str = field(default_factory=lambda: secrets.token_hex(8))
    asked: dict[str, Request] = field(default_factory=dict)


class Batches:
    """The batches of one run.

    Args:
        budget: pays for them; its run's journal has what was sent.
        worst: the most that a question can take, with the reasons why it may not be asked.
        say: told of what is sent and of what failed.
    """

    def __init__(
        self,
        budget: Budget,
        worst: Callable[[ApiModel, Request], Amount],
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._budget, self._worst = budget, worst
        self._clock, self._say = clock, say
        self._queue: list[_Outgoing] = []
        self._running: dict[str, ApiModel] = {}
        """Batches that are waited for."""
        self._looked: dict[str, BatchState] = {}
        self._results: dict[str, BatchResults] = {}

    def holds(self, step: str) -> bool:
        """Whether the question of this step was sent in a batch and has no answer yet."""
        return step in sent_questions(self._budget.run.events)

    def reply(self, model: ApiModel, request: Request) -> Reply | None:
        """The answer, if it is there. A question that was not sent is kept for `answered`. None: it
        is to be asked without a batch, as its model's entry has none any more.

        Raises:
            WaitingError: it is not.
            BudgetError: the question could cross a ceiling.
            ModelError: it went on failing; and whatever else `ApiModel.ask` raises.
        """
        sent = sent_questions(self._budget.run.events).get(request.step)
        if sent and not any(sent.tag == each.tag for each in self._queue):
            same = (sent.digest, sent.model) == (request.digest, model.name)
            try:
                if same and sent.sending and not sent.batch:
                    sent = self._look_for(model, sent)
                if same and sent.batch:
                    line = self._line(model, sent, sent.batch)
                    return self._read(model, request, sent, line)
            except NoBatchError:
                if model.entry.batch:
                    raise
                self._say(f"{request.step}: its batch is given up, and it is asked again")
            if not (sent.sending or sent.batch):  # killed before it was sent
                self._budget.spend(request.step, Amount(), Amount())
            else:
                if not same:
                    self._say(f"{request.step} changed since it was sent: it is asked again")
                self._book_failure(request.step, charged=True)
        if sent and any(sent.custom_id in each.asked for each in self._queue):
            raise _waiting(model, request.step)
        self._again(model, request)
        return None

    def answered(self) -> bool:
        """Send what was kept, and wait for answers as long as the models' entries say. Returns
        whether one has come, so that the same questions are to be asked again.

        Raises:
            ModelError: a batch may have been sent, or not; the next process finds out.
        """
        for outgoing in self._queue:
            self._send(outgoing)
        self._queue.clear()
        longest = max(
            (60 * each.entry.batch_wait_minutes for each in self._running.values()), default=0.0
        )
        waited, pause = 0.0, POLL_S
        while waited < longest:
            pause = min(pause, longest - waited)
            try:
                self._pause(pause, "waiting for a batch")
                waited, pause = waited + pause, POLL_S
                ended = any(self._state(each, name).ended for name, each in self._running.items())
            except BudgetError as error:
                self._say(f"no longer waiting for a batch: {error.message}")
                return False
            except ModelError as error:  # a server that is down for a while
                pause = max(POLL_S, error.retry_after_s or 0.0)
                self._say(f"{error.message}; the batch is looked at again in {pause:.0f} s")
                continue
            if ended:
                self._running.clear()
                return True
        return False

    def _again(self, model: ApiModel, request: Request) -> None:
        """Keep a question for the next batch; None where its model has none any more."""
        if not model.entry.batch:
            return
        self._enqueue(model, request)
        raise _waiting(model, request.step)

    def _enqueue(self, model: ApiModel, request: Request) -> None:
        outgoing = next((each for each in self._queue if each.model is model), None)
        if outgoing is None:
            outgoing = _Outgoing(model)
        custom_id = f"{outgoing.tag}-{len(outgoing.asked)}"
        self._budget.reserve(
            request.step,
            self._worst(model, request),
            tag=outgoing.tag,
            custom_id=custom_id,
            digest=request.digest,
            model=model.name,
        )
        outgoing.asked[custom_id] = request
        if outgoing not in self._queue:
            self._queue.append(outgoing)

    def _send(self, outgoing: _Outgoing) -> None:
        model, run = outgoing.model, self._budget.run
        run.note(BATCH, tag=outgoing.tag, sending=len(outgoing.asked))
        endpoint = model.batch_endpoint()
        try:
            name = self._patiently(
                lambda: endpoint.create(outgoing.tag, outgoing.asked),
                # a server that fails in itself may have taken it
                lambda error: not error.charged and error.trouble != "server",
            )
        except PatcherError as error:
            maybe = isinstance(error, ModelError) and (error.charged or error.trouble == "server")
            if not maybe:
                for request in outgoing.asked.values():
                    self._budget.spend(request.step, Amount(), Amount())
            raise
        run.note(BATCH, tag=outgoing.tag, id=name)
        self._running[name] = model
        count = len(outgoing.asked)
        self._say(f"{count} question{'s' * (count != 1)} went to {model.name} as the batch {name}")

    def _look_for(self, model: ApiModel, sent: SentQuestion) -> SentQuestion:
        """A question of a batch whose name is not known, once the server was asked for it."""

        def is_ours(name: str, state: BatchState) -> bool:
            found = BatchResults()
            endpoint.read(name, state, sent.sending, sent.is_beside, found)
            if not (found.lines or found.whole):
                raise _broke_off(name)
            return bool(found.lines)

        def find() -> str | None:
            return endpoint.find(sent.tag, sent.sending, sent.since_s, is_ours)

        endpoint, run = model.batch_endpoint(), self._budget.run
        name = self._patiently(find, lambda _: True)
        if name is None and time.time() - sent.since_s < SETTLED_S:
            self._say(f"{model.name} has no such batch; looking again in {SETTLE_S:.0f} s")
            self._pause(SETTLE_S)
            name = self._patiently(find, lambda _: True)
        if name is None:
            run.note(BATCH, tag=sent.tag, sending=0)
            return replace(sent, sending=0)
        run.note(BATCH, tag=sent.tag, id=name)
        return replace(sent, batch=name)

    def _state(self, model: ApiModel, batch: str) -> BatchState:
        """Looked at again until it has ended."""
        known = self._looked.get(batch)
        if known is None:
            endpoint = model.batch_endpoint()
            known = self._patiently(lambda: endpoint.look(batch), lambda _: True)
            if known.ended:
                self._looked[batch] = known
        return known

    def _line(self, model: ApiModel, sent: SentQuestion, batch: str) -> BatchLine:
        if batch in self._running:  # looked at in this round
            raise _not_done(model, batch)
        state = self._state(model, batch)
        if not state.ended:
            self._running[batch] = model
            raise _not_done(model, batch)
        if state.refused:
            return BatchLine(body=state.refused, status=400)
        found = self._results.setdefault(batch, BatchResults())
        if not found.whole and sent.custom_id not in found.lines:
            endpoint = model.batch_endpoint()

            def whole() -> None:
                endpoint.read(batch, state, sent.sending, sent.is_beside, found)
                if not found.whole and sent.custom_id not in found.lines:
                    raise _broke_off(batch)

            self._patiently(whole, lambda _: True)
            if found.strangers:
                self._say(f"{found.strangers} lines of the batch {batch} answer no question of it")
        return found.lines.get(sent.custom_id, BatchLine(gone=state.gone or "missing"))

    def _read(
        self, model: ApiModel, request: Request, sent: SentQuestion, line: BatchLine
    ) -> Reply | None:
        """The reply in a line; what failed and may be asked again goes into the next batch."""
        try:
            if line.gone == "canceled":
                raise UsageError(
                    f"the batch with {request.step} was cancelled",
                    "ask in another one: patcher resume",
                )
            if line.gone == "expired":
                raise ModelError("the batch expired before it was answered", trouble="expired")
            if line.gone:
                raise ModelError("the batch does not answer it", trouble="broken", charged=True)
            return model.reply_in_batch(request, line.status, line.body)
        except PatcherError as error:
            trouble = error.trouble if isinstance(error, ModelError) else None
            charged = getattr(error, "charged", False)
            self._book_failure(request.step, trouble, charged=charged)
            if trouble is None or self._failures(request.step, trouble) >= TRIES[trouble][0]:
                for step in self._failed_alike(sent, line):  # one resume asks them all again
                    self._book_failure(step, trouble, charged=charged)
                raise
            self._say(f"{request.step}: {error.message}; it goes into the next batch")
        self._again(model, request)
        return None

    def _failed_alike(self, sent: SentQuestion, line: BatchLine) -> list[str]:
        """The steps of the same batch that have no reply for the same reason."""
        assert sent.batch is not None
        state, results = self._looked[sent.batch], self._results.get(sent.batch, BatchResults())
        none = BatchLine(gone=state.gone or "missing")
        return [
            step
            for step, each in sent_questions(self._budget.run.events).items()
            if each.tag == sent.tag
            and (state.refused or _alike(line, results.lines.get(each.custom_id, none)))
        ]

    def _book_failure(self, step: str, trouble: Trouble | None = None, *, charged: bool) -> None:
        worst = self._budget.reserved(step) or Amount()
        unknown = Amount(usd=worst.usd, tokens=worst.tokens) if charged else Amount()
        why = {} if trouble is None else {"trouble": str(trouble)}
        self._budget.spend(step, unknown, unknown, **why)

    def _failures(self, step: str, trouble: Trouble) -> int:
        return sum(
            event.kind == "note" and event.step == step and event.data.get("trouble") == trouble
            for event in self._budget.run.events
        )

    def _patiently(self, call: Callable[[], T], again: Callable[[ModelError], bool]) -> T:
        """Call something that costs nothing, again after failures where `again` says so."""
        failed: Counter[Trouble] = Counter()
        main = threading.current_thread() is threading.main_thread()  # alarms ring there alone
        while True:
            left = self._budget.time_limit("a call about a batch", LOOK_LIMIT_S, ("wall_s",))
            begun_s = self._clock.now()
            try:
                with self._clock.alarm((left or LOOK_LIMIT_S) if main else None):
                    return call()
            except TimeUp:
                error = ModelError("the server gave no answer on a batch", trouble="timeout")
                error.charged = True
            except ModelError as caught:
                error = caught
            finally:
                if (took_s := self._clock.now() - begun_s) >= 1:
                    self._budget.spend(BATCH, Amount(wall_s=took_s))
            failed[error.trouble] += 1
            pause = pause_s(error, failed, self._clock.jitter())
            if pause is None or not again(error):
                raise error
            self._say(f"{error.message}; trying again in {pause:.0f} s")
            self._pause(pause)

    def _pause(self, seconds: float, what: str = "the pause before the next try") -> None:
        self._budget.spend_time(BATCH, what, seconds)
        self._clock.sleep(seconds)


def _alike(line: BatchLine, other: BatchLine) -> bool:
    if line.gone or other.gone:
        return line.gone == other.gone
    if not (inside(line.body, "error") and inside(other.body, "error")):
        return False
    return (line.status, words_of(line.body)) == (other.status, words_of(other.body))


def _waiting(model: ApiModel, what: str) -> WaitingError:
    return WaitingError(f"waiting for {model.name}, which answers {what} in a batch", HINT)


def _not_done(model: ApiModel, batch: str) -> WaitingError:
    return WaitingError(f"waiting for {model.name}: its batch {batch} is not done", HINT)


def _broke_off(batch: str) -> ModelError:
    return ModelError(
        f"the results of the batch {batch} broke off",
        "nothing is lost: patcher resume reads them again",
        trouble="broken",
    )
