"""Install patches in a vLLM worker, and tie its compiled code to them."""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import logging
import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patcher.bench import PatcherError, UsageError
from patcher.integrate.activation import Activation, Installed, Switches, activate
from patcher.integrate.recorders import RecordedPoint, start_recorders
from patcher.integrate.survey import LayerPoint, look, report, survey
from patcher.integrate.switches import home_store
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import copy_to_ray_workers, decided_by, models_of
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

log = logging.getLogger("patcher")
_engines_log = logging.getLogger("vllm.patcher")
"""Below vLLM's logger, which shows lines of level INFO, too."""

LOADS = ("load_model", "reload_weights", "finish_weight_update")
"""Methods of workers after which layers may be others."""
WARMS_UP = "compile_or_warm_up_model"
FACTOR = "PATCHER_DIGESTS"
"""The key by which the patches and the patcher enter vLLM's hash of compiled code."""

_OWN_FOLDER = re.compile(r"patcher-[0-9a-f]{12}")
"""The place of patched code in a folder that the user named."""
_READ_BY_WORKERS = (
    *(f"PATCHER_{name}" for name in ("PATCHES", "HOME", "RECEIPTS", "STRICT", "CACHE")),
    *(f"PATCHER_{name}" for name in ("RECORD", "RECORD_POINTS", "RECORD_MB")),
    *(f"TLLM_PATCHER_{name}" for name in ("PATCHES", "HOME", "RECEIPTS", "STRICT")),
    "PATCHER_RANDOM_WEIGHTS",
    "PATCHER_BUILD_TIMEOUT_S",
)
"""Variables that a worker needs; keys of models are none of them."""


def code_digest(folder: Path) -> str:
    """Of the code that rewrites graphs: vLLM traces none of it, and so cannot know that it changed.

    Args:
        folder: of the package.
    """
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:12]


class VllmPlugin:
    """Activates the enabled patches when this process becomes a worker."""

    def __init__(self) -> None:
        self.active: Activation | None = None
        self.recorders: list[RecordedPoint] = []
        """What records calls of the engine's own code, which the environment may ask for."""
        self._state: _State | None = None
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()
        """Workers of this process that were not shut down: their classes are patched."""
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
                self.enter(worker, config.parallel_config.tensor_parallel_size)
            self._part_folders(config.compilation_config)
            self._follow(worker.worker, config)

        init_device.plugin = self  # type: ignore[attr-defined]
        self._swap.install(init_device)

    def remove(self) -> None:
        """Remove all patches and restore `init_device`; idempotent."""
        self.leave()
        self._swap.remove()

    def enter(self, worker: Any, tensor_parallel: int) -> None:
        """Activate the patches that the environment and the store enable now, for one worker.

        Patches are in classes, which all engines of a process share. So unchanged patches stay
        installed, and others are refused while an engine runs with these.

        Raises:
            UsageError: another engine of this process runs with other patches.
            PatcherError: with `PATCHER_STRICT`, the reason why a patch was not installed.
        """
        state = _State.now(tensor_parallel)
        if self.active is None or state != self._state:
            if self.active is not None and self._state is not None:
                changes = bool(self.active.installed or state.enabled)
                changes = changes or bool(self.recorders or state.switches.recordings)
                if changes and self._others(worker):
                    raise UsageError(
                        "another engine of this process runs with other patches or settings",
                        "build this engine in a new process, or shut the other one down first",
                    )
            self.leave()
            self.active = activate("vllm", switches=state.switches, tensor_parallel=tensor_parallel)
            self._state = state
            self.recorders = start_recorders("vllm", state.switches)
            self._tie_compiled_code()
        else:  # the patches are in, but this engine may have other passes than the one before
            alone = not self._others(worker)
            for item in self.active.installed:
                if alone:
                    item.book.begin_engine()
                if isinstance(item.point, VllmPoint):
                    item.point.name_lost_fusions()
        self._engines.add(worker)
        _after(worker, "shutdown", functools.partial(self._engines.discard, worker))

    def _others(self, worker: Any) -> bool:
        """Whether this process has another worker that was neither shut down nor freed."""
        if all(other is worker for other in self._engines):
            return False
        gc.collect()
        return any(other is not worker for other in self._engines)

    def _tie_compiled_code(self) -> None:
        assert self.active is not None
        known: dict[str, Any] = sources.module("vllm.envs").environment_variables
        recorded = (each.recorder.book.digest for each in self.recorders)
        if digests := ",".join(filter(None, (self.active.digests, *recorded))):
            # `envs.compile_factors` hashes every entry of this table, so compiled code with other
            # patches, or without any, or as another patcher rewrote it, lies in another folder
            factor = f"{digests} {code_digest(Path(__file__).parents[1])}"
            known[FACTOR] = lambda: factor
        if self.active.installed and (note := sources.untested()):
            log.warning("%s", note)
        for item in self.active.installed:
            manifest = item.patch.manifest
            log.info("%s is installed at %s", manifest.id, manifest.target.point)

    def _follow(self, worker: Any, config: Any) -> None:
        """Look at a worker's layers each time its model was loaded, and report after warm-up.

        Args:
            worker: the worker, before its model is loaded.
            config: the configuration of its engine. A worker of a pipeline with several stages
                may have no layer of a role.
        """
        number, stages = next(self._workers), config.parallel_config.pipeline_parallel_size
        current = sources.module("vllm.config").set_current_vllm_config

        def see() -> None:
            layers = [layer for model in models_of(worker) for layer in model.modules()]
            with current(config):
                look(self._installed, layers, number, self._strict)
                for each in self.recorders:
                    if isinstance(each.point, LayerPoint):
                        # layers that compute something else get their own code back
                        found = survey(each.point, each.recorder.guards, layers)
                        each.recorder.book.surveys[number] = found

        def tell() -> None:
            ran = _runs_before_it_serves(config)
            report(self._installed, self._strict and stages == 1, _engines_log, ran=ran)
            for each in self.recorders:
                each.recorder.waits = False

        for name in LOADS:
            _after(worker, name, self._unharmed(see))
        _after(worker, WARMS_UP, self._unharmed(tell))

    def _unharmed(self, then: Callable[[], None]) -> Callable[[], None]:
        """The same, but an error is logged unless `PATCHER_STRICT` is set: an engine serves,
        whatever its layers are like."""

        def run() -> None:
            try:
                then()
            except Exception:
                if self._strict:
                    raise
                log.exception("the layers that patches take are not known")

        return run

    @property
    def _installed(self) -> list[Installed]:
        return [] if self.active is None else self.active.installed

    def _part_folders(self, compilation: Any) -> None:
        """Give compiled code its own place in a folder that the user named, which vLLM does not
        tell apart by its hash: code of other graphs would be run for these."""
        if not compilation.cache_dir:
            return
        folder = Path(compilation.cache_dir)
        if _OWN_FOLDER.fullmatch(folder.name):  # the same engine starts again
            folder = folder.parent
        if factor := sources.module("vllm.envs").environment_variables.get(FACTOR):
            folder /= f"patcher-{hashlib.sha256(factor().encode()).hexdigest()[:12]}"
        compilation.cache_dir = str(folder)

    @property
    def _strict(self) -> bool:
        return self._state is not None and self._state.switches.strict

    def leave(self) -> None:
        """Remove all patches; idempotent."""
        recorders, self.recorders = self.recorders, []
        for each in reversed(recorders):
            try:
                each.remove()
            except PatcherError as error:  # patches have to come out all the same
                log.error("%s; %s", error.message, error.hint)
        if self.active is not None:
            sources.module("vllm.envs").environment_variables.pop(FACTOR, None)
            active, self.active = self.active, None
            active.close()


