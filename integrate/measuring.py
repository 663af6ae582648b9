"""The patches of a process that measures one arm of a comparison, as its environment lists them."""

from __future__ import annotations

from typing import Any

from patcher.integrate.activation import Activation, activate


def await_engine(engine: str) -> None:
    """Register the engine's plugin before the engine is loaded.

    It is needed if patcher runs from a checkout, where no entry point leads to the plugin.

    Raises:
        PatcherError: with `PATCHER_STRICT`, the reason why the plugin cannot be registered.
    """
    if engine == "vllm":
        from patcher.integrate import vllm

        vllm.register()
    elif engine == "sglang":
        from patcher.integrate import sglang

        sglang.register()


def activated(engine: str, model: Any = None) -> Activation:
    """The patches installed in this process's engine, which has been loaded.

    Args:
        engine: the engine's name.
        model: the model, for engines whose patch points lie in it; patches are installed now.

    Raises:
        PatcherError: with `PATCHER_STRICT`, the reason why a patch was not installed.
    """
    if engine == "sglang":
        from patcher.integrate.sglang.plugin import active_here

        return active_here()
    if engine != "vllm":
        return activate(engine, model)
    from patcher.integrate.vllm import sources

    worker = sources.module("vllm.v1.worker.worker_base").WorkerWrapperBase
    plugin = getattr(worker.init_device, "plugin", None)
    active: Activation | None = plugin.active if plugin is not None else None
    return active or Activation(engine)
