"""The environment: a task is asked for, replies are judged, and each turn says what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import Field, TypeAdapter

from patcher.attempts import ReplyFailure
from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Evaluation,
    Language,
    Op,
    Outcome,
    Record,
    UsageError,
    load_op,
)
from patcher.bench.judge import JudgeSettings
from patcher.judges.languages import judge_device_kind, judge_hardware
from patcher.judges.reward import AGAINST, RewardResult, judge_for_reward
from patcher.prompting.extract import extract_source
from patcher.prompting.quoting import clip, quote
from patcher.prompting.rendering import Prompts
from patcher.prompting.tables import counters_table, timing_table
from patcher.training.shaping import WRONG, Shaping, TurnReward, shaped

JudgeReply = Callable[[Candidate, JudgeSettings], RewardResult]


@dataclass(frozen=True)
class EnvironmentOptions:
    """What is asked for, and how replies are judged."""

    language: Language = Language.CUDA
    turns: int = 3
    """Replies in an episode; a reward of 3 ends it early."""
    shaping: Shaping = field(default_factory=Shaping)
    judge: str = "local"
    """`local`, `exchange:DIR` or `ray[:ADDRESS][@GPU]`."""
    against: tuple[str, ...] = AGAINST
    """Baselines, each a judgement of its own; fewer cost less and cannot give all milestones."""
    counters: bool = False
    """Whether right kernels are profiled, for observations and `Shaping.share_weight`."""
    threads: int | None = None
    pairs: int = 6
    """Most pairs of timed blocks per point."""
    points: int | None = 1
    """Most points of the sweep that are timed; correctness is checked at all."""


OPTIONS = TypeAdapter(EnvironmentOptions)
"""Options as JSON, for other processes."""


class Turn(Record):
    """What one reply led to."""

    schema_version: int = SCHEMA_VERSION
    op: str
    number: int
    """From 1."""
    observation: str
    """For the next message to the model."""
    reward: TurnReward
    done: bool
    """Whether the episode has ended."""
    failure: ReplyFailure | None = None
    """Why the reply held no source."""
    evaluations: dict[str, Evaluation] = Field(default_factory=dict)
    """By baseline."""


class KernelEnvironment:
    """One episode at a time: `reset(op)` gives the prompt, `step(reply)` the turn.

    The judge decides alone what a reply is worth; a candidate runs in its sandbox and nowhere else.
    A source is judged once in the life of an environment. Ops are those of the library and of
    `$PATCHER_OPS`, where a folder of tasks has its `ops/`.
    """

    def __init__(
        self, options: EnvironmentOptions | None = None, judge: JudgeReply | None = None
    ) -> None:
        """Make an environment.

        Args:
            options: what is asked for.
            judge: gives verdicts; None: the judge that the options name.
        """
        self.options = options or EnvironmentOptions()
        self._judge = judge or self._judged
        self._known: dict[tuple[str, str], RewardResult] = {}
        self._op: Op | None = None
        self._number = 0
        self._done = True

    @property
    def done(self) -> bool:
        """Whether no episode is open."""
        return self._done

    def reset(self, op: str) -> str:
        """Begin an episode on an op; the prompt.

        Raises:
            UsageError: no such op, or it has no sweep for the judge's device.
        """
        return self._prompts(self.begin(op)).generate(None)

    def begin(self, op: str) -> Op:
        """Begin an episode whose prompt is there already.

        Raises:
            UsageError: no such op.
        """
        self._op, self._number, self._done = load_op(op), 0, False
        return self._op

    def step(self, reply: str) -> Turn:
        """Judge a reply.

        Raises:
            UsageError: no episode has begun, or it has ended.
            PatcherError: as `patcher.judges.reward.judge_for_reward`.
        """
        op, options = self._op, self.options
        if op is None or self._done:
            raise UsageError("the episode has ended", "reset(op) begins another")
        self._number += 1
        self._done = self._number >= options.turns
        source = extract_source(reply, options.language, op.name)
        if isinstance(source, ReplyFailure):
            why = f"generation failure: {source.detail}"
            return Turn(
                op=op.name,
                number=self._number,
                observation=f"Your reply could not be used: {source.detail}.\n",
                reward=TurnReward(value=WRONG, why=why, shaping=options.shaping),
                done=self._done,
                failure=source,
            )
        candidate = Candidate(op=op.name, language=options.language, source=source)
        key = (op.digest, candidate.digest)
        if key not in self._known:
            try:
                self._known[key] = self._judge(candidate, self._settings())
            except BaseException:  # the turn is not over: the reply can be judged again
                self._number, self._done = self._number - 1, False
                raise
        judged = self._known[key]
        self._done = self._done or judged.reward.value == 3
        return Turn(
            op=op.name,
            number=self._number,
            observation=self._observation(op, judged),
            reward=shaped(judged, options.shaping),
            done=self._done,
            evaluations=judged.evaluations,
        )

    def _settings(self) -> JudgeSettings:
        options = self.options
        return JudgeSettings(
            device=judge_device_kind(options.judge, options.language),
            threads=options.threads,
            pairs=options.pairs,
            points=options.points,
        )

    def _judged(self, candidate: Candidate, settings: JudgeSettings) -> RewardResult:
        return judge_for_reward(
            self.options.judge,
            candidate,
            settings,
            f"training.{candidate.digest}",  # which is of the op, too
            lambda *_: None,
            self.options.against,
            self.options.counters,
        )

    def _prompts(self, op: Op) -> Prompts:
        options = self.options
        hardware = judge_hardware(options.judge, options.language, options.threads)
        device = judge_device_kind(options.judge, options.language)
        return Prompts(op, options.language, hardware, op.sweep(device))

    def _observation(self, op: Op, judged: RewardResult) -> str:
        """Outcome, failed checks and compiler output, or timings and counters."""
        parts = [f"Outcome: {judged.reward.why}.\n"]
        for baseline, found in judged.evaluations.items():
            if not found.right:
                parts += [
                    f"Failed check `{e.name}`:\n{quote(e.detail)}\n" for e in found.failed_checks
                ]
                head = found.outcome is Outcome.COMPILATION_FAILURE
                if log := clip(found.log, head=head):
                    parts.append(f"Output:\n{quote(log)}\n")
                continue
            sweep = op.sweep(judge_device_kind(self.options.judge, self.options.language))
            parts.append(f"Against `{baseline}`:\n\n{timing_table(op, sweep, found)}\n")
            if counters := counters_table(found.counters):
                parts.append(f"Hardware counters (Nsight Compute):\n\n{counters}\n")
        parts.append("Reply with the whole improved source file in one code block.\n")
        return "\n".join(parts)
