"""Install patches in a vLLM worker, and tie its compiled code to them."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

from patcher.bench import PatcherError
from patcher.integrate.activation import Activation, Installed, Switches, activate
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import models_of
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.survey import must_take_some, report, survey
from patcher.integrate.vllm.swap import AttributePatch

log = logging.getLogger("patcher")

LOADS = ("load_model", "reload_weights", "finish_weight_update")
"""Methods of workers after which layers may be others."""
WARMS_UP = "compile_or_warm_up_model"
FACTOR = "PATCHER_DIGESTS"
"""The key by which the digests of the patches enter vLLM's hash of compiled code."""


class VllmPlugin:
    """Activates the enabled patches when this process becomes a worker."""

    def __init__(self) -> None:
        self.active: Activation | None = None
        self._switches: Switches | None = None
        self._workers = itertools.count()
        worker = sources.module("vllm.v1.worker.worker_base").WorkerWrapperBase
        self._swap = AttributePatch(worker, "init_device")

    def install(self) -> None:
        """Wrap the worker's `init_device`."""
        original = self._swap.original

        def init_device(worker: Any) -> None:
            original(worker)
            os.environ["PATCHER_RANK"] = str(worker.global_rank)  # for the receipts
            config = worker.vllm_config
            with sources.module("vllm.config").set_current_vllm_config(config):
                self.enter(config.parallel_config.tensor_parallel_size)
            self._follow(worker.worker, config.parallel_config.pipeline_parallel_size)

        init_device.plugin = self  # type: ignore[attr-defined]
        self._swap.install(init_device)

    def remove(self) -> None:
        """Remove all patches and restore `init_device`; idempotent."""
        self.leave()
        self._swap.remove()

    def enter(self, tensor_parallel: int) -> None:
        """Activate the patches that the environment enables now.

        Unchanged patches stay installed, since an engine built earlier in this process uses them.

        Raises:
            PatcherError: with `PATCHER_STRICT`, the reason why a patch was not installed.
        """
        switches = Switches.read()
        if self.active is not None and switches == self._switches:
            return
        self.leave()
        self.active = activate("vllm", switches=switches, tensor_parallel=tensor_parallel)
        self._switches = switches
        known: dict[str, Any] = sources.module("vllm.envs").environment_variables
        if digests := self.active.digests:
            # `envs.compile_factors` hashes every entry of this table, so compiled code with other
            # patches, or without any, lies in another folder
            known[FACTOR] = lambda: digests
        if self.active.installed and (note := sources.untested()):
            log.warning("%s", note)
        for item in self.active.installed:
            manifest = item.patch.manifest
            log.info("%s is installed at %s", manifest.id, manifest.target.point)

    def _follow(self, worker: Any, stages: int) -> None:
        """Look at a worker's layers each time its model was loaded, and report after warm-up.

        Args:
            worker: the worker, before its model is loaded.
            stages: of the pipeline; with more than one, this one may have no layer of a role.
        """
        number = next(self._workers)

        def look() -> None:
            layers = [layer for model in models_of(worker) for layer in model.modules()]
            for item in self._installed:
                if isinstance(item.point, VllmPoint):  # other packages' points need not know layers
                    seen = survey(item.point, item.dispatcher.guards, layers)
                    item.book.surveys[number] = seen
            must_take_some(self._installed, self._strict)

        def tell() -> None:
            report(self._installed, self._strict and stages == 1)

        for name in LOADS:
            self._after(worker, name, look)
        self._after(worker, WARMS_UP, tell)

    def _after(self, worker: Any, name: str, then: Callable[[], None]) -> None:
        """Let a worker call `then` at the end of one of its methods, if it has that method."""
        method = getattr(worker, name, None)
        if method is None or hasattr(method, "patcher_follows"):
            return

        @functools.wraps(method)
        def wrapped(*args: Any, **more: Any) -> Any:
            result = method(*args, **more)
            try:
                then()
            except Exception:  # an engine serves, whatever its layers are like
                if self._strict:
                    raise
                log.exception("the layers that patches take are not known")
            return result

        wrapped.patcher_follows = True  # type: ignore[attr-defined]
        setattr(worker, name, wrapped)

    @property
    def _installed(self) -> list[Installed]:
        return [] if self.active is None else self.active.installed

    @property
    def _strict(self) -> bool:
        return self._switches is not None and self._switches.strict

    def leave(self) -> None:
        """Remove all patches; idempotent."""
        if self.active is not None:
            sources.module("vllm.envs").environment_variables.pop(FACTOR, None)
            active, self.active = self.active, None
            active.close()


def hook() -> VllmPlugin | None:
    """Install the plugin of this process.

    Returns:
        The plugin; None if it cannot be installed.

    Raises:
        PatcherError: with `PATCHER_STRICT`, the reason why it cannot be installed.
    """
    try:
        worker = sources.module("vllm.v1.worker.worker_base").WorkerWrapperBase
        plugin: VllmPlugin | None = getattr(worker.init_device, "plugin", None)
        if plugin is None:
            plugin = VllmPlugin()
            plugin.install()
    except (PatcherError, AttributeError) as error:
        if Switches.read().strict:
            raise
        log.error("no patch is installed, this vLLM starts its workers differently: %s", error)
        return None
    return plugin
