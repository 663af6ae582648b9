"""The processes of vLLM: several engines in one, and workers on Ray."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from feature_matrix import feature
from patch_sample import CANDIDATE, OP, evaluation
from patch_sample import kernel as add_norm
from vllm_here import config, needs_vllm

from patcher import bench
from patcher.integrate import Patch, Store
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store without a patch, whose patches are switched on."""
    monkeypatch.setattr(Patch, "kernel", lambda _: add_norm)
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATCHER_RANK", "")  # so that it is put back
    return Store(tmp_path / "home")


@pytest.fixture
def patch(tmp_path: Path) -> Patch:
    return Patch.create(
        tmp_path / "patch", OP, CANDIDATE, evaluation(), engine="vllm", made_by="test"
    )


@pytest.fixture
def plugin(store: Store) -> Iterator[Any]:
    from patcher.integrate.vllm.plugin import hook

    made = hook()
    assert made is not None
    yield made
    made.remove()


def started(config: Any) -> Any:
    """What vLLM does in a worker before it builds the model, less the device."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    worker: Any = WorkerWrapperBase.__new__(WorkerWrapperBase)
    worker.vllm_config, worker.global_rank, worker._worker_extension_cls = config, 0, None
    worker.worker = SimpleNamespace(init_device=lambda: None, shutdown=lambda: None)
    worker.init_device()
    return worker


def is_patched() -> bool:
    from vllm.model_executor.layers.layernorm import RMSNorm

    return "forward" in RMSNorm.__dict__


@pytest.mark.parametrize("end", ["freed", "shut down"])
def test_an_engine_after_another_has_what_the_store_says_then(
    plugin: Any,
    store: Store,
    patch: Patch,
    config: Any,
    end: str,
) -> None:
    # vLLM keeps what a first import raised without its C library, and so the frames' worker
    entry = store.apply(patch.folder)
    started(config).shutdown()
    store.revert(entry.id)
    started(config).shutdown()
    kept = []
    for applied in (True, False, True):
        if applied:
            entry = store.apply(patch.folder)
        else:
            store.revert(entry.id)
        worker = started(config)
        assert is_patched() == applied
        if end == "shut down":
            worker.shutdown()
            kept.append(worker)
        del worker


def test_an_engine_with_patches_may_follow_one_without_any(
    store: Store, patch: Patch, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls `register` once a process."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from patcher.integrate import vllm

    monkeypatch.setattr(WorkerWrapperBase, "init_device", WorkerWrapperBase.init_device)
    store.apply(patch.folder)
    monkeypatch.setenv("PATCHER_PATCHES", "off")
    vllm.register()
    for chosen in ("off", "on", "off", "on"):
        monkeypatch.setenv("PATCHER_PATCHES", chosen)
        worker = started(config)
        assert is_patched() == (chosen == "on")
        worker.shutdown()
    WorkerWrapperBase.init_device.plugin.remove()


@feature("several engines of one process", "right", "add_norm")
def test_an_engine_beside_another_keeps_the_others_patches_or_is_refused(
    plugin: Any, store: Store, patch: Patch, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = store.apply(patch.folder)
    first = started(config)
    active = plugin.active
    second = started(config)
    assert plugin.active is active, "unchanged patches stay as they are"
    store.revert(entry.id)
    with pytest.raises(bench.UsageError, match="another engine of this process"):
        started(config)
    assert is_patched(), "the engines of before keep what they have"
    assert plugin.active is active
    store.apply(patch.folder)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(bench.UsageError, match="another engine of this process"):
        started(config)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    del first, second
    gc.collect()
    monkeypatch.setenv("PATCHER_PATCHES", "off")
    third = started(config)
    assert not is_patched()
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    with pytest.raises(bench.UsageError, match="another engine of this process"):
        started(config)
    assert not is_patched(), "an engine that runs unpatched stays so"
    third.shutdown()
    started(config)
    assert is_patched()


def test_a_worker_without_an_applied_patch_says_so(
    plugin: Any, store: Store, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As on another host of Ray, where the store is not."""
    started(config)
    assert "no patch runs here: PATCHER_PATCHES=on" in caplog.text
    assert str(store.root) in caplog.text


@feature("Ray: workers get the switches", "right", *POINTS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_workers_on_ray_get_the_switches_and_no_key(
    store: Store, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    from vllm.ray import ray_env
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    import patcher.integrate.vllm as entry

    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE, MINE_TOO")
    monkeypatch.setenv("PATCHER_RECEIPTS", "/shared/receipts")
    monkeypatch.setenv("PATCHER_MODEL_KEY", "secret")
    defaults = set(ray_env.DEFAULT_EXTRA_ENV_VARS)
    monkeypatch.setattr(ray_env, "DEFAULT_EXTRA_ENV_VARS", set(defaults))
    if elsewhere:  # as in a version that keeps its defaults under another name
        monkeypatch.delattr(ray_env, "DEFAULT_EXTRA_ENV_VARS")
    try:
        entry.register()
        entry.register()
        if elsewhere:
            monkeypatch.setattr(ray_env, "DEFAULT_EXTRA_ENV_VARS", defaults, raising=False)
            assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].count("PATCHER_HOME") == 2
        copied = ray_env.get_env_vars_to_copy()
    finally:
        plugin: Any = WorkerWrapperBase.init_device
        plugin.plugin.remove()
    wanted = {"PATCHER_PATCHES", "PATCHER_HOME", "PATCHER_RECEIPTS", "PATCHER_STRICT"}
    wanted |= {"PATCHER_CACHE", "PATCHER_BUILD_TIMEOUT_S"}
    assert wanted | {"MINE", "MINE_TOO", "PYTHONHASHSEED"} <= copied
    assert "PATCHER_MODEL_KEY" not in copied
