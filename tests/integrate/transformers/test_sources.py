"""Versions of transformers: a patch outlives a release whose code was read, and no other."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from patch_sample import make_patch

from patcher import bench
from patcher.integrate import verify
from patcher.integrate.transformers import POINTS, sources

NAMES = [name for point in POINTS.values() for name in point.relies_on]


def test_the_installed_version_was_read() -> None:
    version = importlib.metadata.version("transformers")
    for name in NAMES:
        assert version in [each for some in sources.readings()[name].values() for each in some]
    assert not any(point.fingerprint().unread for point in POINTS.values())
    assert set(sources.readings()) == set(NAMES)


@pytest.fixture
def digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "sources.json"
    path.write_text(sources.DIGESTS.read_text())
    monkeypatch.setattr(sources, "DIGESTS", path)
    return path


def test_reading_a_version_twice_changes_nothing(digests: Path) -> None:
    before = digests.read_text()
    sources.read_installed(NAMES)
    assert digests.read_text() == before


def test_a_patch_made_with_another_version_fits_until_code_changes_that_was_not_read(
    tmp_path: Path, digests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = make_patch(tmp_path / "patch")
    file = patch.folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["target"]["fingerprint"] = "0" * 64  # of another version
    norm = f"{sources.MODEL}:GptOssRMSNorm"
    for part in manifest["target"]["replaced"]:
        if part["name"] == norm:
            part["text"] = part["text"].replace(".mean(-1", ".sum(-1")
    file.write_text(json.dumps(manifest))
    patch = type(patch).load(patch.folder)
    assert verify(patch).failure is None
    known = sources.readings()
    known[norm] = {"0" * 16: ["5.0.0"]}
    digests.write_text(json.dumps(known))
    with pytest.raises(bench.VerificationError, match="differs"):
        patch.verify_target()
    [failure] = [check for check in verify(patch).checks if not check.passed]
    [change] = failure.changes
    assert change.name == norm
    assert ".mean(-1" in change.diff


def test_a_transformers_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    point = POINTS["gpt_oss.router"]
    with pytest.raises(bench.MissingError, match="transformers is not installed"):
        point.fingerprint()