@dataclass(frozen=True)
class _State:
    """What decides which patches are installed."""

    switches: Switches
    enabled: tuple[tuple[str, str], ...] | str
    """Ids and digests of the enabled patches, or why the store has none."""
    tensor_parallel: int
    settings: tuple[bool | tuple[str, ...], ...]
    """See `decided_by`."""

    @classmethod
    def now(cls, tensor_parallel: int) -> _State:
        """The state of the environment, the store and the current configuration."""
        switches = Switches.read()
        enabled: tuple[tuple[str, str], ...] | str = ()
        try:
            if switches.patches != "off":
                chosen = switches.chosen("vllm", home_store())
                enabled = tuple((entry.id, entry.digest) for entry in chosen)
        except Exception as error:  # `activate` tells it
            enabled = str(error)
        return cls(switches, enabled, tensor_parallel, decided_by())


def _after(worker: Any, name: str, then: Callable[[], None]) -> None:
    """Let a worker call `then` at the end of one of its methods, if it has that method and does not
    call something of ours there already."""
    method = getattr(worker, name, None)
    if method is None or hasattr(method, "patcher_follows"):
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **more: Any) -> Any:
        result = method(*args, **more)
        then()
        return result

    wrapped.patcher_follows = True  # type: ignore[attr-defined]
    setattr(worker, name, wrapped)


def installed() -> Activation | None:
    """The patches in this process's worker; None if no plugin is installed, or no worker began."""
    worker = sources.module("vllm.v1.worker.worker_base").WorkerWrapperBase
    plugin: VllmPlugin | None = getattr(worker.init_device, "plugin", None)
    return None if plugin is None else plugin.active


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
        copy_to_ray_workers(_READ_BY_WORKERS)
    except (PatcherError, AttributeError) as error:
        if Switches.read().strict:
            raise
        log.error("no patch is installed, this vLLM starts its workers differently: %s", error)
        return None
    return plugin


def _runs_before_it_serves(config: Any) -> bool:
    """Whether the workers of a configuration run their model before the first request. On a CPU,
    they do so only to compile it.
    """
    modes = sources.module("vllm.config.compilation").CompilationMode
    compiles = config.compilation_config.mode != modes.NONE
    return bool(compiles or config.device_config.device_type != "cpu")
