"""Is the patched process still the same model? By greedy tokens, and by logits over them."""

from __future__ import annotations

import json
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
from patcher.bench import Quality
from patcher.bench.ab import cloze
from patcher.bench.ab.engine_config import overriding, words
from patcher.bench.ab.processes import SHARE_ALONE
from patcher.bench.ab.quality import compare_logits
from patcher.bench.engines import ENGINES
from patcher.integrate import Patch

ROUTING_STEPS = 16
REVERT_STEPS = 256
"""Greedy tokens a sequence, at most, that must be the same before and after."""

Tokens = list[list[int]]
"""[batch][tokens]"""


class ReferenceLogits(NamedTuple):
    """What higher precision or the engine without compilation says, of a process of its own."""

    logits: torch.Tensor
    """[positions, vocabulary]"""
    how: str
    """How they were computed."""
    entropy_pct: float | None
    """How spread out the routing is."""


class QualityCheck:
    """Asks processes of one job for tokens and logits, and compares them."""

    def __init__(self, launcher: ArmLauncher) -> None:
        self.launcher, self.job = launcher, launcher.job
        self._references: dict[str, ReferenceLogits] = {}
        self._unpatched: dict[str, torch.Tensor] = {}
        """By arguments, as JSON; of the tokens that were first asked for."""

    def greedy(self, process: ArmProcess) -> Tokens:
        steps = max(min(self.job.workload.output_len, REVERT_STEPS), self.job.quality_steps)
        command = say.Generate(seed=self.job.seed + 1, steps=steps)
        return process.ask(command, say.Generated).tokens

    def logits(
        self, process: ArmProcess, tokens: Tokens, reference: bool = False
    ) -> tuple[torch.Tensor, str]:
        """[positions, vocabulary] over such tokens, as many as quality is measured by; and how."""
        forced = [row[: self.job.quality_steps + 1] for row in tokens]
        with tempfile.TemporaryDirectory(prefix="patcher-logits-") as folder:
            path = Path(folder) / "logits.npy"
            wrote = process.ask(
                say.Logits(
                    seed=self.job.seed + 1, forced=forced, path=str(path), reference=reference
                ),
                say.Wrote,
            )
            return torch.from_numpy(np.load(path, allow_pickle=False)), wrote.how

    def reference(self, tokens: Tokens, arguments: Mapping[str, JsonValue]) -> ReferenceLogits:
        """The reference over these tokens; takes a process of its own."""
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
        patched: torch.Tensor,
        baseline: tuple[torch.Tensor, torch.Tensor],
        tokens: Tokens,
    ) -> tuple[Quality, float | None]:
        """By logits over these tokens of a process with these patches and of two baselines; and the
        routing's entropy. Takes a process more.

        Where the patches' arm has another configuration than the baseline, what they replace is
        that configuration: then they are held against it, without them, in one process more still,
        since the baseline may differ from it by more than a patch may.
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
                    self._unpatched[key] = self.logits(process, tokens)[0]
            baseline = self._unpatched[key], self._unpatched[key]
            how += f", all with {words(overriding(arguments, common))}"
        quality = compare_logits(*baseline, patched, reference.logits, how)
        refusal = cloze.refusal(self.job.workload)
        told = {"task_refusal": refusal or "it is not taken where each arm is a process"}
        return quality.model_copy(update=told), reference.entropy_pct


def identical(before: Tokens, again: Tokens, after: Tokens) -> bool:
    """Whether `after` is `before` [batch][tokens], up to where `again` leaves it: an engine that
    does not repeat itself from process to process cannot show more. False where that is nowhere.
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
