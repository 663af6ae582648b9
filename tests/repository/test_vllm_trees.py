"""How `make engines` gets a version of vLLM: its Python, once."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import vllm_trees

from patcher import bench


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip is asked for; it puts a wheel, or packages, where it is told to."""
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv("PATCHER_VLLM_TREES", raising=False)
    asked: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        asked.append(arguments)
        options = dict(
            word.split("=", 1) for word in arguments if word.startswith("--") and "=" in word
        )
        if "--target" in options:
            Path(options["--target"]).mkdir()
            return
        wheel = Path(options["--dest"]) / "vllm-9.1-cp38-abi3-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in (
                "vllm/a.py",
                "vllm/b.json",
                "vllm/_C.abi3.so",
                "vllm-9.1.dist-info/METADATA",
            ):
                archive.writestr(name, name)

    monkeypatch.setattr(vllm_trees, "_pip", pip)
    return asked


def test_a_wheel_is_fetched_once_and_only_its_python_is_kept(
    downloads: list[tuple[str, ...]], tmp_path: Path
) -> None:
    found = vllm_trees.tree("9.1")
    assert found == vllm_trees.tree("9.1")
    assert vllm_trees.dependencies() == vllm_trees.dependencies()
    files = sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file())
    assert files == ["vllm-9.1.dist-info/METADATA", "vllm/a.py", "vllm/b.json"]
    assert [(one[0], one[-1]) for one in downloads] == [
        ("download", "vllm==9.1"),
        ("install", f"--requirement={vllm_trees.DEPENDENCIES}"),
    ]
    assert all("--no-deps" in one for one in downloads)
    assert found.is_relative_to(tmp_path)
    assert sorted(path.name for path in found.parent.iterdir()) == [
        "9.1",
        vllm_trees.dependencies().name,
    ]


def test_trees_that_a_user_names_are_taken_as_they_are(
    downloads: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "9.1").mkdir(parents=True)
    monkeypatch.setenv("PATCHER_VLLM_TREES", str(tmp_path / "mine"))
    first, second, support = vllm_trees.python_path("9.1").split(":")
    assert (first, second) == (str(tmp_path / "mine/9.1"), str(tmp_path / "mine/deps"))
    assert Path(support, "vllm_doubles.py").is_file()
    assert not downloads


def test_a_wheel_that_pip_does_not_get_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHER_VLLM_TREES", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(bench.MissingError, match="pip download failed"):
        vllm_trees.tree("9.1")
    assert not list(tmp_path.iterdir())
