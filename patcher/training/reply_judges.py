"""Many replies judged side by side, each source once, and what was judged is kept on the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from patcher.bench import SCHEMA_VERSION, Candidate, MissingError, Outcome, Record, load_op, relayed
from patcher.prompting.extract import extract_source
from patcher.tasks.pool import WorkerPool, WorkerReply
from patcher.training.environment import OPTIONS, EnvironmentOptions
from patcher.training.line_file import LineFile
from patcher.training.replies import JudgedReply
from patcher.training.shaping import WRONG, TurnReward
from patcher.training.worker import WorkerVerdict

TRIES = 2
"""How many processes one reply may end before it counts as wrong."""
JUDGEMENT_S = 900.0
"""Longest that one reply may take; its process is replaced then."""
MODULE = "patcher.training.worker"

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
    counts as wrong, and says that it is lost.

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
        self._known: dict[tuple[str, str], JudgedReply] = {}
        for kept in self._file.read() if self._file else []:
            self._known[kept.contract, kept.source] = kept.judged

    def __enter__(self) -> ReplyJudges:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.__exit__()

    def judge(self, asked: Sequence[AskedReply], told: Told = lambda *_: None) -> list[JudgedReply]:
        """The verdicts, in the order of the replies.

        Raises:
            MissingError: every reply of the batch is lost, so that the judge itself is broken.
            PatcherError: as `patcher.judges.reward.judge_for_reward`.
        """
        keys = [self._key(each) for each in asked]
        open_: dict[tuple[str, str], AskedReply] = {
            key: each for key, each in zip(keys, asked, strict=True) if key not in self._known
        }
        found: dict[tuple[str, str], JudgedReply] = {}
        for attempt in range(1, TRIES + 1):
            jobs = {
                key: self._pool.submit("judge", options=self._given, op=each.op, reply=each.reply)
                for key, each in open_.items()
                if key not in found
            }
            try:
                for key, job in jobs.items():
                    told("judging", len(found), len(open_))
                    judged = self._taken(job, open_[key].op, last=attempt == TRIES)
                    if judged is not None:
                        found[key] = judged
                        self._keep(key, judged)
            except BaseException:
                for job in jobs.values():
                    job.cancel()
                raise
        if len(found) > 1 and all(each.lost for each in found.values()):
            raise MissingError(
                f"the judge's process died on each of {len(found)} replies",
                "judge one by hand, and see what it says: patcher evaluate OP FILE --reward",
            )
        return [self._known.get(key) or found[key] for key in keys]

    def _key(self, asked: AskedReply) -> tuple[str, str]:
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

    def _keep(self, key: tuple[str, str], judged: JudgedReply) -> None:
        if judged.lost:
            return  # another process may fare better
        self._known[key] = judged
        if self._file is not None:
            self._file.append([KeptVerdict(contract=key[0], source=key[1], judged=judged)])
