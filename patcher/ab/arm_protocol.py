"""Messages between the measuring process and an arm's process: one JSON line each way.

Each command has one kind of reply, or an error. Both sides validate what they read against these
records; nothing else is read from the pipe.
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
    """The engine's arguments, which override those of the workload."""
    memory_share: float = Field(gt=0, le=1)
    """Share of the device's memory, for engines that allocate theirs in advance."""
    room: tuple[Shape, ...] = ()
    """Other traffic that later windows will use."""


class Prefill(Record):
    """Begin a window. Reply: `Done`."""

    do: Literal["prefill"] = "prefill"
    seed: int
    shape: Shape | None = None
    """Traffic of the window; None: the workload's."""


class Decode(Record):
    """Run some decode steps of the window. Reply: `Done`, when their tokens have arrived."""

    do: Literal["decode"] = "decode"
    steps: int = Field(ge=0)


class Settle(Record):
    """Wait until the device is idle. Reply: `Done`."""

    do: Literal["settle"] = "settle"


class End(Record):
    """End the window. Reply: `Ended`."""

    do: Literal["end"] = "end"


class PlantDelay(Record):
    """Delay each decode step from now on, to plant a loss. Reply: `Done`."""

    do: Literal["delay"] = "delay"
    seconds: float = Field(ge=0)


class InSteps(Record):
    """Run a window whose steps the arm times one by one. Reply: `StepSeconds`."""

    do: Literal["in_steps"] = "in_steps"
    seed: int


class Generate(Record):
    """Generate greedy tokens. Reply: `Generated`."""

    do: Literal["generate"] = "generate"
    seed: int
    steps: int = Field(ge=1)


class Logits(Record):
    """Write logits over forced tokens to a file. Reply: `Wrote`."""

    do: Literal["logits"] = "logits"
    seed: int
    """Seed of the prompts."""
    forced: list[list[int]]
    """Tokens [batch][steps + 1], as in `Generated`."""
    path: str
    """Output file: float32 [positions, vocabulary], by `numpy.save` without pickle."""
    reference: bool = False
    """Whether to use higher precision, if the engine can."""
    alone: bool = False
    """Whether to serve the first sequences each by itself."""


class Answer(Record):
    """Answer multiple-choice questions. Reply: `Answered`."""

    do: Literal["answer"] = "answer"
    questions: list[list[list[int]]]
    """See `patcher.bench.ab.cloze.Question`."""


class AskRouting(Record):
    """Measure the entropy of the routing. Reply: `Entropy`."""

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
    | Answer
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
    """Digests of the installed patches, by id."""


class Ended(Record):
    kind: Literal["ended"] = "ended"
    tokens: list[list[int]]
    """Tokens [batch][1 + steps]; the first is prefill's."""
    kernel_calls: int = Field(ge=0)
    """Calls of patched kernels since the window began."""


class StepSeconds(Record):
    kind: Literal["steps"] = "steps"
    seconds: list[float]


class Generated(Record):
    kind: Literal["generated"] = "generated"
    tokens: list[list[int]]


class Wrote(Record):
    kind: Literal["wrote"] = "wrote"
    how: str
    """How the logits were computed."""


class Answered(Record):
    kind: Literal["answered"] = "answered"
    likelihoods: list[list[float | None]]
    """[questions][choices]; None: not finite."""


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
    """An expected error, as `PatcherError.as_dict` gives it; the process continues."""

    kind: Literal["failed"] = "failed"
    error: dict[str, str]


ArmReply = Annotated[
    Done
    | Loaded
    | Ended
    | StepSeconds
    | Generated
    | Wrote
    | Answered
    | Entropy
    | MemoryUse
    | Receipts
    | Failed,
    Field(discriminator="kind"),
]
REPLY: TypeAdapter[ArmReply] = TypeAdapter(ArmReply)
