"""The record of what was read of vLLM: digests, what is new in a version, and what is refused.

A small package called vllm, written here, stands for the engine's versions.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patch_sample import CANDIDATE, OP, evaluation

from patcher import bench
from patcher.integrate import Patch
from patcher.integrate.changes import SourceChangedError
from patcher.integrate.source_parts import ABSENT
from patcher.integrate.vllm import review, sources
from patcher.integrate.vllm.points import POINTS
from patcher.integrate.vllm.tree import Tree

ROOT = Path(__file__).resolve().parents[3]
NORM = "vllm.layers.norm:Norm.forward"
SUM = "triton_kernels.sums:add"
PARTS = {"add_norm": (NORM, "vllm.layers.norm:Norm.extra"), "experts.sum": (SUM,)}
POINTS_HERE: Any = {name: SimpleNamespace(parts=parts) for name, parts in PARTS.items()}
FORWARD = """
class Norm:
    '''A norm.'''

    def forward(self, x, residual=None):
        if residual is None:
            return self.scaled(x)
        x = x + residual
        return self.scaled(x), x
"""


def release(folder: Path, version: str, norm: str = FORWARD) -> Tree:
    """A wheel of that version, unpacked."""
    files = {
        "vllm/__init__.py": "",
        "vllm/layers/__init__.py": "",
        "vllm/layers/norm.py": norm,
        "vllm/third_party/triton_kernels/sums.py": "try:\n    def add(a, b): return a + b\n"
        "except ImportError:\n    pass\n",
        f"vllm-{version}.dist-info/METADATA": f"Name: vllm\nVersion: {version}+cu129\n",
    }
    for name, text in files.items():
        path = folder / version / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(folder / version)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of two versions, of which the later has one method more."""
    path = tmp_path / "sources.json"
    path.write_text("{}")
    monkeypatch.setattr(sources, "DIGESTS", path)
    more = FORWARD + "\n    def extra(self):\n        pass\n"
    trees = release(tmp_path, "1.0"), release(tmp_path, "1.1", more)
    where = [word for tree in trees for word in ("--tree", str(tree.folder))]
    assert review.main(POINTS_HERE, [*where, "--write"]) == 1
    assert path.read_text() == "{\n\n}\n", "nothing is read before a person says so"
    assert review.main(POINTS_HERE, [*where, "--write", "--reviewed"]) == 0
    return path


def test_every_part_was_read_in_every_version_that_is_named() -> None:
    parts = {part for point in POINTS.values() for part in point.parts}
    known = sources.readings()
    assert set(known) == parts
    versions = sources.versions_read()
    assert len(versions) >= 4
    for name, reading in known.items():
        found = [version for some in reading.versions.values() for version in some]
        assert sorted(found) == sorted(versions), name
        assert set(reading.versions) != {ABSENT}, name
        assert reading.statements, name


def test_the_page_of_versions_has_the_roles_and_the_versions_that_are_recorded() -> None:
    lines = (ROOT / "docs/reference/vllm.md").read_text().splitlines()
    first = lines.index("## Roles") + 2
    rows = [[cell.strip("` ") for cell in line.strip("|").split("|")] for line in lines[first:]]
    assert rows[0] == ["role", "op", "weights", *sources.versions_read()]
    found = {row[0]: row[1] for row in rows[2 : 2 + len(POINTS)]}
    assert found == {name: point.op for name, point in POINTS.items()}


def test_only_code_counts(tmp_path: Path) -> None:
    first = release(tmp_path, "1.0").part(NORM)
    remarks = FORWARD.replace(
        "        x = x + residual",
        "        '''Add.'''\n        # in place?\n        x = (\n            x + residual)",
    )
    assert release(tmp_path, "1.1", remarks).part(NORM).digest == first.digest
    other = release(tmp_path, "1.2", FORWARD.replace("x + residual", "x - residual")).part(NORM)
    assert other.digest != first.digest
    [new] = [one for one in other.statements if one not in first.statements]
    assert (new.text.strip(), new.line) == ("x = x - residual", 8)
    assert first.text.startswith("    def forward(self, x, residual=None):")


def test_a_part_is_found_where_it_is_defined(tmp_path: Path) -> None:
    tree = release(tmp_path, "1.0", f"if True:\n    pass\nelse:\n    def fast(): pass\n{FORWARD}")
    assert tree.version() == "1.0"
    assert tree.part("vllm.layers.norm:fast").digest != ABSENT
    assert tree.part(SUM).text == "    def add(a, b): return a + b\n"
    for gone in ("vllm.layers.norm:Norm.fast", "vllm.gone:f", "vllm.layers.norm:forward"):
        assert tree.part(gone).digest == ABSENT
    twice = release(tmp_path, "1.1", "if 1:\n    def f(): pass\nelse:\n    def f(): return 1\n")
    assert twice.part("vllm.layers.norm:f").text.count("def f") == 2
    with pytest.raises(bench.MissingError, match=r"holds no vllm-\*\.dist-info"):
        Tree(tmp_path).version()


