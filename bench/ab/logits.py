"""Logits as served, and the errors between two sets of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from patcher.bench.ab.records import LogitError
from patcher.bench.engines import Engine

ALONE = 16
"""Sequences, the first ones, that are also served each by itself."""
Serve = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Prompts [batch, length] and forced tokens [batch, steps + 1] to logits [batch, steps + 1,
vocabulary]."""
NOT_FINITE = 1e30
"""Error of logits that are not finite; finite itself, since JSON has no infinity."""
CHUNK = 64
"""Number of positions whose float64 softmax is in memory at once."""


def served_logits(engine: Engine, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Logits [batch, steps + 1, vocabulary], float32 on the CPU, of decode over `forced` tokens.

    Args:
        forced: [batch, steps + 1]; column `i` is fed to step `i`, the last one to no step.
    """
    with _logits_seen(engine.model) as seen:
        decoding = engine.prefill(prompts)
        for step in range(forced.shape[1] - 1):
            column = forced[:, step : step + 1]
            decoding.picked[-1] = column.to(decoding.picked[-1].device)
            engine.decode(decoding, 1)
    return torch.cat(seen, dim=1)


def served_alone(serve: Serve, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor | None:
    """Logits of the first sequences, each served by itself, whose sums an engine may round
    otherwise than in a batch; None if they are by themselves anyway.

    Args:
        serve: gives the logits of a batch, as `served_logits`.
    """
    if len(prompts) == 1:
        return None
    rows = range(min(len(prompts), ALONE))
    return torch.cat([serve(prompts[row : row + 1], forced[row : row + 1]) for row in rows])


@contextmanager
def _logits_seen(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The logits of the last position of each forward of the model."""
    seen: list[torch.Tensor] = []

    def look(_module: Any, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        logits: Any = getattr(output, "logits", first)
        seen.append(logits[:, -1:].float().cpu())

    handle = model.register_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def logit_error(values: torch.Tensor, reference: torch.Tensor) -> LogitError:
    """Error of logits [positions, vocabulary] against others of the same shape and tokens."""
    flips = int((values.argmax(-1) != reference.argmax(-1)).sum())
    if torch.equal(values, reference) and bool(values.isfinite().all()):
        return LogitError(rmse=0, max_error=0, mean_kl=0, p99_kl=0, max_kl=0, flips=flips)
    squares = largest = 0.0
    divergences = []
    for got, right in _chunks(values, reference):
        difference = (got.double() - right.double()).abs()
        if not bool(difference.isfinite().all()):
            lost = NOT_FINITE
            return LogitError(
                rmse=lost, max_error=lost, mean_kl=lost, p99_kl=lost, max_kl=lost, flips=flips
            )
        squares += float(difference.square().sum())
        largest = max(largest, float(difference.max()))
        truth, guess = right.double().log_softmax(-1), got.double().log_softmax(-1)
        divergences.append((truth.exp() * (truth - guess)).sum(-1))
    by_position = torch.cat(divergences).clamp_min(0.0)  # a rounding error may make it negative
    return LogitError(
        rmse=math.sqrt(squares / values.numel()),
        max_error=largest,
        mean_kl=float(by_position.mean()),
        p99_kl=float(by_position.quantile(0.99)),
        max_kl=float(by_position.max()),
        flips=flips,
    )


def is_finite(error: LogitError) -> bool:
    return error.rmse != NOT_FINITE


def larger(first: LogitError, second: LogitError) -> LogitError:
    """The larger value of each figure."""
    both = zip(first, second, strict=True)
    return LogitError(**{name: max(one, other) for (name, one), (_, other) in both})


def _chunks(
    first: torch.Tensor, second: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for begin in range(0, len(first), CHUNK):
        yield first[begin : begin + CHUNK], second[begin : begin + CHUNK]
