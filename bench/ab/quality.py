"""Is it still the same model? Three tests, each relative to the baseline's own error.

1. Logits over the same tokens, after text if the weights are trained. Both arms run as served:
   prefill, then one token per step through the cache, so that shapes are those that are timed. The
   tokens are forced, so that one early pick does not decide. The reference is the same weights in
   higher precision, and the baseline's own error against it sets the limits: the worst of two runs,
   if the engine does not repeat itself, and of one in which each sequence is served alone, since an
   engine rounds otherwise in another batch. On text, a few positions of a trained model have most
   of the divergence: Qwen2.5-Coder-1.5B, alone in place of four at a time, has 4.7 times the
   largest. That counts but for the root mean square. A patched model may have 1.25 times the root
   mean square error, 1.5 times the mean KL divergence, twice the error of the worst logit, and four
   times the 99th percentile and the maximum of the divergence by position. The last two depend on a
   few positions: other rounding in every matmul of `gpt-oss-tiny` moved them by up to 1.9 times in
   24 runs. An error of one rounding of float32 is allowed besides: an engine in float32 may agree
   with its reference to the last bit.
2. Greedy picks. Where the arms pick different tokens, the baseline's logit gap between them must be
   small enough for errors of such gaps at that position to explain it: of the lead of the largest
   logit over the next ten, twice the baseline's and up to twice that for the patch's own. Errors of
   single logits explain too much: in SmolLM2-135M in bfloat16 all logits of a position shift by up
   to 0.85 together, which changes no pick. So does the worst position: after random tokens one of
   132 in Qwen2.5-Coder-1.5B errs by 3.8, by which 121 positions were near ties.
3. A task, if the weights are trained: see `patcher.bench.ab.cloze`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from patcher.bench.ab import cloze
from patcher.bench.ab.logits import (
    NOT_FINITE,
    is_finite,
    larger,
    logit_error,
    served_alone,
    served_logits,
)
from patcher.bench.ab.records import LogitError, Quality, TaskScore
from patcher.bench.ab.windows import Arms
from patcher.bench.engines import Engine
from patcher.bench.stats.comparison import Arm

RMSE_FACTOR = 1.25
KL_FACTOR = 1.5
TAIL_KL_FACTOR = 4.0
MAX_FACTOR = 2.0
LOCAL_FACTOR = 2.0
"""Of the baseline's error of leads at one position, which is drawn anew for other rounding."""
LEADING = 10
"""Tokens after the best one that a patch may pick in its place."""
TINY = 1e-9
ORDER: Sequence[Arm] = ("baseline", "baseline", "patched")
"""The runs of each test."""
ROUNDING = torch.finfo(torch.float32).eps
"""Relative error that every patch may have, since logits are compared in float32."""


def assess(engine: Engine, arms: Arms, seed: int, steps: int) -> Quality:
    """Compare both arms over tokens that the baseline generates, then on the task.

    Args:
        seed: seed of the prompts.
        steps: decode steps; with prefill's token, `steps + 1` positions per sequence are compared.
            Four copies of their logits are in memory, in float32 on the CPU.
    """
    prompts = cloze.quality_prompts(engine.workload, engine.vocab_size, seed)
    with arms["baseline"]():
        picked = engine.generate(prompts, steps).tokens
    tokens = torch.cat([prompts, picked], dim=1)

    def served(arm: Arm) -> torch.Tensor:
        with arms[arm]():
            return served_logits(engine, prompts, picked).flatten(0, 1)

    # the baseline's runs come first, so that a patch cannot increase its error
    with arms["baseline"]():
        alone = served_alone(partial(served_logits, engine), prompts, picked)
    baseline, again, patched = map(served, ORDER)
    # from the logits that choose the first generated token; the last logits choose none
    wide, how = engine.reference_logits(tokens, picked.shape[1] + 1)
    alone = None if alone is None else alone.flatten(0, 1)
    found = compare_logits(baseline, again, patched, wide[:, :-1].flatten(0, 1), how, alone)
    asked = cloze.questions(engine.workload)
    if isinstance(asked, str):
        return without_task(found, asked)

    def answers(arm: Arm) -> torch.Tensor:
        with arms[arm]():
            return cloze.answers(partial(served_logits, engine), asked, engine.workload.batch)

    return with_task(found, cloze.judge(*map(answers, ORDER)))


def greedy_identical(
    engine: Engine, before: torch.Tensor, prompts: torch.Tensor, steps: int
) -> bool:
    """Whether the engine now gives bit for bit the greedy tokens it gave before."""
    return torch.equal(engine.generate(prompts, steps).tokens, before)


