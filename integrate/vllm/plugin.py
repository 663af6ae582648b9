"""When patches go into a vLLM worker, and how its compiled code knows them."""

from __future__ import annotations

import logging
import os
from typing import Any

from patcher.bench import PatcherError
from patcher.integrate.activation import Activation, Switches, activate
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.swap import AttributePatch

log = logging.getLogger("patcher")

FACTOR = "PATCHER_DIGESTS"
"""The key under which the digests of what is in enter vLLM's hash of compiled code."""


class Plugin:
    """Waits for this process to become a worker, and then activates what is switched on."""

    def __init__(self) -> None:
        self.active: Activation | None = None
        self._switches: Switches | None = None
        worker = sources.module("vllm.v1.worker.worker_base").WorkerWrapperBase
        self._swap = AttributePatch(worker, "init_device")

    def install(self) -> None:
        original = self._swap.original

        def init_device(worker: Any) -> None:
            original(worker)
            os.environ["PATCHER_RANK"] = str(worker.global_rank)  # for the receipts
            self.enter(worker.vllm_config.parallel_config.tensor_parallel_size)

        init_device.plugin = self  # type: ignore[attr-defined]
        self._swap.install(init_device)

    def remove(self) -> None:
        """Everything out; once more is the same as once."""
        self.leave()
        self._swap.remove()

    def enter(self, tensor_parallel: int) -> None:
        """Activate what the environment says now, in place of what it said before.

        An engine that was built before in this process keeps what it has while nothing changed.

        Raises:
            PatcherError: when measuring, whatever kept a patch out.
        """
        switches = Switches.read()
        if self.active is not None and switches == self._switches:
            return
        self.leave()
        self.active = activate("vllm", switches=switches, tensor_parallel=tensor_parallel)
        self._switches = switches
        known: dict[str, Any] = sources.module("vllm.envs").environment_variables
        if digests := self.active.digests:
            # `envs.compile_factors` hashes every entry of this table: compiled code of another
            # patch, or of none, lies in another folder
            known[FACTOR] = lambda: digests
        for item in self.active.installed:
            log.info("%s is in, at %s", item.patch.manifest.id, item.patch.manifest.target.point)

    def leave(self) -> None:
        if self.active is not None:
            sources.module("vllm.envs").environment_variables.pop(FACTOR, None)
            active, self.active = self.active, None
            active.close()


def hook() -> Plugin | None:
    """The plugin of this process, which waits from now on; None where it cannot.

    Raises:
        PatcherError: when measuring, why it cannot.
    """
    try:
        worker = sources.module("vllm.v1.worker.worker_base").WorkerWrapperBase
        found: Plugin | None = getattr(worker.init_device, "plugin", None)
        if found is None:
            found = Plugin()
            found.install()
    except (PatcherError, AttributeError) as error:
        if Switches.read().strict:
            raise
        log.error("no patch is in, this vLLM's workers start in another way: %s", error)
        return None
    return found
