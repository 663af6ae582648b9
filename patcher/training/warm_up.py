"""The warm-up: supervised training of an adapter on examples, by TRL's SFT."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

from patcher.bench import UsageError
from patcher.training.choice import in_rounds
from patcher.training.examples import Example
from patcher.training.folder import Deadline, TrainingFolder, TrainingOptions
from patcher.training.updates import Told, UpdateWriter, run_updates, shared_arguments
from patcher.training.weights import LoadedModel, LoraOptions


class WarmUpOptions(TrainingOptions):
    """What is trained, and how; see `patcher train warm-up --help`."""

    FREE: ClassVar[frozenset[str]] = frozenset({"updates", "save_every"})
    model: str
    adapter: str | None = None
    """Its `adapter_digest`."""
    language: str
    sources: tuple[str, ...]
    ops: tuple[str, ...] | None = None
    """Nothing is learned of others; None: of all."""
    updates: int = 100
    examples_per_update: int = 8
    batch: int = 2
    """Examples that go through the model at once."""
    most_tokens: int = 4096
    """Of prompt and reply."""
    learning_rate: float = 1e-4
    lora: LoraOptions = LoraOptions()
    seed: int = 0
    save_every: int = 25


def fitting_examples(
    examples: Sequence[Example], loaded: LoadedModel, tokens: int
) -> list[Example]:
    """Those whose prompt and reply fit; none is cut off.

    Raises:
        UsageError: none fits.
    """
    sizes = [
        loaded.token_count(each.prompt) + loaded.token_count(each.reply, rendered=False)
        for each in examples
    ]
    fit = [each for each, size in zip(examples, sizes, strict=True) if size < tokens]
    if not fit:
        raise UsageError(
            f"no example fits in {tokens} tokens: the shortest has {min(sizes)}",
            "raise --max-tokens",
        )
    return fit


def warm_up(
    folder: TrainingFolder,
    options: WarmUpOptions,
    loaded: LoadedModel,
    examples: Sequence[Example],
    deadline: Deadline,
    told: Told,
) -> None:
    """Train until the asked number of updates is done; the loss is of the replies alone.

    Args:
        loaded: the model with the adapter that is trained.
        examples: all fit.

    Raises:
        BudgetError: the time limit came first; the same command goes on.
    """
    trl, datasets = import_module("trl"), import_module("datasets")
    datasets.disable_progress_bars()
    size = options.examples_per_update
    by_digest = {each.digest: each for each in examples}
    order = in_rounds(list(by_digest), options.updates * size, options.seed)
    sizes = [loaded.token_count(by_digest[each].reply, rendered=False) for each in order]

    def measured(_: dict[str, Any]) -> dict[str, Any]:
        done = trainer.state.global_step
        return {"tokens": sum(sizes[(done - 1) * size : done * size])}

    writer = UpdateWriter(folder, options.updates, deadline, told, measured)
    shared = shared_arguments(
        folder, options.updates, options.learning_rate, options.seed, options.save_every
    )
    trainer = trl.SFTTrainer(
        model=loaded.model,
        args=trl.SFTConfig(
            **shared,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=size // options.batch,
            max_length=None,
            train_sampling_strategy="sequential",  # `in_rounds` has shuffled
        ),
        train_dataset=datasets.Dataset.from_list([_row(by_digest[each], loaded) for each in order]),
        processing_class=loaded.tokenizer,
        callbacks=[writer],
    )
    run_updates(trainer, folder, options.updates, deadline)


def _row(example: Example, loaded: LoadedModel) -> dict[str, Any]:
    """As TRL takes prompt and completion."""
    reply: Any = example.reply
    if loaded.chats:
        reply = [{"role": "assistant", "content": example.reply}]
    return {"prompt": loaded.prompt(example.prompt), "completion": reply}
