"""Options that the commands of `patcher train` have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from patcher.bench import Language, UsageError
from patcher.commands.console import JudgeSpec, Threads, finite
from patcher.commands.option_groups import OptionGroup

if TYPE_CHECKING:
    from patcher.tasks.records import Split
    from patcher.training import EnvironmentOptions

OutFolder = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or one to resume.")]
Updates = Annotated[int, typer.Option(help="Updates of the adapter, all pieces together.", min=1)]
PerRound = Annotated[
    int,
    typer.Option(
        help="Updates from one sampling, which takes hardly longer for more replies; divides "
        "--updates. Checkpoints are between samplings.",
        min=1,
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Save and stop before this time is over; the same command goes on.",
        min=0,
        callback=finite,
    ),
]
OnlyOps = Annotated[
    list[str] | None, typer.Option(help="Learn from kernels of this op alone; may be repeated.")
]
Seed = Annotated[int, typer.Option(help="Of the order of data and of sampling.", min=0)]
SaveEvery = Annotated[int, typer.Option(help="Updates from checkpoint to checkpoint.", min=1)]
Count = Annotated[int, typer.Option(help="At most so many tasks, drawn by the seed.", min=1)]
TrainBatch = Annotated[
    int, typer.Option(help="Replies trained on at once; divides those of an update.", min=1)
]
Temperature = Annotated[float, typer.Option(help="Of sampling.", min=0.01, callback=finite)]
LearningRate = Annotated[float, typer.Option(help="Of AdamW, constant.", min=0, callback=finite)]
Rank = Annotated[int, typer.Option(help="Of the LoRA adapter.", min=1)]


def require_whole_rounds(updates: int, per_round: int) -> None:
    """Check that the last update ends a round.

    Raises:
        UsageError: it does not.
    """
    if updates % per_round:
        whole = -(-updates // per_round) * per_round
        raise UsageError(
            f"--updates {updates} is no multiple of --updates-per-round {per_round}",
            f"give --updates {whole}, or other rounds",
        )


@dataclass(frozen=True)
class ModelGroup(OptionGroup):
    """The model."""

    PANEL = "Model"
    model: Annotated[
        str, typer.Option(help="A folder, an id of the hub, or a GGUF file (needs gguf).")
    ] = ""
    adapter: Annotated[
        Path | None,
        typer.Option(help="The adapter to begin with: a folder of `patcher train`."),
    ] = None

    def required(self) -> str:
        """The model's name.

        Raises:
            UsageError: none was given.
        """
        if not self.model:
            raise UsageError("no model is named", "add --model FOLDER, an id, or FILE.gguf")
        return self.model

    def adapter_digest(self) -> str | None:
        """What the adapter is, in whichever folder.

        Raises:
            UsageError: there is none in the given one.
        """
        from patcher.training.weights import adapter_digest

        return None if self.adapter is None else adapter_digest(self.adapter)


@dataclass(frozen=True)
class TaskGroup(OptionGroup):
    """What is asked of the model."""

    PANEL = "Tasks"
    tasks: Annotated[
        Path | None, typer.Option(help="A folder of `patcher tasks create`.", metavar="DIR")
    ] = None
    op: Annotated[
        list[str] | None, typer.Option(help="Instead: an op of the library; may be repeated.")
    ] = None
    language: Annotated[Language, typer.Option(help="The language of kernels.")] = Language.TRITON
    prompt_tokens: Annotated[
        int, typer.Option(help="Tasks with a longer prompt are left out.", min=1)
    ] = 2560
    reply_tokens: Annotated[int, typer.Option(help="Longest reply.", min=1)] = 1024
    most_operators: Annotated[
        int | None,
        typer.Option(help="Only tasks of at most so many operators, for a weak model.", min=1),
    ] = None

    def chosen(self, split: Split, count: int | None = None, seed: int = 0) -> tuple[str, ...]:
        """Ops to work on; see `patcher.training.choice.choose_ops`, also for what it raises."""
        from patcher.training.choice import choose_ops

        return choose_ops(self.tasks, self.op or [], split, count, seed, self.most_operators)


@dataclass(frozen=True)
class JudgeGroup(OptionGroup):
    """How replies are judged."""

    PANEL = "Judging"
    judge: JudgeSpec = None
    judges: Annotated[
        int, typer.Option(help="Processes that judge; with Ray, replies out at once.", min=1)
    ] = 4
    baseline: Annotated[
        list[str] | None,
        typer.Option(help="eager (default) or torch.compile; each costs a judgement."),
    ] = None
    scale: Annotated[str, typer.Option(help="milestones, log-speedup or steps.")] = "milestones"
    pairs: Annotated[int, typer.Option(help="Most pairs of timed blocks a point.", min=2)] = 6
    points: Annotated[int, typer.Option(help="Most points that are timed.", min=1)] = 1
    threads: Threads = None

    def against(self) -> tuple[str, ...]:
        """Each once, in the order of the milestones."""
        from patcher.judges.reward import AGAINST

        named = set(self.baseline or ["eager"])
        if others := sorted(named.difference(AGAINST)):
            raise UsageError(f"unknown baseline {others[0]!r}", f"say {' or '.join(AGAINST)}")
        return tuple(each for each in AGAINST if each in named)

    def measuring(self) -> str:
        return (
            f"--baseline {','.join(self.against())} --scale {self.scale} --pairs {self.pairs} "
            f"--points {self.points} --threads {self.threads}"
        )

    def environment(self, language: Language) -> EnvironmentOptions:
        """Options of the environment.

        Raises:
            UsageError: an unknown scale or judge.
        """
        from patcher.judges import LOCAL, remote_judge
        from patcher.training import EnvironmentOptions, Shaping
        from patcher.training.shaping import Scale

        if self.scale not in get_args(Scale):
            raise UsageError(
                f"unknown scale {self.scale!r}", f"say one of {', '.join(get_args(Scale))}"
            )
        remote_judge(self.judge or LOCAL)
        return EnvironmentOptions(
            language=language,
            turns=1,
            shaping=Shaping.model_validate({"scale": self.scale}),
            judge=self.judge or LOCAL,
            against=self.against(),
            threads=self.threads,
            pairs=self.pairs,
            points=self.points,
        )
