"""SGLang's hooks: what is registered, and what an SGLang that cannot be hooked says.

SGLang's own `HookRegistry` is used. `ModelRunner` is a double where nothing is to be loaded.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_here import needs_sglang

from patcher.bench import VerificationError
from patcher.integrate import sglang
from patcher.integrate.counts import CallCounters
from patcher.integrate.sglang import plugin as plugins
from patcher.integrate.sglang.plugin import LOADS, RECORDS, SglangPlugin, hook, plugin_here


@pytest.fixture
def registry() -> Any:
    """SGLang's registry, empty before and after."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    kept = dict(HookRegistry._hooks), set(HookRegistry._patched)
    HookRegistry.reset()
    yield HookRegistry
    HookRegistry.reset()
    HookRegistry._hooks.update(kept[0])
    HookRegistry._patched.update(kept[1])


def test_without_patches_the_plugin_imports_the_standard_library_alone() -> None:
    code = (
        "import sys; from patcher.integrate.sglang import register; register();"
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'sglang')])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@needs_sglang
def test_registering_twice_hooks_once(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_PATCHES", "off")
    sglang.register()
    assert plugin_here() is None
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    sglang.register()
    first = plugin_here()
    sglang.register()
    assert first is plugin_here() is hook()
    assert set(registry._hooks) == {LOADS, RECORDS}
    assert [len(hooks) for hooks in registry._hooks.values()] == [1, 1]


@needs_sglang
def test_an_sglang_without_the_method_is_told_and_ends_a_strict_process(
    registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugins, "LOADS", LOADS.replace("load_model", "load_the_model"))
    with caplog.at_level(logging.ERROR, "patcher"):
        assert hook() is None
    assert "loads its models differently" in caplog.text
    monkeypatch.setenv("PATCHER_STRICT", "1")
    # SGLang catches every Exception of a plugin, and serves without it
    with pytest.raises(SystemExit, match="load_the_model"):
        hook()
    assert not registry._hooks


@needs_sglang
def test_after_the_graphs_a_patch_that_was_never_reached_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    plugin = SglangPlugin()
    idle = SimpleNamespace(
        book=CallCounters("idle-patch", "0" * 64),
        patch=SimpleNamespace(manifest=SimpleNamespace(id="idle-patch")),
    )
    plugin.active = SimpleNamespace(installed=[idle])  # type: ignore[assignment]
    done: list[Any] = []
    for captured in (False, True):
        runner = SimpleNamespace(decode_cuda_graph_captured=captured)
        with caplog.at_level(logging.WARNING, "patcher"):
            plugin.init_cuda_graphs(done.append, runner)
        assert ("idle-patch has no effect after warm-up" in caplog.text) is captured
    assert len(done) == 2
    plugin._switches = SimpleNamespace(strict=True)  # type: ignore[assignment]
    with pytest.raises(VerificationError, match="idle-patch has no effect"):
        plugin.init_cuda_graphs(done.append, runner)
