"""vLLM's general plugin: installs patches in every worker, and only there.

vLLM 0.25.1 loads general plugins in the main process, in the engine core and in every worker,
including restarted ones. Only workers use a GPU and know their share of the model, so loading only
wraps `WorkerWrapperBase.init_device`. After it, device and parallel groups exist, but the model is
not yet built, compiled, warmed up or recorded. vLLM later runs every size eagerly before recording
it (`GPUModelRunner._warmup_and_capture`), which builds and proves the kernels for that size.

Without an enabled patch, the plugin imports only the standard library.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patcher.integrate.activation import Activation

log = logging.getLogger("patcher")


def register() -> None:
    """The entry point `vllm.general_plugins`; idempotent."""
    # never in serving: `patcher.bench.engines.vllm` sets it
    if os.environ.get("PATCHER_RANDOM_WEIGHTS"):
        from patcher.bench.engines.vllm_weights import register_loader

        register_loader()
    chosen = os.environ.get("PATCHER_PATCHES") or os.environ.get("TLLM_PATCHER_PATCHES") or "off"
    if chosen.strip() == "off":
        return
    from patcher.integrate.vllm.plugin import hook

    hook()


def activation() -> Activation | None:
    """The patches that the plugin installed in this process; None before a worker was started."""
    from patcher.integrate.vllm.plugin import installed

    return installed()
