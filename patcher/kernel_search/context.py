"""What a run's loop on one op carries from its user and from earlier runs: levers, a score, memory.
All of it is as it was when the run began."""

from __future__ import annotations

from collections.abc import Callable

from patcher.attempts import LoopResult
from patcher.attempts.history import RequestRound
from patcher.bench import Language, Op
from patcher.bench.judge import TripwirePolicy
from patcher.kernel_search.memory import learn_from_run, recall_for_run
from patcher.levers.load import Levers, load_levers
from patcher.levers.scoring import Scorer
from patcher.memory import MemoryText, open_memory
from patcher.models import ModelCall, Role
from patcher.plan import ProfileFromFile
from patcher.runs.run import Run

MACHINE_INDEPENDENT = (ModelCall, RequestRound, Levers, MemoryText, ProfileFromFile)
"""The records of a run that do not depend on its machine: questions, the replies that were paid
for, and what the user and earlier runs gave the run to begin with."""


def run_levers(run: Run) -> Levers:
    """The levers of a run: read once, when it begins.

    Raises:
        UsageError: a file that the settings name cannot be read or sent.
    """
    return run.step("levers", lambda: load_levers(run.config.settings), Levers)


class RunContext:
    """For one op.

    `kind` is the kind of device that candidates are timed on here; None when they are judged
    elsewhere.

    Attributes:
        policy: what the judge refuses on sight.
        score: the user's own measure, if there is one.

    Raises:
        UsageError: a file of the levers or of the memory cannot be read.
    """

    def __init__(self, run: Run, op: Op, language: Language, kind: str | None) -> None:
        settings = run.config.settings
        self._run, self._op = run, op
        self._levers = run_levers(run)
        self._memory = open_memory(settings.get("memory", "off"))
        self._earlier = recall_for_run(run, self._memory, op, language, kind).text
        self.policy: TripwirePolicy = self._levers.tripwires.for_op(op.name)
        self.score = Scorer.of(run, settings)

    def extra(self, role: Role, iteration: int) -> str:
        """Text for a question, which may be cut."""
        return self._levers.extra(self._op.name, role, iteration, self._earlier)

    def adapt(self, role: Role, iteration: int, prompt: str) -> str:
        """The prompt that is sent."""
        return self._levers.adapt(self._op.name, role, iteration, prompt)

    def learn(self, found: LoopResult, say: Callable[[str], None]) -> None:
        """Remember what the loop tried."""
        learn_from_run(self._run, self._memory, self._op, found, say)
