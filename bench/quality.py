"""Is it still the same model? Logits of both arms over the same tokens, against higher precision.

The baseline is not right either: its own error against the same weights in higher precision is the
yardstick. A patched model may err 1.25 times as much in the root mean square, 1.5 times in mean KL
divergence and twice at the worst logit; where the two arms would pick different tokens, the
baseline's gap between them must be small enough for those errors to explain it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.comparison import Quality
from bench.engines import Engine
from bench.throughput import Arms

RMSE_FACTOR = 1.25
KL_FACTOR = 1.5
MAX_FACTOR = 2.0
TINY = 1e-9
CHUNK = 64
"""Positions whose float64 softmax is held at once."""


def assess(engine: Engine, arms: Arms, seed: int, steps: int) -> Quality:
    """Compare both arms over tokens that the baseline itself generates.

    Args:
        seed: of the prompts.
        steps: decode steps; with prefill's token, `steps + 1` positions a sequence are compared.
    """
    prompts = engine.prompts(seed)
    with arms["baseline"]():
        picked = engine.generate(prompts, steps).tokens
    tokens = torch.cat([prompts, picked], dim=1)
    keep = picked.shape[1] + 1  # from the logits that choose the first generated token
    values = {}
    for arm in ("baseline", "patched"):
        with arms[arm]():
            values[arm] = _rows(engine.logits(tokens, keep))
    wide, how = engine.reference_logits(tokens, keep)
    return _compare(values["baseline"], values["patched"], _rows(wide), how)


def greedy_identical(
    engine: Engine, before: torch.Tensor, prompts: torch.Tensor, steps: int
) -> bool:
    """Whether the engine now gives bit for bit the greedy tokens it gave before."""
    return torch.equal(engine.generate(prompts, steps).tokens, before)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """[positions, vocabulary]: what chooses the generated tokens; the last chooses none."""
    return logits[:, :-1].reshape(-1, logits.shape[-1])


def _compare(
    baseline: torch.Tensor, patched: torch.Tensor, reference: torch.Tensor, how: str
) -> Quality:
    ours, theirs = _Errors(patched, reference), _Errors(baseline, reference)
    picks, other = baseline.argmax(-1), patched.argmax(-1)
    differ = (picks != other).nonzero().flatten()
    gap = baseline.gather(1, picks[:, None]) - baseline.gather(1, other[:, None])
    worst = float(gap.flatten()[differ].max()) if len(differ) else None
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
        self.largest = 0.0
        for got, right in _chunks(values, reference):
            difference = (got.double() - right.double()).abs()
            if not bool(difference.isfinite().all()):
                self.rmse = self.largest = self.mean_kl = float("inf")
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
