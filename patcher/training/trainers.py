"""For trainers that sample one reply to a question: questions as rows, and a reward function.

The form is that of TRL's `GRPOTrainer` and `RLOOTrainer` (version 1.16): rows with `prompt`, and
`reward_funcs` that get the replies and the rows' further columns. Nothing here imports a trainer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from patcher.attempts import ReplyFailure
from patcher.bench import Candidate, Language, Outcome, UsageError, load_op
from patcher.bench.judge import JudgeSettings
from patcher.judges import LOCAL
from patcher.judges.languages import judge_hardware
from patcher.judges.reward import RewardResult
from patcher.models.gate import TEXT_CHARACTERS, Cleaner
from patcher.prompting.extract import extract_source
from patcher.prompting.rendering import Prompts
from patcher.training.rewards import MILESTONES, RewardScheme, judged


def questions(
    ops: Sequence[str], language: Language = Language.CPP, where: str = LOCAL
) -> list[dict[str, Any]]:
    """A row for each op: `prompt`, as the messages that the loop asks first, and `op`.

        Dataset.from_list(questions(["silu_and_mul", "rms_norm"]))

    Raises:
        MissingError: this machine has no device for the language.
    """
    hardware = judge_hardware(where, language)
    kind = "cpu" if language.traits.device == "cpu" else "cuda"
    rows = []
    for name in ops:
        op = load_op(name)
        prompts = Prompts(op, language, hardware, op.sweep(kind))
        messages = [
            {"role": "system", "content": prompts.system("generate")},
            {"role": "user", "content": prompts.generate(None)},
        ]
        rows.append({"prompt": messages, "op": name})
    return rows


class JudgedReply(NamedTuple):
    """What a reply came to."""

    reward: float
    outcome: str
    """Of the judge, or `generation_failure`."""


class RewardFunction:
    """What the judge's verdicts on replies are worth.

        trainer = GRPOTrainer(model=..., reward_funcs=RewardFunction(), train_dataset=...)

    Args:
        language: of the kernels.
        scheme: what a verdict is worth.
        where: who judges, as `--judge` names it.
        settings: of the judge.
        at_once: kernels that are judged at a time: more than one only where the judge has as many
            devices, as `ray` may.

    Attributes:
        outcomes: how many replies came to what, of the judge's outcomes or `generation_failure`;
            `guard_violation` are the tricks that it caught.
    """

    __name__ = "patcher"  # what TRL calls the reward in its log

    def __init__(
        self,
        language: Language = Language.CPP,
        *,
        scheme: RewardScheme = MILESTONES,
        where: str = LOCAL,
        settings: JudgeSettings | None = None,
        at_once: int = 1,
    ) -> None:
        if at_once < 1:
            raise UsageError(f"{at_once} at a time judges nothing", "say 1 or more")
        kind = "cpu" if language.traits.device == "cpu" else "cuda"
        self.language, self.scheme, self.where = language, scheme, where
        self.settings = settings or JudgeSettings(device=kind)
        self.at_once = at_once
        self.outcomes: Counter[str] = Counter()
        self._known: dict[str, RewardResult] = {}
        self._one = threading.Lock()

    def __call__(
        self, completions: Sequence[Any], op: Sequence[str], **columns: Any
    ) -> list[float]:
        """The reward of each reply.

        Args:
            completions: texts, or lists of messages of which the last is the reply.
            op: of each, its op.
            columns: of the trainer; not used.

        Raises:
            PatcherError: the judge cannot judge here.
        """
        found = [self._kernel(reply, name) for reply, name in zip(completions, op, strict=True)]
        new = {
            one.digest: one
            for one in found
            if isinstance(one, Candidate) and one.digest not in self._known
        }
        with ThreadPoolExecutor(self.at_once) as pool:
            for digest, result in zip(new, pool.map(self._judged, new.values()), strict=True):
                self._known[digest] = result
        return [self._reward(one).reward for one in found]

    def judge(self, reply: str, op: str) -> JudgedReply:
        """One reply; from several threads one at a time.

        Raises:
            PatcherError: the judge cannot judge here.
        """
        found = self._kernel(reply, op)
        with self._one:
            if isinstance(found, Candidate) and found.digest not in self._known:
                self._known[found.digest] = self._judged(found)
            return self._reward(found)

    def _kernel(self, reply: Any, op: str) -> Candidate | ReplyFailure:
        text = reply if isinstance(reply, str) else reply[-1]["content"]
        source = extract_source(Cleaner("").text(text[:TEXT_CHARACTERS]), self.language, op)
        if isinstance(source, ReplyFailure):
            return source
        return Candidate(op=op, language=self.language, source=source)

    def _judged(self, candidate: Candidate) -> RewardResult:
        return judged(candidate, self.scheme, self.settings, self.where)

    def _reward(self, found: Candidate | ReplyFailure) -> JudgedReply:
        if isinstance(found, ReplyFailure):
            one = JudgedReply(self.scheme.unreadable, Outcome.GENERATION_FAILURE.value)
        else:
            result = self._known[found.digest]
            last = list(result.evaluations.values())[-1]
            one = JudgedReply(self.scheme.value(result), last.outcome.value)
        self.outcomes[one.outcome] += 1
        return one
