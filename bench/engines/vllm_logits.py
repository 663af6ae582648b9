"""Logits of vLLM over forced tokens, under either of its model runners.

Both runners call `model.compute_logits` outside CUDA graphs, with one row per request and on each
tensor-parallel rank, as read in vLLM 0.25.1 to 0.33.0; the runner tells what the rows are:

- V1 (`v1/worker/gpu_model_runner.py`) keeps a batch, whose `req_ids` are the rows' requests.
  `discard_request_mask` marks requests whose prompt is not complete yet. A token is forced through
  its logit.
- V2 (`v1/worker/gpu/model_runner.py`), the default of every model from 0.33.0 on, passes each
  step's batch to `sample`, which also tells how many tokens each request got. A token is forced in
  what it returns. So it is the token that the next step begins with and the token that is copied
  out, also when steps are scheduled ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from patcher.bench.engines.vllm_workers import Running, on_each
from patcher.bench.errors import PatcherError, VerificationError

REQUEST = "patcher-"
"""Begins the id of each request; its number follows, and a suffix that vLLM appends."""


def runner_kind(runner: Any) -> Literal["V1", "V2"]:
    """Which of vLLM's two model runners a worker has; only V1 keeps a batch between steps.

    Raises:
        VerificationError: it is like neither.
    """
    if hasattr(runner, "input_batch"):
        return "V1"
    if hasattr(runner, "sample"):
        return "V2"
    raise VerificationError(
        f"{type(runner).__name__} is neither of vLLM's model runners", "serve with another vLLM"
    )


def served_logits(engine: Running, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Logits of decode over forced tokens.

    Args:
        engine: the engine.
        prompts: token ids, int64 of shape [batch, input_len].
        forced: token ids, int64 of shape [batch, steps + 1]; step `i` continues with column `i`.

    Returns:
        Logits, float32 of shape [batch, steps + 1, vocabulary] on the CPU.

    Raises:
        PatcherError: the engine decoded other tokens, or more than one token in a step.
    """
    with on_each(engine, forcing_worker, forced, engine.requests) as workers:
        decoding = engine.prefill(prompts)
        engine.decode(decoding, forced.shape[1] - 1)
        engine.release(decoding)
    if not torch.equal(decoding.tokens(), forced):
        raise PatcherError("vLLM did not decode the tokens that it was forced to")
    seen = next(each for each in workers if any(each))
    return torch.stack([torch.stack(rows[: forced.shape[1]]) for rows in seen])


@contextmanager
def forcing_worker(
    worker: Any, forced: torch.Tensor, first: int
) -> Iterator[list[list[torch.Tensor]]]:
    """As `forcing`, in a worker; only the first rank of a group keeps logits."""
    kept: bool = worker.is_driver_worker
    with forcing(worker.model_runner, forced, first, kept) as seen:
        yield seen


@contextmanager
def forcing(
    runner: Any, forced: torch.Tensor, first: int, kept: bool = True
) -> Iterator[list[list[torch.Tensor]]]:
    """Record the logits of each request, and force its tokens.

    Args:
        runner: vLLM's `GPUModelRunner`, V1 or V2.
        forced: token ids, int64 of shape [batch, steps + 1].
        first: number of the request of the first row of `forced`.
        kept: whether logits are recorded.

    Raises:
        VerificationError: the runner is neither.
    """
    tokens = _ForcedTokens(forced, first, kept)
    if runner_kind(runner) == "V1":
        with _replaced(runner.model, "compute_logits", _forcing_logits(runner, tokens)):
            yield tokens.seen
        return
    with _replaced(runner, "sample", _forcing_samples(runner, tokens)):
        yield tokens.seen


class _ForcedTokens:
    """The tokens of each request, and the logits that were recorded for it."""

    def __init__(self, forced: torch.Tensor, first: int, kept: bool) -> None:
        self.seen: list[list[torch.Tensor]] = [[] for _ in forced]
        self._first, self._kept = first, kept
        self._steps = [0 for _ in forced]
        self._wanted: list[list[int]] = forced.tolist()

    def take(self, request: str, logits: torch.Tensor) -> int | None:
        """Record a request's logits of one step.

        Returns:
            The token to force; None for an earlier request, or after the last forced token.
        """
        if not request.startswith(REQUEST):
            return None
        index = int(request.split("-")[1]) - self._first
        if index < 0:
            return None
        step = self._steps[index]
        self._steps[index] += 1
        if self._kept:
            self.seen[index].append(logits.to("cpu", torch.float32, copy=True))
        return self._wanted[index][step] if step < len(self._wanted[index]) else None


def _forcing_logits(runner: Any, tokens: _ForcedTokens) -> Any:
    """`compute_logits` of V1's model, whose logits then have the forced token as the largest."""
    original = runner.model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = original(*args, **kwargs)
        for row, name in enumerate(runner.input_batch.req_ids[: len(logits)]):
            if runner.discard_request_mask.np[row]:
                continue
            token = tokens.take(name, logits[row])
            if token is not None:
                logits[row, token] = torch.inf
        return logits

    return compute_logits


def _forcing_samples(runner: Any, tokens: _ForcedTokens) -> Any:
    """`sample` of V2's runner, which then returns the forced tokens."""
    original = runner.sample

    def sample(hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        with _watched(runner.model) as computed:
            result = original(hidden_states, input_batch, grammar_output)
        output, num_sampled, _ = result
        if len(computed) != 1 or len(computed[0]) != len(input_batch.req_ids):
            raise PatcherError("vLLM did not compute logits once, with one row for each request")
        # a request whose prompt is not complete yet gets no token
        for row, count in enumerate(num_sampled.tolist()):
            if count == 0:
                continue
            token = tokens.take(input_batch.req_ids[row], computed[0][row])
            if token is not None:
                output.sampled_token_ids[row, 0] = token
        return result

    return sample


@contextmanager
def _watched(model: Any) -> Iterator[list[torch.Tensor]]:
    """Copies of the logits that a model computes, on its device; samplers may write into them."""
    original = model.compute_logits
    computed: list[torch.Tensor] = []

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = original(*args, **kwargs)
        computed.append(logits.clone())
        return logits

    with _replaced(model, "compute_logits", compute_logits):
        yield computed


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Set a method of one object, and restore it."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
