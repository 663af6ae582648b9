"""What every trainer of TRL is given here: arguments, metrics, a time limit, a resumed start."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from patcher.bench import BudgetError, UsageError
from patcher.training.folder import Deadline, TrainingFolder, UpdateMetrics
from patcher.training.weights import (
    device_here,
    finite_weights,
    probabilities_checked,
    require_one_gpu,
)

Told = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


def shared_arguments(
    folder: TrainingFolder,
    updates: int,
    learning_rate: float,
    seed: int,
    save_every: int,
    per_round: int = 1,
) -> dict[str, Any]:
    """Arguments that TRL's configurations have in common. The learning rate does not depend on how
    many updates there will be, so that a training can be made longer.

    Args:
        per_round: updates from one sampling; a checkpoint is only where one ends.

    Raises:
        UsageError: see `require_one_gpu`.
    """
    require_one_gpu()
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    on_gpu = device_here() == "cuda"
    return {
        "output_dir": str(folder.checkpoints),
        "max_steps": updates,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "save_strategy": "steps",
        "save_steps": -(-save_every // per_round) * per_round,
        "save_total_limit": 2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # else a loss that is no number is logged as 0
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "seed": seed,
    }


class UpdateWriter(TrainerCallback):
    """Writes a line of metrics an update, before its checkpoint, and stops in time.

    Args:
        folder: of the training.
        updates: to be done.
        deadline: a round of updates that might end after it is not begun.
        told: called with (stage, done, total).
        measure: what is known of the update beside loss and time, as fields of `UpdateMetrics`.
        per_round: updates from one sampling.
    """

    def __init__(
        self,
        folder: TrainingFolder,
        updates: int,
        deadline: Deadline,
        told: Told,
        measure: Callable[[dict[str, Any]], dict[str, Any]],
        per_round: int = 1,
    ) -> None:
        self._folder, self._updates, self._deadline = folder, updates, deadline
        self._told, self._measure, self._per_round = told, measure, per_round
        self.begun_s = 0.0
        """When the update began."""
        self._took_s: list[float] = []
        self._rounds_s: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._took_s.append(time.monotonic() - self.begun_s)
        if state.global_step % self._per_round:
            return  # what was sampled for the rest of the round is in no checkpoint
        self._rounds_s.append(sum(self._took_s[-self._per_round :]))
        # the longest of the last few: replies grow and shrink
        if not self._deadline.leaves(max(self._rounds_s[-5:])):
            control.should_save = control.should_training_stop = True

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        if logs is None or "loss" not in logs:
            return  # the summary after the last update
        update, loss = state.global_step, float(logs["loss"])
        if not math.isfinite(loss) or not finite_weights(more["model"]):
            raise UsageError(
                f"the training has diverged: loss or adapter of update {update} are no numbers",
                "give a new folder and a smaller --learning-rate",
            )
        took_s = self._took_s[-1]
        fields = self._measure(logs)
        spent_s = fields.get("generating_s", 0.0) + fields.get("judging_s", 0.0)
        line = UpdateMetrics(
            update=update,
            loss=loss,
            training_s=round(took_s - spent_s, 3),
            **fields,
        )
        self._folder.metrics.append([line])
        note = f"loss {line.loss:.3f}" if line.reward is None else f"reward {line.reward:+.2f}"
        self._told(f"updates ({note})", update, self._updates)


def run_updates(trainer: Any, folder: TrainingFolder, updates: int, deadline: Deadline) -> None:
    """Train from the newest checkpoint on; the adapter is written at the end, and at a time limit.

    Raises:
        BudgetError: the time limit came first.
        UsageError: the training has diverged.
    """
    trainer.remove_callback(PrinterCallback)
    newest = folder.rewind()
    if newest is None or newest.update < updates:
        with probabilities_checked():
            trainer.train(resume_from_checkpoint=str(newest.path) if newest else None)
        folder.save_adapter(trainer.accelerator.unwrap_model(trainer.model))
    else:
        folder.adopt_adapter(newest)
    done = trainer.state.global_step if newest is None or newest.update < updates else updates
    if deadline.hit and done < updates:
        raise BudgetError(
            f"the time limit came after update {done} of {updates}, which is saved",
            "give the same command again",
        )
