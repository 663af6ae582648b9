"""Packages that a toolchain needs: found once, and searched again where that may differ."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path

import pytest

from patcher.bench.toolchains import python
from patcher.bench.toolchains.python import TritonToolchain

NAME = "a_package_of_this_test"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that were searched."""
    found: list[str] = []
    search = importlib.util.find_spec

    def find_spec(name: str) -> object:
        found.append(name)
        return search(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(python, "_FOUND", {})
    monkeypatch.setattr(TritonToolchain, "package", NAME)
    return found


def laid_out(folder: Path) -> Path:
    package = folder / NAME
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    importlib.invalidate_caches()
    return package


def test_a_package_that_is_there_is_searched_once(
    tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    lacking = TritonToolchain().missing()
    assert lacking is not None
    assert lacking.reason == f"{NAME} is not installed"
    package = laid_out(tmp_path)
    for _ in range(3):  # what was missing is found when it is there
        assert TritonToolchain().missing() is None
    assert searches == [NAME, NAME]
    shutil.rmtree(package)
    importlib.invalidate_caches()
    assert TritonToolchain().missing() is not None


def test_another_path_is_searched_anew(
    tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out(tmp_path / "first")
    with monkeypatch.context() as within:
        within.syspath_prepend(str(tmp_path / "first"))
        assert TritonToolchain().missing() is None
    assert TritonToolchain().missing() is not None
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    assert TritonToolchain().missing() is None
    assert searches == [NAME] * 3


def test_a_package_without_a_file_of_its_own_is_searched_each_time(
    tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir()  # a namespace
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        assert TritonToolchain().missing() is None
    assert searches == [NAME, NAME]
