"""The agent loop on one op as an environment of several turns, as trainers want it.

What asks is the loop that `patcher optimize` runs, with the same prompts and feedback: errors of
the compiler, mismatches, timings. The trainer's model takes the place of the language model, and
nobody advises it. An episode is a run on disk, which can be read, recorded and replayed as any
other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from patcher.agent import run_loop
from patcher.attempts import Attempt, LoopResult
from patcher.bench import (
    Candidate,
    Evaluation,
    Language,
    Op,
    Record,
    UsageError,
    WaitingError,
    load_op,
)
from patcher.bench.judge import JudgeSettings
from patcher.judges import LOCAL
from patcher.judges.languages import judge_hardware
from patcher.judges.reward import RewardResult
from patcher.models import Reply, Request, Usage
from patcher.models.gate import TEXT_CHARACTERS, Cleaner
from patcher.plan import RunPlan
from patcher.runs.run import Run
from patcher.training.rewards import MILESTONES, RewardScheme, judged


class Message(Record):
    """Of a chat."""

    role: Literal["system", "user"]
    content: str


class Turn(Record):
    """What a reply came to."""

    reward: float
    outcome: str
    """Of the judge, or `generation_failure`: the reply holds no kernel."""
    why: str
    done: bool
    question: tuple[Message, ...] = ()
    """The next, whole: it holds what was tried, so that no earlier message is needed. Empty at the
    end."""
    digest: str | None = None
    """Of the kernel."""


class KernelEnvironment:
    """One episode at a time.

        env = KernelEnvironment("fused_add_rms_norm", folder=Path("episodes"), turns=3)
        question, done = env.reset(), False
        while not done:
            turn = env.step(policy(question))
            question, done = turn.question, turn.done

    Args:
        op: an op, or its name.
        folder: where episodes are kept, each a run.
        turns: kernels that are asked for, at most.
        scheme: what a verdict is worth.
        where: who judges, as `--judge` names it.
        settings: of the judge.
    """

    def __init__(
        self,
        op: str | Op,
        *,
        folder: Path,
        language: Language = Language.CPP,
        turns: int = 3,
        scheme: RewardScheme = MILESTONES,
        where: str = LOCAL,
        settings: JudgeSettings | None = None,
    ) -> None:
        if turns < 1:
            raise UsageError(f"{turns} turns ask for nothing", "say 1 or more")
        self.op = load_op(op) if isinstance(op, str) else op
        self.folder, self.language, self.turns = folder, language, turns
        self.scheme, self.where = scheme, where
        kind = "cpu" if language.traits.device == "cpu" else "cuda"
        self.settings = settings or JudgeSettings(device=kind)
        self._hardware = judge_hardware(where, language, self.settings.threads)
        self._policy = _Policy()
        self._run: Run | None = None
        self._found: dict[str, RewardResult] = {}
        self._before = 0

    def reset(self) -> tuple[Message, ...]:
        """Begin an episode; returns the first question."""
        self.close()
        self._policy = _Policy()
        self._before = 0
        plan = RunPlan(op=self.op.name, language=self.language, whole=False)
        settings = {"plan": plan.model_dump(mode="json"), "iterations": self.turns}
        self._run = Run.create(self.folder, command="training", settings=settings)
        result = self._advance()
        assert result is None, "no loop ends before it has asked"
        return self._question()

    def step(self, reply: str) -> Turn:
        """Judge what a reply holds.

        Raises:
            UsageError: no episode is open.
            WaitingError: the judge is remote, and its verdict has not come; the same call goes on.
            PatcherError: the judge cannot judge here.
        """
        if self._run is None or self._policy.asked is None:
            raise UsageError("no episode is open", "call reset first")
        text = Cleaner("").text(reply[:TEXT_CHARACTERS])
        self._policy.replies[self._policy.asked.step] = text
        result = self._advance()
        attempts = self._attempts(result)
        [attempt] = attempts[self._before :]
        self._before = len(attempts)
        found = self._found.get(attempt.digest or "")
        if result is not None:
            self._policy.asked = None
        return Turn(
            reward=self.scheme.value(found) if found else self.scheme.unreadable,
            outcome=attempt.outcome.value,
            why=found.reward.why if found else attempt.detail,
            done=result is not None,
            question=() if result is not None else self._question(),
            digest=attempt.digest,
        )

    def close(self) -> None:
        """End the episode; its run stays."""
        if self._run is not None:
            self._run.close()
        self._run = None

    def _advance(self) -> LoopResult | None:
        """Go on until the loop asks; what it found, if it ended."""
        assert self._run is not None
        asked, self._policy.asked = self._policy.asked, None
        try:
            return run_loop(
                self._run,
                self.op,
                self.language,
                self._policy,
                self._judge,
                self.turns,
                self._hardware,
                # a policy writes kernels; what an adviser would say is not its reply
                without=("analyse", "diagnose"),
            )
        except WaitingError:
            if self._policy.asked is None:  # the judge's, not the policy's
                self._policy.asked = asked
                raise
            return None

    def _judge(self, candidate: Candidate) -> Evaluation:
        assert self._run is not None
        found = judged(candidate, self.scheme, self.settings, self.where, self._run.id)
        self._found[candidate.digest] = found
        # feedback is of what failed, else against the strongest that was judged
        return min(found.evaluations.values(), key=lambda one: one.geomean_speedup or 0.0)

    def _attempts(self, result: LoopResult | None) -> list[Attempt]:
        if result is not None:
            return list(result.iterations)
        assert self._run is not None
        files = self._run.path.glob(f"ops/{self.op.name}/*/attempt.json")
        found = [Attempt.model_validate_json(file.read_bytes()) for file in files]
        return sorted(found, key=lambda attempt: attempt.iteration)

    def _question(self) -> tuple[Message, ...]:
        asked = self._policy.asked
        assert asked is not None
        return (
            Message(role="system", content=asked.system),
            Message(role="user", content=asked.prompt),
        )


class _Policy:
    """The trainer's model as the loop sees it."""

    name = "policy"

    def __init__(self) -> None:
        self.replies: dict[str, str] = {}
        self.asked: Request | None = None

    def worst_cost_usd(self, request: Request) -> float | None:
        return 0.0

    def ask(self, request: Request) -> Reply:
        """Raises: WaitingError: the trainer has not answered this question."""
        text = self.replies.get(request.step)
        if text is None:
            self.asked = request
            raise WaitingError("waiting for the trainer's model", "call step with its reply")
        return Reply(
            text=text,
            model=self.name,
            usage=Usage(),
            stop_reason="end_turn",
            source="exchange",
            prompt_digest=request.digest,
        )
