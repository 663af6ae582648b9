"""Whether the vLLM that the code was read against is installed here."""

from __future__ import annotations

import importlib.metadata

import pytest


def installed() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


needs_vllm = pytest.mark.skipif(
    installed() != "0.25.1", reason=f"needs vLLM 0.25.1, here is {installed() or 'none'}"
)