def test_a_release_with_the_same_code_is_recorded_untouched(
    record: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = release(tmp_path, "1.2")
    monkeypatch.setattr(Tree, "installed", lambda: later)
    assert sources.untested() == (
        "vLLM 1.2 was not tested with these patches (1.0, 1.1 were); the code that they replace "
        "and rely on is the same"
    )
    assert review.main(POINTS_HERE, ["--tree", str(later.folder), "--write"]) == 0
    assert "add_norm: as read" in capsys.readouterr().out
    assert sources.versions_read() == ("1.0", "1.1", "1.2")
    assert sources.untested() is None
    assert [set(one.versions.values()) for one in sources.readings().values()] == [
        {("1.0", "1.1", "1.2")},
        {("1.0", "1.2"), ("1.1",)},
        {("1.0", "1.1", "1.2")},
    ]


def test_what_is_new_in_a_release_is_shown_and_recorded_only_when_it_was_reviewed(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = FORWARD.replace("x = x + residual", "x = x + residual * self.gain")
    arguments = ["--tree", str(release(tmp_path, "1.2", changed).folder)]
    before = record.read_text()
    capsys.readouterr()
    assert review.main(POINTS_HERE, arguments) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "vLLM 1.2, compared with 1.0, 1.1",
        "  add_norm: 1 of 2 parts differ",
        "  experts.sum: as read",
        f"--- {NORM} in 1.0, 1.1",
        f"+++ {NORM} now",
        "@@ line 8 @@",
        "+        x = x + residual * self.gain",
    ]
    assert record.read_text() == before
    assert review.main(POINTS_HERE, [*arguments, "--write"]) == 1, "one part is left to review"
    assert review.main(POINTS_HERE, [*arguments, "--write", "--reviewed"]) == 0
    assert review.main(POINTS_HERE, arguments) == 0
    assert review.main({"experts.sum": POINTS_HERE["experts.sum"]}, [*arguments, "--write"]) == 0
    assert list(sources.readings()) == [SUM], "parts that no point names are dropped"


def test_a_patch_fits_each_version_read_and_no_other(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = next(point for point in POINTS.values() if point.op == OP.name)
    monkeypatch.setattr(point, "parts", PARTS["add_norm"])
    monkeypatch.setattr("patcher.integrate.patch.engine_version", lambda engine: "0.33.0")

    def install(tree: Tree) -> None:
        monkeypatch.setattr(Tree, "installed", lambda: tree)

    install(Tree(tmp_path / "1.0"))
    patch = Patch.create(
        tmp_path / "patch", OP, CANDIDATE, evaluation(), engine="vllm", made_by="test"
    )
    install(Tree(tmp_path / "1.1"))
    assert point.fingerprint() != patch.manifest.target.fingerprint
    patch.verify_target()
    sources.must_be_as_read(point.name, point.parts)

    changed = FORWARD.replace("x = x + residual", "x = x + residual * self.gain")
    install(release(tmp_path, "1.2", changed))
    with pytest.raises(SourceChangedError, match=r"Norm\.forward changed") as raised:
        patch.verify_target()
    [change] = raised.value.changes
    # the patch holds the text, so both sides are shown
    assert "-        x = x + residual\n+        x = x + residual * self.gain" in change.diff
    with pytest.raises(SourceChangedError, match=r"Norm\.forward of vLLM 1\.2 differ") as raised:
        sources.must_be_as_read(point.name, point.parts)
    [change] = raised.value.changes
    assert change.diff.endswith("@@ line 8 @@\n+        x = x + residual * self.gain")
    assert raised.value.hint.startswith("serve with vLLM 1.0 or 1.1")

    install(release(tmp_path, "1.3", "class Norm:\n    pass\n"))
    with pytest.raises(SourceChangedError, match=r"Norm\.forward is gone"):
        patch.verify_target()


def test_every_point_can_be_asked_for_by_its_op() -> None:
    """A contract that does not name its op's point leaves no way to put a kernel there."""
    named = {
        (point.point, op.name)
        for op in bench.load_ops().values()
        for point in op.contract.patch_points
        if point.engine == "vllm"
    }
    assert named == {(name, point.op) for name, point in POINTS.items()}
