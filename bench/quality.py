"""Is it still the same model? Logits of both arms over the same tokens, against higher precision.

Both arms run as they are served, prefill and then one token a step through the cache, so that the
shapes compared are the shapes timed; the tokens are forced, so that one early pick does not decide.
The baseline is not right either: its own error against the same weights in higher precision is the
yardstick. A patched model may err 1.25 times as much in the root mean square, 1.5 times in mean KL
divergence and twice at the worst logit; where the two arms would pick different tokens, the
baseline's gap between them must be small enough for those errors to explain it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.comparison import Quality
from bench.engines import Engine
from bench.windows import Arms

RMSE_FACTOR = 1.25
KL_FACTOR = 1.5
MAX_FACTOR = 2.0
TINY = 1e-9
NOT_FINITE = 1e30
"""Stands for the error of logits that are not finite: a number stays one in JSON."""
CHUNK = 64
"""Positions whose float64 softmax is held at once."""


def assess(engine: Engine, arms: Arms, seed: int, steps: int) -> Quality:
    """Compare both arms over tokens that the baseline itself generates.

    Args:
        seed: of the prompts.
        steps: decode steps; with prefill's token, `steps + 1` positions a sequence are compared.
            Their logits are held three times over, in float32 on the CPU.
    """
    prompts = engine.prompts(seed)
    with arms["baseline"]():
        picked = engine.generate(prompts, steps).tokens
    tokens = torch.cat([prompts, picked], dim=1)
    values = {}
    for arm in ("baseline", "patched"):
        with arms[arm]():
            values[arm] = served_logits(engine, prompts, picked).flatten(0, 1)
    # from the logits that choose the first generated token; the last choose none
    wide, how = engine.reference_logits(tokens, picked.shape[1] + 1)
    return _compare(values["baseline"], values["patched"], wide[:, :-1].flatten(0, 1), how)


def served_logits(engine: Engine, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Logits [batch, steps + 1, vocabulary], float32 on the CPU, of decode over `forced` tokens.

    Args:
        forced: [batch, steps + 1]; column `i` is fed to step `i`, the last to none.
    """
    with _logits_seen(engine.model) as seen:
        decoding = engine.prefill(prompts)
        for step in range(forced.shape[1] - 1):
            column = forced[:, step : step + 1]
            decoding.picked[-1] = column.to(decoding.picked[-1].device)
            engine.decode(decoding, 1)
    return torch.cat(seen, dim=1)


@contextmanager
def _logits_seen(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What each forward of the model gives for its last position."""
    seen: list[torch.Tensor] = []

    def look(_module: Any, _args: Any, output: Any) -> None:
        seen.append(output.logits[:, -1:].float().cpu())

    handle = model.register_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def greedy_identical(
    engine: Engine, before: torch.Tensor, prompts: torch.Tensor, steps: int
) -> bool:
    """Whether the engine now gives bit for bit the greedy tokens it gave before."""
    return torch.equal(engine.generate(prompts, steps).tokens, before)


def compare_logits(
    baseline: torch.Tensor, patched: torch.Tensor, reference: torch.Tensor, how: str
) -> Quality:
    """The same of logits [positions, vocabulary] that processes of their own gave.

    Args:
        how: in words, how the reference was computed.
    """
    return _compare(baseline, patched, reference, how)


def _compare(
    baseline: torch.Tensor, patched: torch.Tensor, reference: torch.Tensor, how: str
) -> Quality:
    ours, theirs = _Errors(patched, reference), _Errors(baseline, reference)
    picks, other = baseline.argmax(-1), patched.argmax(-1)
    differ = (picks != other).nonzero().flatten()
    gap = baseline.gather(1, picks[:, None]) - baseline.gather(1, other[:, None])
    worst = float(gap.flatten()[differ].max()) if len(differ) else None
    if worst is not None and not math.isfinite(worst):
        worst = NOT_FINITE
    # two logits may move towards each other, each by what the arms differ from the truth
    allowance = 2 * (theirs.largest + min(ours.largest, MAX_FACTOR * theirs.largest))
    checks = (
        ("rmse", ours.rmse, RMSE_FACTOR * theirs.rmse + TINY),
        ("mean KL", ours.mean_kl, KL_FACTOR * theirs.mean_kl + TINY),
        ("largest error", ours.largest, MAX_FACTOR * theirs.largest + TINY),
        ("gap at a changed pick", worst or 0.0, allowance),
    )
    broken = [
        f"{name} {got:.3g} over {limit:.3g}" for name, got, limit in checks if not got <= limit
    ]
    broken += [
        f"the {arm}'s logits are not finite"
        for arm, errors in (("baseline", theirs), ("patched model", ours))
        if not errors.finite
    ]
    agreement = 100 * (1 - len(differ) / len(picks))
    right = reference.argmax(-1)
    base_right, our_right = (
        100 * float((picked == right).double().mean()) for picked in (picks, other)
    )
    fine = (
        f"error against {how} is {ours.rmse / max(theirs.rmse, TINY):.3f} of the baseline's own, "
        f"{agreement:.1f} % of greedy picks agree over {len(picks)} positions (baseline with that "
        f"reference: {base_right:.1f} %, patched: {our_right:.1f} %)"
    )
    return Quality(
        positions=len(picks),
        reference=how,
        baseline_rmse=theirs.rmse,
        patched_rmse=ours.rmse,
        baseline_max_error=theirs.largest,
        patched_max_error=ours.largest,
        baseline_mean_kl=theirs.mean_kl,
        patched_mean_kl=ours.mean_kl,
        greedy_agreement_pct=agreement,
        baseline_reference_agreement_pct=base_right,
        patched_reference_agreement_pct=our_right,
        worst_flip_margin=worst,
        flip_allowance=allowance,
        passed=not broken,
        reason="; ".join(broken) if broken else fine,
    )


class _Errors:
    """Error of logits [positions, vocabulary] against a reference of the same shape."""

    def __init__(self, values: torch.Tensor, reference: torch.Tensor) -> None:
        squares = kl = 0.0
        self.largest, self.finite = 0.0, True
        for got, right in _chunks(values, reference):
            difference = (got.double() - right.double()).abs()
            if not bool(difference.isfinite().all()):
                self.rmse = self.largest = self.mean_kl = NOT_FINITE
                self.finite = False
                return
            squares += float(difference.square().sum())
            self.largest = max(self.largest, float(difference.max()))
            truth, guess = right.double().log_softmax(-1), got.double().log_softmax(-1)
            kl += float((truth.exp() * (truth - guess)).sum())
        self.rmse = (squares / values.numel()) ** 0.5
        self.mean_kl = max(kl / values.shape[0], 0.0)


def _chunks(
    first: torch.Tensor, second: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for begin in range(0, len(first), CHUNK):
        yield first[begin : begin + CHUNK], second[begin : begin + CHUNK]
