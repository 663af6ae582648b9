"""Install patches in an SGLang scheduler before it loads its model, by SGLang's own hooks."""

from __future__ import annotations

import itertools
import logging
import os
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from patcher.bench import PatcherError, VerificationError
from patcher.integrate.activation import Activation, Installed, Switches, activate
from patcher.integrate.sglang import sources
from patcher.integrate.survey import look, report

log = logging.getLogger("patcher")

_HOOKS = "sglang.srt.plugins.hook_registry"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
LOADS = f"{_RUNNER}.load_model"
RECORDS = f"{_RUNNER}.init_cuda_graphs"


class SglangPlugin:
    """Activates the enabled patches when this process loads a model.

    SGLang cannot take a hook out again. After `leave` the hooks do nothing until the next model.
    """

    def __init__(self) -> None:
        self.active: Activation | None = None
        self._switches: Switches | None = None
        self._runners = itertools.count()

    def register(self) -> None:
        """Register the hooks; SGLang applies them once all plugins are loaded."""
        hooks = sources.module(_HOOKS)
        hooks.HookRegistry.register(LOADS, self.load_model, hooks.HookType.AROUND)
        hooks.HookRegistry.register(RECORDS, self.init_cuda_graphs, hooks.HookType.AROUND)

    def load_model(
        self, original: Callable[..., Any], runner: Any, *args: Any, **more: Any
    ) -> None:
        """Install the patches, load the model, and look at its layers."""
        parallel = sources.module("sglang.srt.runtime_context").get_parallel()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        os.environ["PATCHER_RANK"] = str(rank)  # for the receipts
        self.enter(parallel.tp_size)
        original(runner, *args, **more)
        self._tell(lambda: self._look(runner))

    def init_cuda_graphs(
        self, original: Callable[..., Any], runner: Any, *args: Any, **more: Any
    ) -> None:
        """Record the graphs, and report which patches that has reached.

        Without decode graphs SGLang has run nothing yet, so there is nothing to report.
        """
        original(runner, *args, **more)
        if runner.decode_cuda_graph_captured:
            parallel = sources.module("sglang.srt.runtime_context").get_parallel()
            strict = self._strict and parallel.pp_size == 1
            self._tell(lambda: report(self._installed, strict))

    def enter(self, tensor_parallel: int) -> None:
        """Activate the patches that the environment enables now.

        Unchanged patches stay installed, since a draft model in this process uses them, too.

        Raises:
            PatcherError: with `PATCHER_STRICT`, the reason why a patch was not installed.
        """
        switches = Switches.read()
        if self.active is not None and switches == self._switches:
            return
        self.leave()
        self.active = activate("sglang", switches=switches, tensor_parallel=tensor_parallel)
        self._switches = switches
        if self.active.installed and (note := sources.RECORD.untested()):
            log.warning("%s", note)
        for item in self.active.installed:
            manifest = item.patch.manifest
            log.info("%s is installed at %s", manifest.id, manifest.target.point)

    def leave(self) -> None:
        """Remove all patches; idempotent. Graphs that were recorded keep their kernels."""
        if self.active is not None:
            active, self.active = self.active, None
            active.close()

    def _look(self, runner: Any) -> None:
        look(self._installed, runner.model.modules(), next(self._runners), self._strict)

    def _tell(self, then: Callable[[], None]) -> None:
        try:
            then()
        except Exception:  # an engine serves, whatever its layers are like
            if self._strict:
                raise
            log.exception("the layers that patches take are not known")

    @property
    def _installed(self) -> list[Installed]:
        return [] if self.active is None else self.active.installed

    @property
    def _strict(self) -> bool:
        return self._switches is not None and self._switches.strict


def plugin_here() -> SglangPlugin | None:
    """The plugin of this process; None if it was not registered."""
    registered = sources.module(_HOOKS).HookRegistry._hooks.get(LOADS, ())
    owners = (getattr(hook, "__self__", None) for _, hook, _ in registered)
    return next((each for each in owners if isinstance(each, SglangPlugin)), None)


def active_here() -> Activation:
    """The patches installed in this process, whose model is loaded.

    Raises:
        VerificationError: with `PATCHER_STRICT`, SGLang did not call the hook; it only logs why.
    """
    plugin, switches = plugin_here(), Switches.read()
    if plugin is not None and plugin.active is not None:
        return plugin.active
    if switches.strict and switches.patches != "off":
        raise VerificationError(
            f"SGLang loaded its model without calling patcher's hook of {LOADS}",
            "see SGLang's log, and SGLANG_PLUGINS",
        )
    return Activation("sglang")


def hook() -> SglangPlugin | None:
    """Register the plugin of this process.

    Returns:
        The plugin; None if it cannot be registered.

    Raises:
        SystemExit: with `PATCHER_STRICT`, the reason why it cannot be registered. SGLang logs any
            other exception of a plugin, and serves without it.
    """
    try:
        for target in (LOADS, RECORDS):
            pkgutil.resolve_name(target)  # SGLang only logs a hook that finds no target
        plugin = plugin_here()
        if plugin is None:
            plugin = SglangPlugin()
            plugin.register()
    except (PatcherError, AttributeError, ImportError) as error:
        message = f"no patch is installed, this SGLang loads its models differently: {error}"
        if Switches.read().strict:
            raise SystemExit(message) from error
        log.error("%s", message)
        return None
    return plugin
