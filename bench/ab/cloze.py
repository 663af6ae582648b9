"""Do both arms give the same answers? A paired multiple choice, scored by log-likelihood.

The items (`cloze.toml`) are general knowledge. Random weights would score at chance in both arms,
so they get no score.

Paired tests: McNemar 1947 (exact, over the items on which the arms differ) and the bootstrap over
items. Scoring by the likelihood of each choice follows EleutherAI's lm-evaluation-harness
(`lm_eval/api/task.py`, output type `multiple_choice`).
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from patcher.bench.ab.logits import Serve
from patcher.bench.ab.records import TaskScore
from patcher.bench.engines import random_prompts
from patcher.bench.errors import UsageError
from patcher.bench.workload import Workload, weights_id

ALPHA = 0.05
POWER = 0.8
DECODED = 4
"""Tokens of an item that are decoded one by one; without them, a choice of one token would be read
from prefill alone."""
BOOTSTRAPS = 4000


Question = list[list[int]]
"""The tokens of an item with each of its choices."""


@dataclass(frozen=True)
class Item:
    """A statement without its end, and possible ends; the first one is right."""

    statement: str
    choices: tuple[str, ...]


def items() -> list[Item]:
    """The items of `cloze.toml`."""
    text = resources.files("patcher.bench.ab").joinpath("cloze.toml").read_text(encoding="utf-8")
    return [Item(first, tuple(rest)) for first, *rest in tomllib.loads(text)["items"]]


def questions(workload: Workload) -> list[Question] | str:
    """The items as the model's tokens, or why there is no task score for this workload."""
    try:
        tokenizer = _trained_tokenizer(workload)
    except (UsageError, ImportError) as error:
        return str(error)
    return [
        [list(tokenizer(f"{item.statement} {choice}")["input_ids"]) for choice in item.choices]
        for item in items()
    ]


def quality_prompts(workload: Workload, vocab_size: int, seed: int) -> torch.Tensor:
    """Prompts after which the arms are compared, int64 [batch, input_len]: text for trained weights
    with a tokenizer, since they are out of their depth after random tokens, else such tokens.
    """
    try:
        tokenizer = _trained_tokenizer(workload)
    except (UsageError, ImportError):  # as `questions` says, and the verdict with it
        return random_prompts(workload, vocab_size, seed)
    return text_prompts(workload, tokenizer, seed)


def text_prompts(workload: Workload, tokenizer: Any, seed: int) -> torch.Tensor:
    """The items with their right ends, in an order of its own for each prompt; int64 [batch,
    input_len].

    Raises:
        UsageError: the tokenizer makes no tokens.
    """
    draw = random.Random(seed)
    texts = [f"{item.statement} {item.choices[0]}." for item in items()]
    prompts: list[list[int]] = []
    for _ in range(workload.batch):
        tokens: list[int] = []
        while len(tokens) < workload.input_len:
            more = tokenizer(" ".join(draw.sample(texts, len(texts))))["input_ids"]
            if not more:
                raise UsageError(
                    f"the tokenizer of {workload.model} makes no tokens of text",
                    "repair its files, or use --weights random",
                )
            tokens += more
        prompts.append(tokens[: workload.input_len])
    return torch.tensor(prompts)


def answers(served: Serve, asked: Sequence[Question], batch: int) -> torch.Tensor:
    """Log-likelihoods of each question's choices; [questions, choices] float64.

    Args:
        batch: number of rows that are decoded at a time.
    """
    return torch.stack([_likelihoods(served, choices, batch) for choices in asked])


def judge(baseline: torch.Tensor, again: torch.Tensor, patched: torch.Tensor) -> TaskScore:
    """The score from log-likelihoods [items, choices]; the first choice is the right one."""
    right, right_again, ours = (each.argmax(1) == 0 for each in (baseline, again, patched))
    count, choices = baseline.shape
    worse, better = int((right & ~ours).sum()), int((~right & ours).sum())
    changed = int((right != right_again).sum())
    p_value = mcnemar(worse, better)
    low, high = _bootstrap(ours.double() - right.double())
    # noise: items that change between two runs of the baseline, in each direction
    detectable = detectable_drop(count, max(better, changed / 2) / count)
    base_pct, our_pct = 100 * float(right.double().mean()), 100 * float(ours.double().mean())
    broken = not bool(patched.isfinite().all())
    told = (
        f"{our_pct:.1f} % of {count} cloze items right, {base_pct:.1f} % without the patch "
        f"({worse} lost, {better} won, p = {p_value:.2g}; "
        f"two runs of the baseline differ on {changed})"
    )
    if detectable is not None:
        told += f"; a drop of {100 * detectable:.1f} points would be found"
    if base_pct <= 100 / choices:
        told += "; the baseline is at chance, so this proves nothing"
    if broken:
        told += "; log-likelihoods of the patched model are not finite"
    return TaskScore(
        items=count,
        chance_pct=100 / choices,
        baseline_pct=base_pct,
        patched_pct=our_pct,
        worse=worse,
        better=better,
        floor_changed=changed,
        p_value=p_value,
        difference_low_pct=100 * low,
        difference_high_pct=100 * high,
        detectable_pct=None if detectable is None else 100 * detectable,
        margin_shift=0.0 if broken else float((_margins(patched) - _margins(baseline)).mean()),
        passed=p_value > ALPHA and not broken,
        reason=told,
    )


