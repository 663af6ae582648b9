"""Logits of vLLM over forced tokens, and its expert selection.

Both access the model of this process, and `model.compute_logits`, which both model runners call
outside CUDA graphs with one row per request. They differ in where the batch is:

- V1 (`v1/worker/gpu_model_runner.py`): rows are in the order of `input_batch.req_ids`, and
  `discard_request_mask` marks requests whose prompt is not complete yet.
- V2 (`v1/worker/gpu/model_runner.py`; every model from vLLM 0.33, dense ones since 0.25): `sample`
  gets the batch, which says how much of a prompt was computed before and is in this step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

from patcher.bench.engines import Decoding, Generation, entropy_pct
from patcher.bench.errors import PatcherError, VerificationError

REQUEST = "patcher-"
"""How the names of this engine's requests begin; their number follows."""
SampledRow = tuple[str, bool]
"""The name of a row's request, and whether its prompt is complete, so that a token is sampled."""
Recorder = Callable[[torch.Tensor, Iterable[SampledRow]], None]


class Running(Protocol):
    """An engine whose model is in this process."""

    requests: int
    """Number of requests until now; request ids contain it."""

    @property
    def runner(self) -> Any:
        """vLLM's `GPUModelRunner`, V1 or V2."""
        ...

    def prefill(self, prompts: torch.Tensor) -> Decoding: ...
    def decode(self, decoding: Decoding, steps: int) -> None: ...
    def release(self, decoding: Decoding) -> None: ...
    def generate(self, prompts: torch.Tensor, steps: int) -> Generation: ...


def served_logits(engine: Running, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Logits of decode over forced tokens.

    Args:
        engine: the engine.
        prompts: token ids, int64 of shape [batch, input_len].
        forced: token ids, int64 of shape [batch, steps + 1]; step `i` continues with column `i`.

    Returns:
        Logits, float32 of shape [batch, steps + 1, vocabulary] on the CPU.

    Raises:
        PatcherError: the engine decoded other tokens.
    """
    with forcing(engine.runner, forced, engine.requests) as seen:
        decoding = engine.prefill(prompts)
        engine.decode(decoding, forced.shape[1] - 1)
        engine.release(decoding)
    if not torch.equal(decoding.tokens(), forced):
        raise PatcherError("vLLM did not decode the tokens that it was forced to")
    return torch.stack([torch.stack(rows[: forced.shape[1]]) for rows in seen])


@contextmanager
def forcing(runner: Any, forced: torch.Tensor, first: int) -> Iterator[list[list[torch.Tensor]]]:
    """Record the logits of each request, and then force its token.

    Args:
        runner: vLLM's `GPUModelRunner`, V1 or V2.
        forced: token ids, int64 of shape [batch, steps + 1].
        first: number of the request of the first row of `forced`.

    Raises:
        VerificationError: the runner is neither.
    """
    wanted: list[list[int]] = forced.tolist()
    seen: list[list[torch.Tensor]] = [[] for _ in wanted]
    sampled = {"V1": _v1_rows, "V2": _v2_rows}[runner_kind(runner)]

    def record(logits: torch.Tensor, rows: Iterable[SampledRow]) -> None:
        for row, (name, complete) in enumerate(rows):
            # vLLM appends a suffix to the name; dummy runs have names of their own
            index = int(name.split("-")[1]) - first if name.startswith(REQUEST) else -1
            if index < 0 or not complete:
                continue
            step = len(seen[index])
            seen[index].append(logits[row].to("cpu", torch.float32, copy=True))
            if step < len(wanted[index]):
                logits[row, wanted[index][step]] = torch.inf

    with sampled(runner, record):
        yield seen


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


@contextmanager
def _v1_rows(runner: Any, record: Recorder) -> Iterator[None]:
    """Give `record` the logits of each step of a V1 runner, and their rows."""
    original = runner.model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = original(*args, **kwargs)
        names = runner.input_batch.req_ids[: len(logits)]
        unfinished = runner.discard_request_mask.np
        record(logits, [(name, not unfinished[row]) for row, name in enumerate(names)])
        return logits

    with _replaced(runner.model, "compute_logits", compute_logits):
        yield


@contextmanager
def _v2_rows(runner: Any, record: Recorder) -> Iterator[None]:
    """Give `record` the logits of each step of a V2 runner, and their rows.

    The runner also computes logits of prompts, outside of `sample`; these are left alone.
    """
    compute, choose = runner.model.compute_logits, runner.sample
    batches: list[Any] = []

    def sample(hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if input_batch.num_draft_tokens:
            raise PatcherError("logits of an engine that drafts tokens cannot be forced")
        batches.append(input_batch)
        try:
            return choose(hidden_states, input_batch, *args, **kwargs)
        finally:
            batches.pop()

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = compute(*args, **kwargs)
        if batches:
            batch = batches[-1]
            done = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
            complete = (done >= batch.prefill_len_np).tolist()
            record(logits, zip(batch.req_ids, complete, strict=True))
        return logits

    with (
        _replaced(runner, "sample", sample),
        _replaced(runner.model, "compute_logits", compute_logits),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Give an object another method, and take it away again."""
    own = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def routing_entropy_pct(engine: Running, prompts: torch.Tensor, steps: int) -> float | None:
    """Mean entropy of expert selection in decode, in percent of uniform; None without experts.

    The engine must run without compilation, since compiled code does not call modules and hooks.
    """
    blocks = [module for module in engine.runner.model.modules() if _routes(module)]
    if not blocks:
        return None
    counts = torch.zeros(len(blocks), blocks[0].num_experts)

    def hook(index: int, top: int) -> Any:
        def count(_module: Any, _args: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            if logits.shape[0] == prompts.shape[0]:  # decode: one row per sequence
                picked = logits.topk(top, dim=-1).indices.flatten().cpu()
                counts[index] += torch.bincount(picked, minlength=counts.shape[1])

        return count

    handles = [
        block.router.register_forward_hook(hook(index, block.experts_per_token))
        for index, block in enumerate(blocks)
    ]
    try:
        engine.generate(prompts, steps)
    finally:
        for handle in handles:
            handle.remove()
    if not bool(counts.sum(dim=1).all()):
        raise PatcherError("a router of the model was never called in decode")
    return entropy_pct(counts)


def _routes(module: Any) -> bool:
    """Whether a module routes to experts, as `MLPBlock` of vLLM's models/gpt_oss.py does."""
    return all(hasattr(module, name) for name in ("router", "num_experts", "experts_per_token"))
