"""The patches of a process that measures one arm of a comparison, as its environment lists them."""

from __future__ import annotations

from typing import Any, Protocol

from patcher.bench.engines import PLUGINS
from patcher.integrate.activation import Activation, activate
from patcher.integrate.receipts import Receipt


class EnginePlugin(Protocol):
    """What an entry point `patcher.engine_plugins` of an engine's name refers to, such as a module.

    An engine has one if its patches are installed when one of its processes starts.
    """

    def register(self) -> None:
        """Let the engine install the enabled patches in each of its processes; idempotent.

        Raises:
            PatcherError: with `PATCHER_STRICT`, the reason why it cannot.
        """
        ...

    def activation(self) -> Activation | None:
        """The patches that were installed in this process; None before the engine was loaded."""
        ...


def await_engine(engine: str) -> None:
    """Register the engine's plugin, if it has one, before the engine is loaded.

    It is needed if patcher runs from a checkout, where no entry point leads to the plugin.

    Raises:
        PatcherError: with `PATCHER_STRICT`, the reason why the plugin cannot be registered.
    """
    if engine in PLUGINS:
        plugin: EnginePlugin = PLUGINS.load(engine)
        plugin.register()


def activated(engine: str, model: Any = None) -> Activation:
    """The patches installed in this process's engine, which has been loaded.

    Args:
        engine: the engine's name.
        model: the model, for engines whose patch points lie in it; patches are installed now.

    Raises:
        PatcherError: with `PATCHER_STRICT`, the reason why a patch was not installed.
    """
    if engine not in PLUGINS:
        return activate(engine, model)
    plugin: EnginePlugin = PLUGINS.load(engine)
    return plugin.activation() or Activation(engine)


def worker_receipts(worker: object, engine: str) -> list[Receipt]:
    """Receipts of the patches in an engine's worker, called in its process.

    Calls are counted by rank: each begins with it.
    """
    return [Receipt.of(item.book).by_rank() for item in activated(engine).installed]
