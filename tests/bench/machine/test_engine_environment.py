"""The variables that a process with an engine gets from this one."""

from __future__ import annotations

import pytest

from patcher.bench.machine.environment import engine_environment


def test_variables_that_engines_read_are_passed_on_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {
        "LD_PRELOAD": "/usr/lib/libtcmalloc.so.4",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    for name, value in (*kept.items(), ("HF_TOKEN", "hf_abc"), ("OTHER", "1")):
        monkeypatch.setenv(name, value)
    found = engine_environment()
    assert kept.items() <= found.items()
    assert not {"HF_TOKEN", "OTHER"} & found.keys()
