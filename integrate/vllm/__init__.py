"""vLLM's general plugin: installs patches in every worker, and only there.

vLLM 0.25.1 loads general plugins in the main process, in the engine core and in every worker,
including restarted ones. Only workers use a GPU and know their share of the model, so loading only
wraps `WorkerWrapperBase.init_device`. After it, device and parallel groups exist, but the model is
not yet built, compiled, warmed up or recorded. vLLM later runs every size eagerly before recording
it (`GPUModelRunner._warmup_and_capture`), which builds and proves the kernels for that size.

Without an enabled patch, the plugin imports only the standard library.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patcher.integrate.activation import Activation

log = logging.getLogger("patcher")


def register() -> None:
    """The entry point `vllm.general_plugins`; idempotent."""
    # never in serving: `patcher.bench.engines.vllm` sets it
    if os.environ.get("PATCHER_RANDOM_WEIGHTS"):
        from patcher.bench.engines.vllm_weights import register_loader

        register_loader()
    if _is_off():
        _look_again()
        return
    from patcher.integrate.vllm.plugin import hook

    hook()


def _is_off() -> bool:
    chosen = os.environ.get("PATCHER_PATCHES") or os.environ.get("TLLM_PATCHER_PATCHES") or "off"
    return chosen.strip() == "off" and not os.environ.get("PATCHER_RECORD")


def _look_again() -> None:
    """Read the variables again when a worker begins: vLLM loads plugins once a process, whose next
    engine may be one with patches. Whoever builds an engine has imported the worker's module.
    """
    worker: Any = getattr(sys.modules.get("vllm.v1.worker.worker_base"), "WorkerWrapperBase", None)
    original = getattr(worker, "init_device", None)
    if original is None or hasattr(original, "patcher_looks") or hasattr(original, "plugin"):
        return

    @functools.wraps(original)
    def init_device(wrapper: Any) -> None:
        if not _is_off() and not hasattr(worker.init_device, "plugin"):
            from patcher.integrate.vllm.plugin import hook

            if hook() is not None:  # it is around this function now
                worker.init_device(wrapper)
                return
        original(wrapper)

    init_device.patcher_looks = True  # type: ignore[attr-defined]
    worker.init_device = init_device


def activation() -> Activation | None:
    """The patches that the plugin installed in this process; None before a worker was started."""
    from patcher.integrate.vllm.plugin import installed

    return installed()
