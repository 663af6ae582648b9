"""A store of patches that no other test sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from patcher.integrate import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))
    for name in ("PATCHES", "STRICT", "RECEIPTS"):
        monkeypatch.delenv(f"PATCHER_{name}", raising=False)
    return Store()
