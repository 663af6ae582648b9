"""Patch points of other packages that are wrong: said with their names, and alone in that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from point_package import point_package

from patcher.bench import MissingError, load_op
from patcher.integrate.places import of_model, places_of
from patcher.integrate.points import all_specs, find_point, specs_of
from patcher.plugins import found_plugins

POINT = point_package("toy", "mine")
OP = load_op("fused_add_rms_norm")

Package = Callable[[str, str], None]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Put a distribution with patch points of the engine `toy` on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def package(name: str, source: str) -> None:
        info = tmp_path / f"{name}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        entry = f"toy.{name} = {name}_points:POINTS"
        (info / "entry_points.txt").write_text(f"[patcher.patch_points]\n{entry}\n")
        (tmp_path / f"{name}_points.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"{name}_points", raising=False)

    return package


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("POINTS = ['mine']", "is a list, no mapping"),
        (POINT + "del Point.remove", "has a patch point mine without remove"),
        (POINT + "POINTS = {'other': Point}", "other whose class is named mine"),
        (POINT + "Point.spec = {'engine': 'toy'}", "whose spec is no PatchPointSpec"),
    ],
)
def test_a_broken_package_leaves_the_points_of_another_alone(
    package: Package, caplog: pytest.LogCaptureFixture, source: str, said: str
) -> None:
    package("a_broken", source)
    with pytest.raises(MissingError, match=said):
        find_point("toy", "mine")
    package("sound", POINT)
    assert find_point("toy", "mine").op == OP.name
    assert [spec.point for spec in specs_of(OP, "toy")] == ["mine"]
    assert "mine" in [spec.point for spec in all_specs(OP)]
    assert said in caplog.text
    problems = {found.name: found.problem for found in found_plugins()}
    assert said in problems["toy.a_broken"]
    assert not problems["toy.sound"]


def test_a_point_that_raises_when_it_is_asked_of_a_model_is_said(package: Package) -> None:
    package("sound", POINT)
    with pytest.raises(MissingError, match="mine in toy raises AttributeError"):
        of_model("toy", "mine", lambda: {"model_type": "llama"})
    found = places_of(OP, "toy", lambda engine: {"model_type": "llama"})
    assert [spec.point for spec in found.points] == ["mine"]
