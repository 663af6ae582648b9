"""`patcher train`: train a model that writes kernels, and evaluate it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import BudgetError, Language, UsageError
from patcher.commands.console import Json, Output, app, examples
from patcher.commands.option_groups import grouped
from patcher.commands.train_options import (
    Count,
    JudgeGroup,
    LearningRate,
    Minutes,
    ModelGroup,
    OnlyOps,
    OutFolder,
    PerRound,
    Rank,
    SaveEvery,
    Seed,
    TaskGroup,
    Temperature,
    TrainBatch,
    Updates,
    require_whole_rounds,
)
from patcher.show.training import evaluation_table, training_line

train_app = typer.Typer(no_args_is_help=True, help="Train a model that writes kernels.")
app.add_typer(train_app, name="train")


@train_app.callback()
def train() -> None:
    """Train a language model to write kernels, and evaluate it. Needs `patcher[trl]`."""


@train_app.command("warm-up")
@examples(
    "patcher train warm-up warm --model ./qwen --from bench/results/loop/recordings.tar.xz",
    "patcher train warm-up warm --model qwen.gguf --from solutions --from sampled --minutes 20",
    "patcher train warm-up warm --model ./qwen --from patcher-runs/RUN --collect-only",
)
@grouped
def warm_up(
    out: OutFolder,
    model: ModelGroup,
    judging: JudgeGroup,
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="A folder or archive of `patcher record`, a run, a folder of `patcher train "
            "evaluate` or `reinforce`, or `solutions`: the library's for the device, judged anew.",
        ),
    ] = None,
    op: OnlyOps = None,
    language: Annotated[Language, typer.Option(help="The language of kernels.")] = Language.TRITON,
    collect_only: Annotated[
        bool, typer.Option("--collect-only", help="Write OUT/examples.jsonl, and stop.")
    ] = False,
    updates: Updates = 100,
    minutes: Minutes = None,
    examples_per_update: Annotated[int, typer.Option(help="A multiple of --batch.", min=1)] = 8,
    batch: Annotated[int, typer.Option(help="Examples on the device at once.", min=1)] = 2,
    max_tokens: Annotated[
        int, typer.Option(help="Longer examples are left out, never cut off.", min=1)
    ] = 4096,
    learning_rate: LearningRate = 1e-4,
    rank: Rank = 8,
    seed: Seed = 0,
    save_every: SaveEvery = 25,
    as_json: Json = False,
) -> int:
    """Train an adapter on kernels that the judge found right (rejection fine-tuning).

    First collects OUT/examples.jsonl, once, which says of each example where it is from. Then
    TRL's SFT trains a LoRA adapter, OUT/adapter; a line of OUT/metrics.jsonl an update.

    Exit code 2: OUT holds something else or was begun with other options, nothing right was found,
    or the training diverged; 3: a package or a device is missing, or the machine is too busy to
    judge; 4: the time limit came first. After 3 and 4 the same command goes on.
    """
    from patcher.training.examples import EXAMPLES, Example, collect_examples
    from patcher.training.folder import Deadline, open_training
    from patcher.training.line_file import LineFile
    from patcher.training.reply_judges import ReplyJudges
    from patcher.training.warm_up import WarmUpOptions, fitting_examples
    from patcher.training.warm_up import warm_up as trained
    from patcher.training.weights import LoraOptions, load_model, require_one_gpu, seeded

    deadline = Deadline(minutes, time.monotonic())
    if not sources:
        raise UsageError("there is nothing to learn from", "add --from SOURCE")
    if examples_per_update % batch:
        raise UsageError("--examples-per-update is no multiple of --batch", "give 8 and 2")
    if not collect_only:
        require_one_gpu()
    options = WarmUpOptions(
        model=model.required(),
        adapter=model.adapter_digest(),
        judging=judging.measuring(),
        language=language,
        sources=tuple(sources),
        ops=tuple(op) if op else None,
        updates=updates,
        examples_per_update=examples_per_update,
        batch=batch,
        most_tokens=max_tokens,
        learning_rate=learning_rate,
        lora=LoraOptions(rank=rank, alpha=2 * rank),
        seed=seed,
        save_every=save_every,
    )
    output = Output(as_json)
    with open_training(out, "warm-up", options) as folder, output.progress() as bar:
        file = folder.path / EXAMPLES
        if not file.is_file():
            environment = judging.environment(language)
            with ReplyJudges(environment, judging.judges, folder.verdicts) as judges:
                found = collect_examples(
                    sources, environment, judges, file, bar, deadline, options.ops
                )
            by_source = ", ".join(f"{count} of {name}" for name, count in found.sources.items())
            bar.say(f"{found.examples} right of {found.replies} replies: {by_source}")
            if not deadline.leaves(0.0) and not collect_only:
                raise BudgetError(
                    "the time limit came before the first update; the examples are saved",
                    "give the same command again",
                )
        known = LineFile(file, Example).read()
        if not collect_only:
            with seeded(seed):
                loaded = load_model(options.model, model.adapter, options.lora)
            fit = fitting_examples(known, loaded, max_tokens)
            bar.say(f"{len(fit)} of {len(known)} examples fit in {max_tokens} tokens")
            trained(folder, options, loaded, fit, deadline, bar)
        summary = folder.summary("warm-up", updates)
    if collect_only:
        output.emit({"examples": len(known), "file": str(file)}, Text(f"{file}: {len(known)}"))
        return 0
    output.emit(summary, training_line(summary))
    return 0


@train_app.command()
@examples(
    "patcher train reinforce rl --model ./qwen --adapter warm --tasks tasks --minutes 20",
    "patcher train reinforce rl --model qwen.gguf --tasks tasks --method rloo --judge ray@H100",
    "patcher train reinforce rl --model ./qwen --op silu_and_mul --language cuda --updates 20",
)
@grouped
def reinforce(
    out: OutFolder,
    model: ModelGroup,
    tasks: TaskGroup,
    judging: JudgeGroup,
    method: Annotated[str, typer.Option(help="grpo or rloo.")] = "grpo",
    updates: Updates = 200,
    updates_per_round: PerRound = 1,
    minutes: Minutes = None,
    tasks_per_update: Annotated[int, typer.Option(help="Tasks an update.", min=1)] = 2,
    replies_per_task: Annotated[int, typer.Option(help="Replies compared.", min=2)] = 8,
    batch: TrainBatch = 4,
    temperature: Temperature = 1.0,
    learning_rate: LearningRate = 3e-5,
    rank: Rank = 8,
    seed: Seed = 0,
    save_every: SaveEvery = 10,
    as_json: Json = False,
) -> int:
    """Train an adapter by reinforcement learning: the judge rewards the model's own kernels.

    OUT gets adapter/, metrics.jsonl with a line an update, samples.jsonl with each judged reply and
    its verdict, and verdicts.jsonl, by which no source is judged twice. A reply that the machine is
    too busy to judge is left out of its update and counted. Killed or stopped, the same command
    goes on from the newest checkpoint: optimiser, random states and order of tasks too.

    Exit code 2: OUT holds something else or was begun with other options, or the training diverged;
    3: a package or a device is missing, or the judge's process dies on every reply; 4: the time
    limit came first, and the same command goes on.
    """
    from patcher.training.folder import Deadline, open_training
    from patcher.training.reinforce import ReinforceOptions, fitting_prompts
    from patcher.training.reinforce import reinforce as trained
    from patcher.training.reply_judges import ReplyJudges
    from patcher.training.weights import LoraOptions, load_model, require_one_gpu, seeded

    deadline = Deadline(minutes, time.monotonic())
    if method not in ("grpo", "rloo"):
        raise UsageError(f"unknown method {method!r}", "say grpo or rloo")
    if tasks_per_update * replies_per_task % batch:
        raise UsageError(
            f"--batch {batch} does not divide {tasks_per_update * replies_per_task} replies",
            "give one that does",
        )
    require_whole_rounds(updates, updates_per_round)
    require_one_gpu()
    environment = judging.environment(tasks.language)
    options = ReinforceOptions.model_validate(
        {
            "model": model.required(),
            "adapter": model.adapter_digest(),
            "judging": judging.measuring(),
            "language": tasks.language,
            "ops": tasks.chosen("train"),
            "method": method,
            "updates": updates,
            "updates_per_round": updates_per_round,
            "tasks_per_update": tasks_per_update,
            "replies_per_task": replies_per_task,
            "batch": batch,
            "prompt_tokens": tasks.prompt_tokens,
            "reply_tokens": tasks.reply_tokens,
            "temperature": temperature,
            "learning_rate": learning_rate,
            "lora": LoraOptions(rank=rank, alpha=2 * rank),
            "seed": seed,
            "save_every": save_every,
            "scale": judging.scale,
            "against": judging.against(),
        }
    )
    output = Output(as_json)
    with open_training(out, "reinforce", options) as folder, output.progress() as bar:
        with seeded(seed):
            loaded = load_model(options.model, model.adapter, options.lora)
        prompts = fitting_prompts(
            environment, options.ops, loaded, tasks.prompt_tokens, tasks.reply_tokens, bar.say
        )
        with ReplyJudges(environment, judging.judges, folder.verdicts) as judges:
            trained(folder, options, loaded, judges, prompts, deadline, bar)
        summary = folder.summary("reinforce", updates)
    output.emit(summary, training_line(summary))
    return 0


@train_app.command()
@examples(
    "patcher train evaluate before --model ./qwen --tasks tasks",
    "patcher train evaluate after --model ./qwen --adapter rl --tasks tasks --against before",
    "patcher train evaluate sampled --model ./qwen --tasks tasks --split train --count 200",
)
@grouped
def evaluate(
    out: OutFolder,
    model: ModelGroup,
    tasks: TaskGroup,
    judging: JudgeGroup,
    split: Annotated[str, typer.Option(help="held-out, or train.")] = "held-out",
    count: Count = 30,
    samples: Annotated[int, typer.Option(help="Replies to each task.", min=1)] = 4,
    against: Annotated[
        Path | None, typer.Option(help="Another evaluation: its folder, for the difference.")
    ] = None,
    minutes: Minutes = None,
    batch: Annotated[int, typer.Option(help="Replies sampled at once.", min=1)] = 32,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Sample kernels for held-out tasks and judge them: shares with 95 % intervals.

    Compiled; right: every check passed; faster: right, and the lower end of the speedup over eager
    is above 1 (fast@1); caught: broke a rule of the judge. OUT gets samples.jsonl, which a warm-up
    can learn from, and evaluation.json.

    Exit code 2: OUT holds something else or was begun with other options, or --against was;
    3: a package or a device is missing, or the machine is too busy to judge; 4: the time limit came
    first. After 3 and 4 the same command goes on.
    """
    from patcher.training.evaluate import (
        EvaluateOptions,
        compared,
        read_evaluation,
        sample_tasks,
        summarise,
        write_evaluation,
    )
    from patcher.training.folder import Deadline, open_training
    from patcher.training.reinforce import fitting_prompts
    from patcher.training.reply_judges import ReplyJudges
    from patcher.training.weights import load_model

    deadline = Deadline(minutes, time.monotonic())
    if split not in ("held-out", "train"):
        raise UsageError(f"unknown split {split!r}", "say held-out or train")
    other = None if against is None else read_evaluation(against)
    environment = judging.environment(tasks.language)
    chosen = tasks.chosen(split, count, seed)  # type: ignore[arg-type]
    options = EvaluateOptions(
        model=model.required(),
        adapter=model.adapter_digest(),
        judging=judging.measuring(),
        language=tasks.language,
        ops=chosen,
        samples=samples,
        batch=batch,
        prompt_tokens=tasks.prompt_tokens,
        reply_tokens=tasks.reply_tokens,
        temperature=temperature,
        seed=seed,
        against=judging.against(),
    )
    output = Output(as_json)
    with open_training(out, "evaluate", options) as folder, output.progress() as bar:
        loaded = load_model(options.model, model.adapter)
        prompts = fitting_prompts(
            environment, options.ops, loaded, tasks.prompt_tokens, tasks.reply_tokens, bar.say
        )
        with ReplyJudges(environment, judging.judges, folder.verdicts) as judges:
            found = sample_tasks(folder, options, loaded, judges, prompts, deadline, bar)
        result = summarise(options, found)
        result = compared(result, other, str(against)) if other else result
        write_evaluation(folder, result)
    output.emit(result, *evaluation_table(result))
    return 0


@train_app.command()
@examples(
    "patcher train curve rl --out curve.html",
    "patcher train curve rl --evaluation before --evaluation after --out curve.png",
)
def curve(
    folder: Annotated[Path, typer.Argument(help="Of `patcher train warm-up` or `reinforce`.")],
    out: Annotated[Path, typer.Option(help="A .svg, .html or .png file.")] = Path("curve.svg"),
    evaluation: Annotated[
        list[Path] | None, typer.Option(help="Of `patcher train evaluate`; the oldest first.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Draw reward, shares, seconds and loss by update, each with the interval of a moving mean.

    Works while the training goes on. Exit code 2: there are no metrics; 3: PNG without Chromium.
    """
    from patcher.training.curve import draw_training, write_picture

    write_picture(draw_training(folder, evaluation or []), out)
    Output(as_json).emit({"file": str(out)}, Text(str(out)))
    return 0
