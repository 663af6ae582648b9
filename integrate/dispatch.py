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


@dataclass(slots=True)
class _Case:
    """What is known of one combination of shapes, dtypes and devices."""

    refusal: str | None
    label: str
    proven: bool
    """Whether the kernel may be run on the caller's tensors straight away."""


class AddNormDispatcher:
    """Calls the patched `fused_add_rms_norm(input, residual, weight, epsilon)` or says why not.

    `strict` (measuring): a kernel that raises on a call its guards allow is an error.
    Otherwise (serving) the first call of each shape works on copies, so that a kernel that raises
    there leaves the caller's tensors whole: that call and every later one falls back, counted and
    logged once. One that raises later has had its hands on the caller's tensors, which cannot be
    trusted any more: that call raises, and every later one falls back.
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
        self.book, self._calls = book, book.calls
        self._known: dict[tuple[object, ...], _Case] = {}
        self._broken: str | None = None
        self._grad_enabled = torch.is_grad_enabled

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
        key = (
            input.shape,
            residual.shape,
            weight.shape,
            input.dtype,
            residual.dtype,
            weight.dtype,
            input.device,
            residual.device,
            weight.device,
        )
        case = self._known.get(key)
        if case is None:
            case = self._known[key] = self._look(input, residual, weight)
        # this path is walked twice a layer and token: no call that it can do without
        refusal = case.refusal or self._broken
        if refusal is None:
            if self._grad_enabled():
                refusal = "gradients are on"
            elif not (
                input.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()
            ):
                refusal = "not contiguous"
        if refusal is not None:
            self.book.fallbacks[refusal] += 1
            return False
        if self._strict:
            self._kernel(input, residual, weight, epsilon)
        elif not self._serve(case, input, residual, weight, epsilon):
            return False
        self._calls[case.label] += 1
        return True

    def _serve(
        self,
        case: _Case,
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
    ) -> bool:
        """Run the kernel, where a request must survive a kernel that raises."""
        try:
            if case.proven:
                self._kernel(input, residual, weight, epsilon)
            else:
                copies = input.clone(), residual.clone()
                self._kernel(*copies, weight, epsilon)
                input.copy_(copies[0])
                residual.copy_(copies[1])
                case.proven = True
        except Exception as error:
            self._broken = f"the patched kernel raised {type(error).__name__}"
            log.exception("%s: the engine's own runs from now on", self._broken)
            self.book.fallbacks[self._broken] += 1
            if case.proven:
                raise
            return False
        return True

    def _look(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> _Case:
        """Checks that depend on shape, dtype and device alone; done once for each."""
        guards = self._guards
        hidden = input.shape[-1]
        short = str(input.dtype).removeprefix("torch."), str(weight.dtype).removeprefix("torch.")
        label = f"{self._name} tokens={input.shape[0]} hidden={hidden} {short[0]}/{short[1]}"
        refusal = None
        if input.device.type != guards.device:
            refusal = f"device {input.device.type}"
        elif not (input.device == residual.device == weight.device):
            refusal = "tensors on several devices"
        elif (input.dtype, weight.dtype) not in guards.dtypes or residual.dtype != input.dtype:
            refusal = f"dtype {short[0]}/{short[1]}"
        elif input.dim() != 2 or input.shape != residual.shape or weight.shape != (hidden,):
            refusal = "shapes that do not fit together"
        elif hidden % guards.hidden_multiple_of:
            refusal = f"hidden {hidden} is no multiple of {guards.hidden_multiple_of}"
        elif guards.hidden_max is not None and hidden > guards.hidden_max:
            refusal = f"hidden {hidden} is over {guards.hidden_max}"
        return _Case(refusal, label, proven=False)
