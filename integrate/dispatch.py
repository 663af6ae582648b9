"""Which kernel runs, per call: the patched one where its guards hold, else the engine's own.

This is what a served engine imports: torch and the standard library only.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

log = logging.getLogger("patcher")


@dataclass(frozen=True)
class DispatchGuards:
    """Where the patched kernel may be called."""

    device: str
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]]
    """(activation, weight) pairs."""
    hidden_multiple_of: int = 1
    hidden_max: int | None = None


class ReceiptBook:
    """Counts what ran in this process: patched calls by shape, fallbacks by reason."""

    def __init__(self, patch_id: str, digest: str) -> None:
        self.patch_id, self.digest, self.pid = patch_id, digest, os.getpid()
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()


class AddNormDispatcher:
    """Calls the patched `fused_add_rms_norm(input, residual, weight, epsilon)` or says why not.

    `strict` (measuring): a kernel that raises on a call its guards allow is an error. Otherwise
    (serving) that call and every later one falls back, counted and logged once.
    """

    def __init__(
        self,
        name: str,
        kernel: Callable[..., object],
        guards: DispatchGuards,
        book: ReceiptBook,
        *,
        strict: bool = True,
    ) -> None:
        self._name, self._kernel, self._guards = name, kernel, guards
        self._strict = strict
        self.book = book
        self._known: dict[tuple[object, ...], tuple[str | None, str]] = {}
        self._broken: str | None = None

    def __call__(
        self,
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
    ) -> bool:
        """Run the kernel in place and give True, or touch nothing and give False.

        Args:
            input, residual: [tokens, hidden] of the same dtype.
            weight: [hidden].
        """
        key = (input.shape, residual.shape, weight.shape, input.dtype, residual.dtype, weight.dtype)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._look(input, residual, weight)
        refusal, label = known
        if refusal is None:
            refusal = self._refuse_call(input, residual, weight)
        if refusal is not None:
            self.book.fallbacks[refusal] += 1
            return False
        if self._strict:
            self._kernel(input, residual, weight, epsilon)
        else:
            try:
                self._kernel(input, residual, weight, epsilon)
            except Exception as error:
                self._broken = f"the patched kernel raised {type(error).__name__}"
                log.exception("%s: falling back to the engine's own from now on", self._broken)
                self.book.fallbacks[self._broken] += 1
                return False
        self.book.calls[label] += 1
        return True

    def _look(
        self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[str | None, str]:
        """Checks that depend on shape, dtype and device alone; done once for each."""
        guards = self._guards
        hidden = input.shape[-1]
        short = str(input.dtype).removeprefix("torch."), str(weight.dtype).removeprefix("torch.")
        label = f"{self._name} tokens={input.shape[0]} hidden={hidden} {short[0]}/{short[1]}"
        refusal = None
        if input.device.type != guards.device:
            refusal = f"device {input.device.type}"
        elif (input.dtype, weight.dtype) not in guards.dtypes or residual.dtype != input.dtype:
            refusal = f"dtype {short[0]}/{short[1]}"
        elif input.shape != residual.shape or weight.shape != (hidden,):
            refusal = "shapes that do not fit together"
        elif hidden % guards.hidden_multiple_of:
            refusal = f"hidden {hidden} is no multiple of {guards.hidden_multiple_of}"
        elif guards.hidden_max is not None and hidden > guards.hidden_max:
            refusal = f"hidden {hidden} is over {guards.hidden_max}"
        return refusal, label

    def _refuse_call(
        self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> str | None:
        """Checks that each call needs."""
        if self._broken is not None:
            return self._broken
        if torch.is_grad_enabled():
            return "gradients are on"
        if not (input.device == residual.device == weight.device):
            return "tensors on several devices"
        if not (input.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()):
            return "not contiguous"
        return None
