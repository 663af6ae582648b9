"""Is the patched process still the same model? Compares greedy tokens, and logits over them."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import JsonValue

from patcher.ab import arm_protocol as say
from patcher.ab.arm_process import ArmProcess
from patcher.ab.launcher import ArmLauncher
from patcher.bench import Quality, VerificationError
from patcher.bench.ab import cloze
from patcher.bench.ab.engine_config import overriding, words
from patcher.bench.ab.processes import SHARE_ALONE
from patcher.bench.ab.quality import compare_logits, with_task, without_task
from patcher.bench.engines import ENGINES
from patcher.integrate import Patch

ROUTING_STEPS = 16
QUESTIONS = 10
"""Questions of one command, so that a slow engine replies in time."""
REVERT_STEPS = 256
"""Most greedy tokens per sequence that must be the same before and after."""

Tokens = list[list[int]]
"""[batch][tokens]"""


class ReferenceLogits(NamedTuple):
    """Results of the reference process (higher precision, or the engine without compilation)."""

    logits: torch.Tensor
    """[positions, vocabulary]"""
    how: str
    """How the logits were computed."""
    entropy_pct: float | None
    """Entropy of the routing, in percent."""


class Served(NamedTuple):
    """What one process gave to be compared."""

    logits: torch.Tensor
    """[positions, vocabulary]"""
    answers: torch.Tensor | None
    """Log-likelihoods of the task's choices, [items, choices]; None without a task."""
    alone: torch.Tensor | None = None
    """[positions, vocabulary] of the first sequences, each served by itself; of the first stock
    process, and None for one sequence."""


class QualityCheck:
    """Gets tokens, logits and answers from the processes of one job, and compares them."""

    def __init__(self, launcher: ArmLauncher) -> None:
        self.launcher, self.job = launcher, launcher.job
        self._references: dict[str, ReferenceLogits] = {}
        self._unpatched: dict[str, Served] = {}
        """By arguments, as JSON; for the first tokens that were requested."""
        self.questions = cloze.questions(self.job.workload)
        """The task, or why there is none."""

    def greedy(self, process: ArmProcess) -> Tokens:
        steps = max(min(self.job.workload.output_len, REVERT_STEPS), self.job.quality_steps)
        command = say.Generate(seed=self.job.seed + 1, steps=steps)
        return process.ask(command, say.Generated).tokens

    def logits(
        self, process: ArmProcess, tokens: Tokens, reference: bool = False, alone: bool = False
    ) -> tuple[torch.Tensor, str]:
        """Logits [positions, vocabulary] over the leading tokens, as many as quality uses, and how
        they were computed.
        """
        forced = [row[: self.job.quality_steps + 1] for row in tokens]
        with tempfile.TemporaryDirectory(prefix="patcher-logits-") as folder:
            path = Path(folder) / "logits.npy"
            wrote = process.ask(
                say.Logits(
                    seed=self.job.seed + 1,
                    forced=forced,
                    path=str(path),
                    reference=reference,
                    alone=alone,
                ),
                say.Wrote,
            )
            return torch.from_numpy(np.load(path, allow_pickle=False)), wrote.how

    def answers(self, process: ArmProcess) -> torch.Tensor | None:
        """Log-likelihoods of the task's choices, float64 [items, choices]; None without a task."""
        if isinstance(self.questions, str):
            return None
        found: list[list[float | None]] = []
        for begin in range(0, len(self.questions), QUESTIONS):
            asked = say.Answer(questions=self.questions[begin : begin + QUESTIONS])
            found += process.ask(asked, say.Answered).likelihoods
        rows = [[math.nan if one is None else one for one in each] for each in found]
        return torch.tensor(rows, dtype=torch.float64)

    def served(self, process: ArmProcess, tokens: Tokens, stock: bool = False) -> Served:
        """Logits over these tokens, then the answers; of a stock process also one by one."""
        logits, answers = self.logits(process, tokens)[0], self.answers(process)
        singly = stock and len(tokens) > 1
        alone = self.logits(process, tokens, alone=True)[0] if singly else None
        return Served(logits, answers, alone)

    def reference(self, tokens: Tokens, arguments: Mapping[str, JsonValue]) -> ReferenceLogits:
        """The reference over these tokens; it starts a further process."""
        engine = ENGINES.load(self.job.workload.engine)
        plain = {**arguments, **getattr(engine, "reference_arguments", {})}
        with self.launcher.launch("reference", plain, SHARE_ALONE) as process:
            entropy = process.ask(
                say.AskRouting(seed=self.job.seed, steps=ROUTING_STEPS), say.Entropy
            ).percent
            return ReferenceLogits(*self.logits(process, tokens, reference=True), entropy)

    def quality(
        self,
        patches: Sequence[Patch],
        patched: Served,
        baseline: tuple[Served, Served],
        tokens: Tokens,
    ) -> tuple[Quality, float | None]:
        """Compare the logits and answers of a process with these patches with those of two
        baselines. Also returns the routing's entropy. It starts a further process.

        If the patched arm has another configuration than the baseline, its patches replace code of
        that configuration. Then they are compared with it, unpatched, in one more process, since
        the two configurations may differ by more than a patch may.
        """
        common, arguments = self.launcher.arguments, self.launcher.arguments_of(patches)
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._references:
            self._references[key] = self.reference(tokens, arguments)
        reference = self._references[key]
        how = reference.how
        if arguments != common:
            if key not in self._unpatched:
                with self.launcher.launch("unpatched", arguments, SHARE_ALONE) as process:
                    self._unpatched[key] = self.served(process, tokens, stock=True)
            baseline = self._unpatched[key], self._unpatched[key]
            how += f", all with {words(overriding(arguments, common))}"
        served = (*baseline, patched)
        first, again, ours = (each.logits for each in served)
        alone = baseline[0].alone
        quality = compare_logits(first, again, ours, reference.logits, how, alone)
        if isinstance(self.questions, str):
            return without_task(quality, self.questions), reference.entropy_pct
        answers = [each.answers for each in served if each.answers is not None]
        if len(answers) < len(served):
            raise VerificationError(
                "a process of this comparison has no answers to the task",
                "remove the folder of its process pairs to measure again",
            )
        return with_task(quality, cloze.judge(*answers)), reference.entropy_pct


def identical(before: Tokens, again: Tokens, after: Tokens) -> bool:
    """Whether `after` equals `before` [batch][tokens] up to where `again` differs from it, since
    some engines do not repeat themselves between processes. False if `again` differs at once.
    """
    if not len(before) == len(again) == len(after):
        return False
    shared = 0
    for first, second, third in zip(before, again, after, strict=True):
        both = min(len(first), len(second))
        length = next((at for at in range(both) if first[at] != second[at]), both)
        shared += length
        if third[:length] != first[:length]:
            return False
    return shared > 0
