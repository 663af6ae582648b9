"""Many replies judged side by side, each source once, and what was judged is kept on the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from patcher.bench import (
    SCHEMA_VERSION,
    BudgetError,
    BusyError,
    Candidate,
    MissingError,
    Outcome,
    Record,
    load_op,
    relayed,
)
from patcher.prompting.extract import extract_source
from patcher.tasks.pool import WorkerPool, WorkerReply
from patcher.training.environment import OPTIONS, EnvironmentOptions, KernelEnvironment, Turn
from patcher.training.folder import Deadline
from patcher.training.line_file import LineFile
from patcher.training.replies import JudgedReply
from patcher.training.shaping import WRONG, TurnReward
from patcher.training.worker import WorkerVerdict

TRIES = 2
"""How many processes one reply may end before it counts as wrong."""
JUDGEMENT_S = 900.0
"""Longest that one reply may take; its process is replaced then."""
BUSY_WAITS_S = (30.0, 120.0)
"""Waits after which a reply is judged again whose machine was too busy; after that, it is not."""
MODULE = "patcher.training.worker"

_Key = tuple[str, str]
"""Digests of the op and of the candidate."""

Told = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


class AskedReply(NamedTuple):
    """What is to be judged."""

    op: str
    reply: str


class KeptVerdict(Record):
    """A verdict on a source: a line of `verdicts.jsonl`."""

    schema_version: int = SCHEMA_VERSION
    contract: str
    """`Op.digest`."""
    source: str
    """Its `Candidate.digest`; `?` and the reason where the reply held none."""
    judged: JudgedReply


class ReplyJudges:
    """Judges batches of replies in several processes; a context manager.

    A local judge of a GPU is alone on it while it checks and times; builds and starts overlap. A
    process that dies is replaced and its reply judged again; a reply that ends `TRIES` processes
    counts as wrong, and says that it is lost. Where a machine is too busy to time one, it is judged
    again after `BUSY_WAITS_S`.

    Args:
        options: of the environment; `turns` does not matter.
        workers: processes. With a judge on a cluster, the replies that are there at once.
        store: keeps verdicts from one process to the next; one file is for one set of options.
    """

    def __init__(
        self,
        options: EnvironmentOptions,
        workers: int,
        store: Path | None = None,
        module: str = MODULE,
    ) -> None:
        self.options = options
        self._given = OPTIONS.dump_python(options, mode="json")
        self._pool = WorkerPool(workers, JUDGEMENT_S, module)
        self._file = LineFile(store, KeptVerdict) if store else None
        self._known: dict[_Key, JudgedReply] = {}
        for kept in self._file.read() if self._file else []:
            self._known[kept.contract, kept.source] = kept.judged

    def __enter__(self) -> ReplyJudges:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.__exit__()

    def judge(
        self,
        asked: Sequence[AskedReply],
        told: Told = lambda *_: None,
        deadline: Deadline | None = None,
    ) -> list[JudgedReply]:
        """The verdicts, in the order of the replies. What was judged before an error is kept.

        Raises:
            BudgetError: the time limit came first.
            BusyError: a machine was too busy for a reply, each time that it was judged.
            MissingError: every reply of the batch is lost, so that the judge itself is broken.
            PatcherError: as `patcher.judges.reward.judge_for_reward`.
        """
        deadline = deadline or Deadline(None)
        found = self._judged(asked, told, deadline, waits=deadline)
        verdicts = [each for each in found if isinstance(each, JudgedReply)]
        for each in found:
            if isinstance(each, BusyError):
                raise _time_is_up(len(verdicts), len(found)) if deadline.hit else each
        return verdicts

    def judge_most(
        self, asked: Sequence[AskedReply], told: Told, deadline: Deadline
    ) -> list[JudgedReply | BusyError]:
        """The verdicts, or why there is none: a machine was too busy, each time that the reply was
        judged. The time limit ends no judgement, but what it does not leave time for is not begun.

        Raises:
            MissingError, PatcherError: as `judge`.
        """
        return self._judged(asked, told, Deadline(None), waits=deadline)

    def _judged(
        self, asked: Sequence[AskedReply], told: Told, deadline: Deadline, waits: Deadline
    ) -> list[JudgedReply | BusyError]:
        keys = [self._key(each) for each in asked]
        open_ = {key: each for key, each in zip(keys, asked, strict=True) if key not in self._known}
        found: dict[_Key, JudgedReply] = {}
        busy: dict[_Key, BusyError] = {}
        for wait_s in (*BUSY_WAITS_S, None):
            busy = self._round(open_, found, told, deadline)
            if not busy or wait_s is None or not waits.leaves(wait_s):
                break
            told("waiting: the judge's machine is busy", len(found), len(open_))
            time.sleep(wait_s)
        if len(found) > 1 and all(each.lost for each in found.values()):
            raise MissingError(
                f"the judge's process died on each of {len(found)} replies",
                "judge one by hand, and see what it says: patcher evaluate OP FILE --reward",
            )
        return [self._known.get(key) or found.get(key) or busy[key] for key in keys]

    def _round(
        self,
        open_: dict[_Key, AskedReply],
        found: dict[_Key, JudgedReply],
        told: Told,
        deadline: Deadline,
    ) -> dict[_Key, BusyError]:
        """Judge what is not found yet, once; those that a machine was too busy for."""
        busy: dict[_Key, BusyError] = {}
        for attempt in range(1, TRIES + 1):
            jobs = {
                self._pool.submit("judge", options=self._given, op=each.op, reply=each.reply): key
                for key, each in open_.items()
                if key not in found and key not in busy
            }
            told("judging", len(found), len(open_))
            try:
                for job in as_completed(jobs, deadline.left_s()):
                    key = jobs[job]
                    try:
                        judged = self._taken(job, open_[key].op, last=attempt == TRIES)
                    except BusyError as error:
                        busy[key] = error
                        continue
                    if judged is not None:
                        found[key] = judged
                        self._keep(key, judged)
                        told("judging", len(found), len(open_))
            except TimeoutError:
                deadline.hit = True
                raise _time_is_up(len(found), len(open_)) from None
            finally:
                for job in jobs:
                    job.cancel()
        return busy

    def _key(self, asked: AskedReply) -> _Key:
        """Replies are the same where the judge would be given the same."""
        source = extract_source(asked.reply, self.options.language, asked.op)
        if not isinstance(source, str):
            return load_op(asked.op).digest, f"?{source.detail}"
        candidate = Candidate(op=asked.op, language=self.options.language, source=source)
        return load_op(asked.op).digest, candidate.digest

    def _taken(self, job: Future[WorkerReply], op: str, last: bool) -> JudgedReply | None:
        """The verdict; None where the process died and there is another try."""
        reply = job.result()
        if reply.result is None:
            return self._lost(op, reply.why) if last else None
        verdict = WorkerVerdict.model_validate(reply.result)
        if verdict.error is not None:
            raise relayed(verdict.error)
        return verdict.judged

    def _lost(self, op: str, why: str) -> JudgedReply:
        said = f"the judge's process {why}"
        return JudgedReply(
            op=op,
            digest=None,
            outcome=Outcome.RUNTIME_ERROR,
            reward=TurnReward(value=WRONG, why=said, shaping=self.options.shaping),
            lost=True,
        )

    def _keep(self, key: _Key, judged: JudgedReply) -> None:
        if judged.lost:
            return  # another process may fare better
        self._known[key] = judged
        if self._file is not None:
            self._file.append([KeptVerdict(contract=key[0], source=key[1], judged=judged)])


def step_patiently(environment: KernelEnvironment, reply: str) -> Turn:
    """As `environment.step`, again after each of `BUSY_WAITS_S` where a machine is too busy."""
    for wait_s in BUSY_WAITS_S:
        with suppress(BusyError):
            return environment.step(reply)
        time.sleep(wait_s)
    return environment.step(reply)


def _time_is_up(done: int, total: int) -> BudgetError:
    return BudgetError(
        f"the time limit came after {done} of {total} replies were judged, which are saved",
        "give the same command again",
    )
