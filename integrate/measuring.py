"""Patches of a process that measures one arm: in from its start, as the environment says."""

from __future__ import annotations

from typing import Any

from patcher.integrate.activation import Activation, activate


def await_engine(engine: str) -> None:
    """Before the engine is loaded: have its own plugin at hand, also where patcher runs from a
    checkout and no entry point leads to it.

    Raises:
        PatcherError: when measuring, why it cannot wait.
    """
    if engine == "vllm":
        from patcher.integrate.vllm import register

        register()


def activated(engine: str, model: Any = None) -> Activation:
    """What is in the engine that this process has loaded.

    Args:
        model: of engines whose patch points lie in one; there the patches are put in now.

    Raises:
        PatcherError: when measuring, whatever kept a patch out.
    """
    if engine != "vllm":
        return activate(engine, model)
    from patcher.integrate.vllm import sources

    worker = sources.module("vllm.v1.worker.worker_base").WorkerWrapperBase
    plugin = getattr(worker.init_device, "plugin", None)
    found: Activation | None = plugin.active if plugin is not None else None
    return found or Activation(engine)
