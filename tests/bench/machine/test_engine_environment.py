"""The variables that a process with an engine gets from this one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from patcher.bench.machine.environment import engine_environment, first_gpu


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


@pytest.mark.parametrize(
    ("visible", "handle"),
    [(None, 0), ("", 0), ("2", 2), (" 3,1", 3), ("GPU-5ab1,0", "GPU-5ab1"), ("MIG-7", "MIG-7")],
)
def test_the_first_gpu_is_the_first_that_cuda_may_see(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, handle: object
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
    )
    assert first_gpu(nvml) == handle
