"""What the measuring process and an arm's process say to each other: one JSON line each way.

A command is answered by one reply of the kind that belongs to it, or by an error. Both sides check
what they read against these records; nothing else is ever read from the pipe.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter

from patcher.bench import Record, Shape, Workload
from patcher.integrate import Receipt


class Load(Record):
    """Load the engine; the first command. Reply: `Loaded`."""

    do: Literal["load"] = "load"
    workload: Workload
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Of the engine, over those that the workload asks for."""
    memory_share: float = Field(gt=0, le=1)
    """Of the device's memory, for engines that take theirs in advance."""
    room: tuple[Shape, ...] = ()
    """Other traffic that windows will be asked for."""


class Prefill(Record):
    """Begin a window. Reply: `Done`."""

    do: Literal["prefill"] = "prefill"
    seed: int
    shape: Shape | None = None
    """Traffic; None: the workload's."""


class Decode(Record):
    """So many decode steps of the window. Reply: `Done`, once their tokens are there."""

    do: Literal["decode"] = "decode"
    steps: int = Field(ge=0)


class Settle(Record):
    """Wait for what the device still does. Reply: `Done`."""

    do: Literal["settle"] = "settle"


class End(Record):
    """End the window. Reply: `Ended`."""

    do: Literal["end"] = "end"


class PlantDelay(Record):
    """From now on each decode step takes so much longer: a planted loss. Reply: `Done`."""

    do: Literal["delay"] = "delay"
    seconds: float = Field(ge=0)


class InSteps(Record):
    """A window whose steps are timed one by one, by the arm. Reply: `StepSeconds`."""

    do: Literal["in_steps"] = "in_steps"
    seed: int


class Generate(Record):
    """Greedy tokens. Reply: `Generated`."""

    do: Literal["generate"] = "generate"
    seed: int
    steps: int = Field(ge=1)


class Logits(Record):
    """Logits over forced tokens, into a file. Reply: `Wrote`."""

    do: Literal["logits"] = "logits"
    seed: int
    """Of the prompts."""
    forced: list[list[int]]
    """[batch][steps + 1], as `Generated` has them."""
    path: str
    """Float32 [positions, vocabulary], `numpy.save` without pickle."""
    reference: bool = False
    """In higher precision, where the engine can."""


class AskRouting(Record):
    """How spread out the routing is. Reply: `Entropy`."""

    do: Literal["routing"] = "routing"
    seed: int
    steps: int = Field(ge=1)


class AskMemory(Record):
    """Reply: `MemoryUse`."""

    do: Literal["memory"] = "memory"


class AskReceipts(Record):
    """Reply: `Receipts`."""

    do: Literal["receipts"] = "receipts"


class Close(Record):
    """Free everything and exit. Reply: `Done`."""

    do: Literal["close"] = "close"


ArmCommand = Annotated[
    Load
    | Prefill
    | Decode
    | Settle
    | End
    | PlantDelay
    | InSteps
    | Generate
    | Logits
    | AskRouting
    | AskMemory
    | AskReceipts
    | Close,
    Field(discriminator="do"),
]
COMMAND: TypeAdapter[ArmCommand] = TypeAdapter(ArmCommand)


class Done(Record):
    kind: Literal["done"] = "done"


class Loaded(Record):
    kind: Literal["loaded"] = "loaded"
    vocab_size: int = Field(ge=1)
    patches: dict[str, str]
    """What is in the engine: digests by id."""


class Ended(Record):
    kind: Literal["ended"] = "ended"
    tokens: list[list[int]]
    """[batch][1 + steps]: prefill's first."""
    kernel_calls: int = Field(ge=0)
    """Of patched kernels, since the window began."""


class StepSeconds(Record):
    kind: Literal["steps"] = "steps"
    seconds: list[float]


class Generated(Record):
    kind: Literal["generated"] = "generated"
    tokens: list[list[int]]


class Wrote(Record):
    kind: Literal["wrote"] = "wrote"
    how: str
    """How they were computed."""


class Entropy(Record):
    kind: Literal["entropy"] = "entropy"
    percent: float | None


class MemoryUse(Record):
    """See `patcher.bench.ab.processes.ProcessMemory`."""

    kind: Literal["memory"] = "memory"
    held: int
    peak: int
    free: int


class Receipts(Record):
    kind: Literal["receipts"] = "receipts"
    receipts: tuple[Receipt, ...]


class Failed(Record):
    """An expected error, as `PatcherError.as_dict` gives it; the process lives on."""

    kind: Literal["failed"] = "failed"
    error: dict[str, str]


ArmReply = Annotated[
    Done
    | Loaded
    | Ended
    | StepSeconds
    | Generated
    | Wrote
    | Entropy
    | MemoryUse
    | Receipts
    | Failed,
    Field(discriminator="kind"),
]
REPLY: TypeAdapter[ArmReply] = TypeAdapter(ArmReply)
