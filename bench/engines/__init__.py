"""Engines that run a model. One class each; `open_engine` picks by the workload's name, from ours
and from those that other packages bring (`patcher.bench.plugins`).
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from patcher.bench.errors import UsageError
from patcher.bench.plugins import Registry
from patcher.bench.presets import presets
from patcher.bench.workload import Shape, Workload

if TYPE_CHECKING:
    import torch

ENGINES: Registry[EngineFactory] = Registry("engines")
"""By name: ours, and those of other packages."""
PLUGINS: Registry[Any] = Registry("engine_plugins")
"""By engine: the plugins of engines whose patches are installed when a process starts; see
`patcher.integrate.measuring`."""


@dataclass(frozen=True)
class Generation:
    """Result of one batch of greedy generation."""

    tokens: torch.Tensor
    """Token ids, int64 of shape [batch, 1 + steps] on the CPU; the first column is prefill's."""
    prefill_s: float
    """Seconds of prefill."""
    decode_s: float
    """Seconds of `steps` decode steps, with the device synchronised at both ends."""


@dataclass
class Decoding:
    """State of a batch that is being decoded."""

    cache: Any
    """The engine's state for the next step."""
    picked: list[torch.Tensor]
    """Tokens of each step, of shape [batch, 1] on the device; prefill produces the first."""
    prefill_s: float
    """Seconds of prefill."""
    decode_s: float = field(default=0.0)
    """Seconds of decode until now."""

    def tokens(self) -> torch.Tensor:
        """Token ids until now, int64 of shape [batch, 1 + steps] on the CPU."""
        import torch

        return torch.cat(self.picked, dim=1).cpu()


def random_prompts(workload: Workload, vocab_size: int, seed: int) -> torch.Tensor:
    """Random token ids, int64 of shape [batch, input_len]; reproducible by the seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (workload.batch, workload.input_len), generator=generator)


def peak_memory_bytes(device: str) -> int:
    """Peak memory of this process in bytes, on the GPU (`cuda`) or the host (`cpu`).

    On the GPU this is the peak of all tensors, plus the private memory of CUDA graphs. Memory that
    PyTorch's allocator reserves is not counted. It depends on the order of requests: stock vLLM
    with the same flags reserved 15.43 GiB in one session and 15.01 GiB in another.
    """
    if device == "cuda":
        import torch

        graphs: int = sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if tuple(segment["segment_pool_id"]) != (0, 0)
        )
        return int(torch.cuda.max_memory_allocated()) + graphs
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def entropy_pct(counts: torch.Tensor) -> float:
    """Mean entropy of expert selection, in percent of the uniform distribution.

    Args:
        counts: how often each expert was selected, of shape [layers, experts].
    """
    share = counts / counts.sum(dim=1, keepdim=True)
    entropy = -(share * share.clamp_min(1e-12).log()).sum(dim=1)
    return float(entropy.mean() / math.log(counts.shape[1]) * 100)


class Decoder(Protocol):
    """A loaded model that decodes: the interface that profiling needs."""

    workload: Workload
    """The workload that the model was loaded for."""
    vocab_size: int
    """Number of token ids."""

    def prompts(self, seed: int) -> torch.Tensor:
        """See `random_prompts`."""
        ...

    def prefill(self, prompts: torch.Tensor) -> Decoding:
        """Run prefill and select the first token.

        Args:
            prompts: token ids, int64 of shape [batch, input_len].
        """
        ...

    def decode(self, decoding: Decoding, steps: int) -> None:
        """Decode exactly `steps` more steps greedily, ignoring end of sequence.

        Tokens and seconds are added to `decoding`.
        """
        ...

    def release(self, decoding: Decoding) -> None:
        """End a batch, so that its memory is free for another one."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        ...

    def peak_memory_bytes(self) -> int:
        """Peak memory until now in bytes: of the device, or of the process on a CPU."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...


class Measurable(Decoder, Protocol):
    """A loaded model that can be one arm of an A/B comparison."""

    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        """Mean entropy of expert selection in decode, in percent of uniform.

        Args:
            prompts: token ids, int64 of shape [batch, input_len].
            steps: number of decode steps.

        Returns:
            The entropy; None if the model has no experts, or its code selects none.
        """
        ...

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        """Run prefill and exactly `steps` greedy decode steps, ignoring end of sequence.

        Args:
            prompts: token ids, int64 of shape [batch, input_len].
            steps: number of decode steps.
        """
        ...


class Engine(Measurable, Protocol):
    """An engine whose model is in this process, so that patches can be applied and removed."""

    model: torch.nn.Module
    """The loaded model. Each prefill and each step is one forward of it, whose output is logits
    [batch, length, vocabulary], has them as `logits`, or is a tuple that begins with them."""

    def logits(self, tokens: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Teacher-forced logits, float32 of shape [batch, length, vocabulary] on the CPU.

        Args:
            tokens: token ids, int64 of shape [batch, length].
            keep: if positive, return only the last `keep` positions.
        """
        ...

    def reference_logits(self, tokens: torch.Tensor, keep: int = 0) -> tuple[torch.Tensor, str]:
        """Logits in higher precision from the same weights, and a description of the method.

        The arguments are those of `logits`.
        """
        ...