def mcnemar(worse: int, better: int) -> float:
    """One-sided exact p-value of so many pairs or more turning worse, if both directions were
    equally likely.
    """
    return float(binom.sf(worse - 1, worse + better, 0.5)) if worse else 1.0


def detectable_drop(count: int, noise: float) -> float | None:
    """Smallest drop (share of `count` items) that the test at 5 % finds with 80 % power.

    Args:
        noise: share of items that turn better, and that turn worse besides the drop, by chance.
    """
    worse = np.arange(count + 1)
    # the fewest losses that are significant with so many wins
    needed = np.array([_fewest(gains, count) for gains in range(count + 1)])

    def power(drop: float) -> float:
        gains = binom.pmf(worse, count, noise)
        losing = min((noise + drop) / (1 - noise), 1.0)
        found = binom.sf(needed - 1, count - worse, losing)
        return float((gains * found).sum())

    low, high = 0.0, 1.0 - 2 * noise
    if high <= 0 or power(high) < POWER:
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


def _fewest(gains: int, count: int) -> int:
    losses = gains
    while losses <= count and mcnemar(losses, gains) > ALPHA:
        losses += 1
    return losses


def _margins(likelihoods: torch.Tensor) -> torch.Tensor:
    return likelihoods[:, 0] - likelihoods[:, 1:].amax(1)


def _bootstrap(differences: torch.Tensor) -> tuple[float, float]:
    drawn = np.random.default_rng(0).choice(differences.numpy(), (BOOTSTRAPS, len(differences)))
    low, high = np.quantile(drawn.mean(1), [0.025, 0.975])
    return float(low), float(high)


def _likelihoods(served: Serve, choices: Question, batch: int) -> torch.Tensor:
    """Log-likelihood of each choice, given the tokens that all choices of an item share; [choices]
    float64.

    Decodes as many rows as the workload's batch, so that the shapes are those that are timed. More
    choices than that take several rounds; the last one is filled up with repetitions.
    """
    # tokenizers may merge across the space, so compare tokens to find the shared prefix
    columns = enumerate(zip(*choices, strict=False))
    shortest = min(map(len, choices))
    shared = next((at for at, tokens in columns if len(set(tokens)) > 1), shortest - 1)
    begin = max(shared - DECODED, 1)
    width = max(map(len, choices)) - begin
    found: list[float] = []
    while len(found) < len(choices):
        rows = [choices[min(len(found) + row, len(choices) - 1)] for row in range(batch)]
        prompts = torch.tensor([row[:begin] for row in rows])
        # padding of shorter choices is arbitrary, since no earlier position can see it
        forced = torch.tensor([(row[begin:] + [row[-1]] * width)[:width] for row in rows])
        likely = served(prompts, forced).double().log_softmax(-1)
        of_tokens = likely.gather(2, forced[:, :, None]).squeeze(2)
        found += [
            float(of_tokens[index, : len(row) - begin].sum()) for index, row in enumerate(rows)
        ]
    return torch.tensor(found[: len(choices)], dtype=torch.float64)


def _trained_tokenizer(workload: Workload) -> Any:
    if workload.weights == "random":
        raise UsageError(
            "the weights are random, so both arms would score at chance",
            "use --weights local or hub for a task score",
        )
    return tokenizer_of(workload)


def tokenizer_of(workload: Workload) -> Any:
    """The tokenizer beside the workload's weights.

    Raises:
        UsageError: there is none.
    """
    from transformers import AutoTokenizer

    name = weights_id(workload)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=workload.weights == "local")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no tokenizer beside the weights of {name}: {str(error).splitlines()[0]}",
            "add the tokenizer's files, or use --weights random for a verdict without a task score",
        ) from error
