"""Engines that run a model. One class each; `open_engine` picks by the workload's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bench.errors import UsageError
from bench.workload import Workload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Generation:
    """One batch of greedy generation."""

    tokens: torch.Tensor
    """[batch, 1 + steps] int64 on the CPU: the first column comes from prefill."""
    prefill_s: float
    decode_s: float
    """Seconds for `steps` decode steps, device synchronised at both ends."""


class Engine(Protocol):
    """Drives one loaded model."""

    workload: Workload
    model: torch.nn.Module
    vocab_size: int

    def prompts(self, seed: int) -> torch.Tensor:
        """[batch, input_len] int64: random token ids, the same for the same seed."""
        ...

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        """Greedy, exactly `steps` decode steps after prefill, end of sequence ignored."""
        ...

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Teacher-forced logits [batch, length, vocabulary] in float32 on the CPU."""
        ...

    def reference_logits(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        """As `logits`, computed in higher precision from the same weights, and the name of that
        precision.
        """
        ...

    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        """Mean entropy of the experts picked in decode, in percent of uniform; None without
        experts.
        """
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None:
        """Free the model's memory."""
        ...


def open_engine(workload: Workload) -> Engine:
    """Load the workload's model.

    Raises:
        UsageError: unknown engine or model.
        MissingError: the engine or the device is not on this machine.
    """
    if workload.engine == "transformers":
        from bench.engines.transformers import TransformersEngine

        return TransformersEngine(workload)
    raise UsageError(f"unknown engine {workload.engine!r}", "engines are: transformers")


__all__ = ["Engine", "Generation", "open_engine"]
