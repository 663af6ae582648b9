"""Logits of vLLM over forced tokens, and its expert selection.

Both access the model of this process, as in vLLM 0.25.1 (the V1 `GPUModelRunner`, which gpt-oss
uses). `execute_model` calls `model.compute_logits` outside CUDA graphs with one row per request, in
the order of `input_batch.req_ids`. `discard_request_mask` marks requests whose prompt is not
complete yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from patcher.bench.engines import Decoding, Generation, entropy_pct
from patcher.bench.errors import PatcherError


class Running(Protocol):
    """An engine whose model is in this process."""

    requests: int
    """Number of requests until now; request ids contain it."""

    @property
    def runner(self) -> Any:
        """vLLM's `GPUModelRunner`."""
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
        runner: vLLM's `GPUModelRunner`.
        forced: token ids, int64 of shape [batch, steps + 1].
        first: number of the request of the first row of `forced`.
    """
    model = runner.model
    original, own = model.compute_logits, "compute_logits" in vars(model)
    wanted: list[list[int]] = forced.tolist()
    seen: list[list[torch.Tensor]] = [[] for _ in wanted]

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = original(*args, **kwargs)
        for row, name in enumerate(runner.input_batch.req_ids[: len(logits)]):
            # vLLM appends a suffix to the name
            index = int(name.split("-")[1]) - first
            if index < 0 or runner.discard_request_mask.np[row]:
                continue
            step = len(seen[index])
            seen[index].append(logits[row].to("cpu", torch.float32, copy=True))
            if step < len(wanted[index]):
                logits[row, wanted[index][step]] = torch.inf
        return logits

    model.compute_logits = compute_logits
    try:
        yield seen
    finally:
        if own:
            model.compute_logits = original
        else:
            del model.compute_logits


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