def compare_logits(
    baseline: torch.Tensor,
    again: torch.Tensor,
    patched: torch.Tensor,
    reference: torch.Tensor,
    how: str,
    alone: torch.Tensor | None = None,
) -> Quality:
    """The first two tests, from logits [positions, vocabulary] over the same tokens.

    Args:
        again: logits of a second run of the baseline.
        reference: logits in higher precision.
        how: how the reference was computed, in words.
        alone: the baseline's, with each sequence by itself, at the first of these positions.
    """
    ours, own = logit_error(patched, reference), logit_error(baseline, reference)
    floor, between = logit_error(again, baseline), logit_error(patched, baseline)
    theirs = own if torch.equal(again, baseline) else larger(own, logit_error(again, reference))
    one_by_one = None if alone is None else logit_error(alone, reference[: len(alone)])
    if one_by_one is not None:  # not in the mean of all logits, which no few positions decide
        theirs = larger(theirs, one_by_one).model_copy(update={"rmse": theirs.rmse})
    allowed = _allowances(baseline, again, patched, reference, alone)
    changed, gaps = _changes(baseline, patched)
    over = gaps - allowed[changed]
    furthest = int(over.argmax()) if len(gaps) else None
    worst = None if furthest is None else float(gaps[furthest])
    allowance = float(allowed.median() if furthest is None else allowed[changed][furthest])
    pick = ("gap at a changed pick", worst or 0.0, allowance)
    broken = [
        f"{name} {got:.3g} over {limit:.3g}"
        for name, got, limit in (*_limits(ours, theirs, reference), pick)
        if not got <= limit
    ]
    broken += [
        f"the {arm}'s logits are not finite"
        for arm, errors in (("baseline", theirs), ("patched model", ours), ("baseline", one_by_one))
        if errors is not None and not is_finite(errors)
    ]
    count = len(baseline)
    base_right, our_right = (100 * (1 - errors.flips / count) for errors in (own, ours))
    agreement = 100 * (1 - len(gaps) / count)
    fine = (
        f"error against {how} is {ours.rmse / max(theirs.rmse, TINY):.3f} of the baseline's own, "
        f"{agreement:.1f} % of greedy picks agree over {count} positions (baseline with that "
        f"reference: {base_right:.1f} %, patched: {our_right:.1f} %)"
    )
    return Quality(
        positions=count,
        reference=how,
        baseline_rmse=own.rmse,
        patched_rmse=ours.rmse,
        baseline_max_error=own.max_error,
        patched_max_error=ours.max_error,
        baseline_mean_kl=own.mean_kl,
        patched_mean_kl=ours.mean_kl,
        greedy_agreement_pct=agreement,
        baseline_reference_agreement_pct=base_right,
        patched_reference_agreement_pct=our_right,
        worst_flip_margin=worst,
        flip_allowance=allowance,
        baseline_p99_kl=own.p99_kl,
        patched_p99_kl=ours.p99_kl,
        baseline_max_kl=own.max_kl,
        patched_max_kl=ours.max_kl,
        floor=floor,
        between=between,
        alone=one_by_one,
        near_tie_flips=int((over <= 0).sum()),
        near_ties=int((lead(baseline) <= allowed).sum()),
        passed=not broken,
        reason="; ".join(broken) or fine,
    )


def lead(logits: torch.Tensor) -> torch.Tensor:
    """By how much the largest of the logits [positions, vocabulary] leads the next; [positions]."""
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return first - second


def _allowances(
    baseline: torch.Tensor,
    again: torch.Tensor,
    patched: torch.Tensor,
    reference: torch.Tensor,
    alone: torch.Tensor | None,
) -> torch.Tensor:
    """By how much the pick may lead where another one is made; float64 [positions]."""
    rounding = 2 * ROUNDING * _largest(reference)
    own = torch.maximum(_gap_errors(baseline, reference), _gap_errors(again, reference))
    if alone is not None:
        part = slice(len(alone))
        own[part] = torch.maximum(own[part], _gap_errors(alone, reference[part]))
    own = LOCAL_FACTOR * own + rounding
    return own + torch.minimum(_gap_errors(patched, reference), MAX_FACTOR * own)


def _gap_errors(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest error of the largest logit's lead over the next ones; float64 [positions]."""
    found = values.topk(min(LEADING + 1, values.shape[-1]), dim=-1)
    errors = found.values.double() - reference.gather(-1, found.indices).double()
    worst = (errors[:, :1] - errors[:, 1:]).abs().amax(-1)
    return worst.nan_to_num(NOT_FINITE, posinf=NOT_FINITE)


def _largest(logits: torch.Tensor) -> float:
    largest = float(logits.abs().max())
    return largest if math.isfinite(largest) else 0.0


def _changes(baseline: torch.Tensor, patched: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the picks differ, bool [positions], and the baseline's logit gap between its pick and
    the patched model's there, float64.
    """
    picks, other = baseline.argmax(-1), patched.argmax(-1)
    gaps = baseline.gather(1, picks[:, None]) - baseline.gather(1, other[:, None])
    changed = picks != other
    return changed, gaps.flatten()[changed].double().nan_to_num(NOT_FINITE, posinf=NOT_FINITE)


def _limits(
    ours: LogitError, theirs: LogitError, reference: torch.Tensor
) -> list[tuple[str, float, float]]:
    scale = float(reference.float().square().mean().sqrt())
    usual = ROUNDING * scale if math.isfinite(scale) else 0.0
    factors = (
        ("rmse", "rmse", RMSE_FACTOR, usual),
        ("mean KL", "mean_kl", KL_FACTOR, 0.0),
        ("99th percentile of KL", "p99_kl", TAIL_KL_FACTOR, 0.0),
        ("largest KL", "max_kl", TAIL_KL_FACTOR, 0.0),
        ("largest error", "max_error", MAX_FACTOR, ROUNDING * _largest(reference)),
    )
    return [
        (name, getattr(ours, field), factor * getattr(theirs, field) + max(rounding, TINY))
        for name, field, factor, rounding in factors
    ]


def without_task(found: Quality, refusal: str) -> Quality:
    """The quality of a model that has no task, whose prompts are no text either.

    Args:
        refusal: why it has none.
    """
    return found.model_copy(update={"task_refusal": refusal, "prompts": "random tokens"})


def with_task(found: Quality, task: TaskScore) -> Quality:
    """The quality with the third test, of a model that was asked after text."""
    failed = [rung.reason for rung in (found, task) if not rung.passed]
    return found.model_copy(
        update={
            "task": task,
            "prompts": "text",
            "passed": not failed,
            "reason": "; ".join(failed or [found.reason, task.reason]),
        }
    )
