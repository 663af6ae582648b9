"""Engines that run a model. One class each; `open_engine` picks by the workload's name."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from patcher.bench.errors import UsageError
from patcher.bench.workload import Shape, Workload

if TYPE_CHECKING:
    import torch

ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class Generation:
    """One batch of greedy generation."""

    tokens: torch.Tensor
    """[batch, 1 + steps] int64 on the CPU: the first column comes from prefill."""
    prefill_s: float
    decode_s: float
    """Seconds for `steps` decode steps, device synchronised at both ends."""


@dataclass
class Decoding:
    """One batch under way: what its next step needs, and what it has so far."""

    cache: Any
    picked: list[torch.Tensor]
    """[batch, 1] each, on the device; the first comes from prefill."""
    prefill_s: float
    decode_s: float = field(default=0.0)

    def tokens(self) -> torch.Tensor:
        """[batch, 1 + steps] int64 on the CPU."""
        import torch

        return torch.cat(self.picked, dim=1).cpu()


def random_prompts(workload: Workload, vocab_size: int, seed: int) -> torch.Tensor:
    """[batch, input_len] int64: random token ids, the same for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (workload.batch, workload.input_len), generator=generator)


def peak_memory_bytes(device: str) -> int:
    """The most that this process needed of the GPU, or took of the host.

    Of the GPU: what tensors took at most, and what CUDA graphs keep for themselves beyond that. Not
    what PyTorch's allocator had reserved, which it could give back and which depends on the order
    of requests: of stock vLLM with the same flags 15.43 GiB in one sitting and 15.01 in another.
    """
    if device == "cuda":
        import torch

        kept: int = sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if tuple(segment["segment_pool_id"]) != (0, 0)
        )
        return int(torch.cuda.max_memory_allocated()) + kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def entropy_pct(counts: torch.Tensor) -> float:
    """Mean entropy of the experts picked [layers, experts], in percent of uniform."""
    share = counts / counts.sum(dim=1, keepdim=True)
    entropy = -(share * share.clamp_min(1e-12).log()).sum(dim=1)
    return float(entropy.mean() / math.log(counts.shape[1]) * 100)


class Decoder(Protocol):
    """Decodes with one loaded model: what profiling needs."""

    workload: Workload
    vocab_size: int

    def prompts(self, seed: int) -> torch.Tensor:
        """See `random_prompts`."""
        ...

    def prefill(self, prompts: torch.Tensor) -> Decoding:
        """Read the prompts and pick the first token."""
        ...

    def decode(self, decoding: Decoding, steps: int) -> None:
        """Greedy, exactly `steps` more steps, end of sequence ignored; adds to `decode_s`."""
        ...

    def release(self, decoding: Decoding) -> None:
        """No more steps will be taken of it: its place is free for another batch."""
        ...

    def synchronize(self) -> None: ...

    def peak_memory_bytes(self) -> int:
        """The most memory that was held until now: of the device, on a CPU of the process."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...


class Measurable(Decoder, Protocol):
    """What an arm of an A/B needs, whether patches come and go in it or not."""

    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        """Mean entropy of the experts picked in decode, in percent of uniform; None without
        experts.
        """
        ...

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        """Greedy, exactly `steps` decode steps after prefill, end of sequence ignored."""
        ...


class Engine(Measurable, Protocol):
    """Whose model is at hand: patches come and go in it."""

    model: torch.nn.Module

    def logits(self, tokens: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Teacher-forced logits [batch, length, vocabulary] in float32 on the CPU.

        `keep` > 0: of the last `keep` positions only.
        """
        ...

    def reference_logits(self, tokens: torch.Tensor, keep: int = 0) -> tuple[torch.Tensor, str]:
        """As `logits`, in higher precision from the same weights; and how, in words."""
        ...


def open_engine(workload: Workload) -> Engine:
    """Load the workload's model.

    Raises:
        UsageError: unknown engine or model.
        MissingError: the engine or the device is not on this machine.
    """
    if workload.engine == "transformers":
        from patcher.bench.engines.transformers import TransformersEngine

        return TransformersEngine(workload)
    if workload.engine == "vllm":
        raise UsageError(
            "vLLM is patched when a process starts, not while it runs",
            "measure it with a process for each arm: --processes 3",
        )
    raise UsageError(f"unknown engine {workload.engine!r}", f"engines are: {', '.join(ENGINES)}")


def open_measurable(
    workload: Workload,
    arguments: Mapping[str, Any] | None = None,
    memory_share: float = 0.6,
    room: Sequence[Shape] = (),
) -> Measurable:
    """Load the workload's model in a process of its own.

    Args:
        arguments: of the engine, over those that the workload asks for.
        memory_share: of the device's memory, where the engine takes it in advance.
        room: other traffic that it must have room for, where that is said in advance.

    Raises:
        UsageError: as `open_engine`, or arguments for an engine that has none.
    """
    if workload.engine == "vllm":
        from patcher.bench.engines.vllm import VllmEngine

        share = {"gpu_memory_utilization": memory_share}
        return VllmEngine(workload, {**share, **(arguments or {})}, room=room)
    if arguments:
        raise UsageError(f"{workload.engine} takes no arguments of its own here", "leave them out")
    return open_engine(workload)


def open_decoder(workload: Workload) -> Decoder:
    """Load the workload's model for decoding alone. Raises like `open_engine`."""
    return open_measurable(workload)


__all__ = [
    "ENGINES",
    "Decoder",
    "Decoding",
    "Engine",
    "Generation",
    "Measurable",
    "open_decoder",
    "open_engine",
    "open_measurable",
]
