"""A patch onto a model: what a bundle says, dispatch and patch point put together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from integrate.dispatch import AddNormDispatcher, DispatchGuards, ReceiptBook
from integrate.patch import Patch
from integrate.transformers import POINTS, GptOssDecoderLayers


def prepare(
    model: torch.nn.Module,
    patch: Patch,
    *,
    kernel: Callable[..., object],
    book: ReceiptBook | None = None,
    strict: bool = True,
) -> GptOssDecoderLayers:
    """The patch ready for this model: a context manager that can be entered again and again.

    While it is entered the patch is in; leaving restores exactly, also after an exception.

    Args:
        kernel: the patch's kernel, built and loaded (`bench.toolchains`).
        book: where calls are counted; a new one by default.

    Raises:
        VerificationError: the installed transformers or the model is not what the patch replaces.
    """
    patch.verify_target()
    guards = patch.manifest.guards
    dtypes = frozenset(
        (getattr(torch, choice["T"]), getattr(torch, choice["W"])) for choice in guards.dtypes
    )
    dispatch = AddNormDispatcher(
        patch.manifest.entry,
        kernel,
        DispatchGuards(guards.device, dtypes, guards.hidden_multiple_of, guards.hidden_max),
        book or ReceiptBook(patch.manifest.id, patch.digest),
        strict=strict,
    )
    return POINTS[patch.manifest.target.point](model, dispatch)