class EngineFactory(Protocol):
    """What an entry point `patcher.engines` names: a class whose instances are one loaded model."""

    in_process: bool
    """Whether patches come and go in the loaded model, so that its instances are an `Engine`;
    where it is not said, they do. Where they do not, each arm is a process of its own, instances
    are `Measurable`, and the class is also given `arguments`, `memory_share` and `room`, as
    `open_measurable` says. Such a class may have `options`, the ways to serve that a search of the
    best stock configuration tries: a sequence of options, each of values, each of arguments by
    name, or a function that lists them for a workload. It may have `reference_arguments`, under
    which it computes the same without compilation and graphs. Where an engine fills the memory that
    it finds free, it has `cache_argument`, the argument that bounds its KV cache, and
    `cache_size(workload, room)`, the value that suffices, or None; `share_argument` is that of the
    share of the device's memory. Where it compiles when it starts and keeps that on disk,
    `compiles` is true: see `compiles`. `compiles_alike` says in which versions it finds that
    again whatever those two arguments are; where it is not said, in all.

    Any class may have `check_model(workload)`, which raises what is missing for a model that is no
    preset, without loading it.
    """

    def __call__(self, workload: Workload, /, *args: Any, **options: Any) -> Any:
        """Load the workload's model.

        Raises:
            UsageError: it cannot be a model of this engine.
            MissingError: the engine or the device is not on this machine.
        """
        ...


def in_process(engine: str) -> bool:
    """Whether patches come and go in the engine while a model is loaded.

    Raises:
        UsageError, MissingError: as `Registry.load`.
    """
    if ENGINES.ours(engine):  # without importing it: torch takes a second
        return engine not in PLUGINS
    return bool(getattr(ENGINES.load(engine), "in_process", True))


def cache_argument(engine: str) -> str:
    """The argument that bounds the KV cache of an engine that else fills the memory that is free;
    empty for other engines.

    Raises:
        UsageError, MissingError: as `Registry.load`.
    """
    if in_process(engine):
        return ""
    return str(getattr(ENGINES.load(engine), "cache_argument", ""))


def compiles(engine: str) -> bool:
    """Whether a process of the engine compiles when it starts, and later ones find that on disk.

    The first process is not like the later ones: in vLLM 0.33.0 on H100s the first
    patched process of a host made 9 to 26 % fewer tokens/s at batch 1 than they.

    Raises:
        UsageError, MissingError: as `Registry.load`.
    """
    return not in_process(engine) and bool(getattr(ENGINES.load(engine), "compiles", False))


def check_model(workload: Workload) -> None:
    """Refuse a model that the engine is known not to load, before anything is measured.

    Raises:
        UsageError: there is no such model, the engine does not know its architecture, or it needs
            code of its own.
        MissingError: the model's files, the engine or the memory for it are not here.
    """
    if workload.model in presets():
        return
    check = getattr(ENGINES.load(workload.engine), "check_model", None)
    if check is not None:
        check(workload)


def open_engine(workload: Workload) -> Engine:
    """Load the workload's model.

    Raises:
        UsageError: unknown engine or model.
        MissingError: the engine or the device is not on this machine.
    """
    if not in_process(workload.engine):
        raise UsageError(
            f"{workload.engine} is patched when a process starts, not while it runs",
            "measure it with a process for each arm: --processes 3",
        )
    engine: Engine = ENGINES.load(workload.engine)(workload)
    return engine


def open_measurable(
    workload: Workload,
    arguments: Mapping[str, Any] | None = None,
    memory_share: float = 0.6,
    room: Sequence[Shape] = (),
) -> Measurable:
    """Load the workload's model for measuring, in a process that runs nothing else.

    Args:
        workload: model, engine and traffic.
        arguments: arguments of the engine, which override those of the workload.
        memory_share: share of the device's memory, for an engine that reserves it in advance.
        room: other traffic to reserve memory for, for such an engine.

    Raises:
        UsageError: as `open_engine`, or arguments for an engine that accepts none.
    """
    if not in_process(workload.engine):
        factory = ENGINES.load(workload.engine)
        engine: Measurable = factory(workload, arguments, memory_share=memory_share, room=room)
        return engine
    if arguments:
        raise UsageError(f"{workload.engine} accepts no engine arguments", "leave them out")
    return open_engine(workload)


def open_decoder(workload: Workload) -> Decoder:
    """Load the workload's model for decoding only. See `open_engine` for what it raises."""
    return open_measurable(workload)


__all__ = [
    "ENGINES",
    "Decoder",
    "Decoding",
    "Engine",
    "EngineFactory",
    "Generation",
    "Measurable",
    "cache_argument",
    "check_model",
    "compiles",
    "in_process",
    "open_decoder",
    "open_engine",
    "open_measurable",
]
