"""A drawing as a picture."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from patcher.hotspot import read
from patcher.models import Image
from patcher.report import raster
from patcher.report.picture import plot
from patcher.report.raster import to_png

PROFILE = Path(__file__).parents[2] / "data/nsys/decode.sqlite"
HERE = any(map(shutil.which, raster.BROWSERS))


@pytest.mark.browser
@pytest.mark.skipif(not HERE, reason="no Chromium here: apt install chromium")
def test_a_profile_as_a_picture_that_a_model_can_be_shown(tmp_path: Path) -> None:
    svg = plot(read(PROFILE, "gpt-oss-20b"))
    assert to_png(svg, tmp_path / "profile.png") is None
    image = Image.of(tmp_path, "profile.png")
    content = (tmp_path / "profile.png").read_bytes()
    assert (image.width, image.height) == struct.unpack(">II", content[16:24])
    assert f'width="{image.width}"' in svg
    assert len(content) > 20_000  # not a blank page
    assert [path.name for path in tmp_path.iterdir()] == ["profile.png"]


@pytest.mark.browser
@pytest.mark.skipif(not HERE, reason="no Chromium here: apt install chromium")
def test_what_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raster, "LIMIT_S", 0.0)
    why = to_png('<svg width="10" height="10"></svg>', tmp_path / "no.png")
    assert why is not None
    assert "longer" in why
    assert not list(tmp_path.iterdir())


def test_without_a_browser_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    why = to_png('<svg width="10" height="10"></svg>', tmp_path / "no.png")
    assert why == "Chromium, which draws the picture, is not installed: apt install chromium"
    assert not list(tmp_path.iterdir())
