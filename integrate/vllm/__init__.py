"""vLLM's general plugin: puts patches into every worker, and nowhere else.

vLLM 0.25.1 loads general plugins in the process that was started, in the engine core and in every
worker, also in one that is started anew. Only workers touch a GPU, and only they know their share
of the model, so all that is done at loading is to wait for `WorkerWrapperBase.init_device`: after
it device and parallel groups are there, and the model is not yet built, compiled, warmed up or
recorded. vLLM then runs every size once eagerly before it records it
(`GPUModelRunner._warmup_and_capture`), which builds and proves the kernels for that size.

Imports nothing but the standard library until a patch is switched on.
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger("patcher")


def register() -> None:
    """The entry point `vllm.general_plugins`; may be called any number of times."""
    if os.environ.get(
        "PATCHER_RANDOM_WEIGHTS"
    ):  # never in serving: `patcher.bench.engines.vllm` sets it
        from patcher.bench.engines.vllm import register_loader

        register_loader()
    chosen = os.environ.get("PATCHER_PATCHES") or os.environ.get("TLLM_PATCHER_PATCHES") or "off"
    if chosen.strip() == "off":
        return
    from patcher.integrate.vllm.plugin import hook

    hook()
