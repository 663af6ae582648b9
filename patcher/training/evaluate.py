"""How good a model is at kernels: samples on held-out tasks, judged, as shares with intervals."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, ValidationError

from patcher.bench import SCHEMA_VERSION, BudgetError, Record, UsageError
from patcher.bench.stats.shares import ShareInterval, grouped_share, paired_difference
from patcher.runs import durable
from patcher.training.folder import Deadline, TrainingFolder, TrainingOptions
from patcher.training.replies import SHARES, JudgedReply, SampledReply
from patcher.training.reply_judges import AskedReply, ReplyJudges, Told
from patcher.training.weights import LoadedModel, probabilities_checked

RESULT = "evaluation.json"


class EvaluateOptions(TrainingOptions):
    """What is evaluated, and how; see `patcher train evaluate --help`."""

    FREE: ClassVar[frozenset[str]] = frozenset()
    model: str
    adapter: str | None = None
    """Its `adapter_digest`."""
    language: str
    ops: tuple[str, ...]
    samples: int = 4
    batch: int = 32
    prompt_tokens: int = 2560
    reply_tokens: int = 1024
    temperature: float = 0.8
    seed: int = 0
    against: tuple[str, ...] = ("eager",)


class ModelEvaluation(Record):
    """The result: `evaluation.json`."""

    schema_version: int = SCHEMA_VERSION
    model: str
    adapter: str | None
    """Its `patcher.training.weights.adapter_digest`."""
    language: str
    samples: int
    """Of each task."""
    against: tuple[str, ...] = ("eager",)
    """Baselines; `faster` is of the first."""
    tasks: tuple[str, ...]
    shares: dict[str, ShareInterval]
    """By the names of `patcher.training.replies.SHARES`, each task with equal weight; `any_right`:
    tasks of which at least one sample is right."""
    flags: dict[str, dict[str, tuple[bool, ...]]] = Field(repr=False)
    """By share and task, one of each sample."""
    lost: int
    """Samples whose judge died, which count as wrong."""
    tokens: int
    compared_with: str | None = None
    differences: dict[str, ShareInterval] = Field(default_factory=dict)
    """By share: this less the other, task by task."""


def sample_tasks(
    folder: TrainingFolder,
    options: EvaluateOptions,
    loaded: LoadedModel,
    judges: ReplyJudges,
    prompts: Mapping[str, str],
    deadline: Deadline,
    told: Told,
) -> list[SampledReply]:
    """Sample and judge what is not there yet; all samples.

    Each group of tasks is drawn with a seed of its own, so that a resumed evaluation draws what an
    undisturbed one would, and finds the verdicts that a time limit let it reach.

    Raises:
        BudgetError: the time limit came first; the same command goes on.
        PatcherError: the judge cannot judge here.
    """
    there: dict[str, set[int]] = {}
    for each in folder.samples.read():
        there.setdefault(each.judged.op, set()).add(each.number)
    done = {op for op, numbers in there.items() if len(numbers) == options.samples}
    folder.samples.keep(lambda each: each.judged.op in done)
    took_s = 0.0
    for number, group in enumerate(_groups(list(prompts), options)):
        if done.issuperset(group):
            continue
        if not deadline.leaves(took_s):
            raise BudgetError(
                f"the time limit came after {len(done)} of {len(prompts)} tasks, which are saved",
                "give the same command again",
            )
        begun_s = time.monotonic()
        told(f"tasks (sampling {len(group) * options.samples})", len(done), len(prompts))
        replies = _generate(loaded, [prompts[op] for op in group], options, number)
        took_s = time.monotonic() - begun_s
        asked = [
            AskedReply(op, text)
            for op, texts in zip(group, replies, strict=True)
            for text, _ in texts
        ]
        verdicts = iter(judges.judge(asked, told, deadline))
        drawn = [
            SampledReply(
                number=index,
                prompt=prompts[op],
                reply=text,
                tokens=tokens,
                judged=next(verdicts),
            )
            for op, texts in zip(group, replies, strict=True)
            for index, (text, tokens) in enumerate(texts)
        ]
        # a whole task of a group may be there after a kill; it is drawn again the same
        folder.samples.append(each for each in drawn if each.judged.op not in done)
        done.update(group)
    told("tasks", len(done), len(prompts))
    return folder.samples.read()


def summarise(options: EvaluateOptions, samples: Sequence[SampledReply]) -> ModelEvaluation:
    """The shares of all samples."""
    by_task: dict[str, list[JudgedReply]] = {}
    for each in samples:
        by_task.setdefault(each.judged.op, []).append(each.judged)
    flags = {
        name: {
            op: tuple(each.flags()[name] for each in judged)
            for op, judged in sorted(by_task.items())
        }
        for name in SHARES
    }
    flags["any_right"] = {op: (any(each),) for op, each in flags["right"].items()}
    return ModelEvaluation(
        model=options.model,
        adapter=options.adapter,
        language=options.language,
        samples=options.samples,
        against=options.against,
        tasks=tuple(flags["right"]),
        shares={name: grouped_share(list(each.values())) for name, each in flags.items()},
        flags=flags,
        lost=sum(each.judged.lost for each in samples),
        tokens=sum(each.tokens for each in samples),
    )


def compared(found: ModelEvaluation, other: ModelEvaluation, name: str) -> ModelEvaluation:
    """The evaluation with its differences to another one.

    Raises:
        UsageError: that one is of other tasks, language, samples or baselines.
    """
    same = ("tasks", "language", "samples", "against")
    if differ := [each for each in same if getattr(found, each) != getattr(other, each)]:
        raise UsageError(
            f"{name} has other {' and '.join(differ)}".replace("against", "baselines"),
            "give both the same --tasks, --count, --seed, --language, --samples and --baseline",
        )
    differences = {
        share: paired_difference(list(other.flags[share].values()), list(flags.values()))
        for share, flags in found.flags.items()
    }
    return found.model_copy(update={"compared_with": name, "differences": differences})


def write_evaluation(folder: TrainingFolder, found: ModelEvaluation) -> None:
    """Write it."""
    durable.write_whole(folder.path / RESULT, found.model_dump_json(indent=1) + "\n")


def read_evaluation(path: Path) -> ModelEvaluation:
    """An evaluation, by its file or its folder.

    Raises:
        UsageError: there is none.
    """
    file = path / RESULT if path.is_dir() else path
    try:
        return ModelEvaluation.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise UsageError(
            f"{path} holds no finished evaluation", "give a folder of `patcher train evaluate`"
        ) from error


def _groups(ops: Sequence[str], options: EvaluateOptions) -> Iterator[tuple[str, ...]]:
    at_once = iter(ops)
    while group := tuple(itertools.islice(at_once, max(options.batch // options.samples, 1))):
        yield group


def _generate(
    loaded: LoadedModel, prompts: Sequence[str], options: EvaluateOptions, number: int
) -> list[list[tuple[str, int]]]:
    """Samples of each prompt, with their tokens."""
    from transformers import set_seed

    set_seed(options.seed * 1_000_003 + number)
    texts = [loaded.rendered(each) for each in prompts]
    given: Any = loaded.tokenizer(
        texts, return_tensors="pt", padding=True, add_special_tokens=False
    ).to(loaded.model.device)
    loaded.model.eval()
    with torch.inference_mode(), probabilities_checked():
        whole = loaded.model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            do_sample=True,
            temperature=options.temperature,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            num_return_sequences=options.samples,
            max_new_tokens=options.reply_tokens,
            pad_token_id=loaded.tokenizer.pad_token_id,
        )
    new = whole[:, given["input_ids"].shape[1] :]
    counts = (new != loaded.tokenizer.pad_token_id).sum(-1).tolist()
    replies = loaded.tokenizer.batch_decode(new, skip_special_tokens=True)
    pairs = list(zip(replies, counts, strict=True))
    return [pairs[at : at + options.samples] for at in range(0, len(pairs), options.samples)]
