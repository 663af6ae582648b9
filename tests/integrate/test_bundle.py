"""A bundle as one file, and the binaries in it: what is carried, and what is refused."""

from __future__ import annotations

import json
import logging
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_matrix import ANY, feature
from patch_sample import CANDIDATE, OP, evaluation, kernel, make_patch

from patcher import bench
from patcher.bench import AxisGuard, Candidate, Language
from patcher.bench.toolchains import Built, build, toolchain
from patcher.bench.toolchains.native import cuda_arch
from patcher.integrate import Patch, pack, unpacked, verify
from patcher.integrate.binaries import describe_binary
from patcher.integrate.points import FORMER, find_point, present_name, verify_calls
from patcher.integrate.store import Applied

DATE = (1980, 1, 1, 0, 0, 0)


def opened(path: Path) -> Patch:
    with unpacked(path) as folder:
        return Patch.load(folder)


def test_the_same_bundle_is_the_same_bytes(tmp_path: Path) -> None:
    patch = make_patch(tmp_path / "patch")
    for name in ("a.zip", "b.zip"):
        pack(patch, tmp_path / name)
        for file in patch.folder.rglob("*"):
            file.touch()  # another date
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert opened(tmp_path / "a.zip").digest == patch.digest
    pack(patch, tmp_path / "a.zip")  # a patch may be replaced, nothing else
    (tmp_path / "c.zip").write_text("someone's")
    with pytest.raises(bench.UsageError, match="exists and is not a patch"):
        pack(patch, tmp_path / "c.zip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "b.zip", "c.zip", "patch"]


def test_the_time_that_a_bundle_names_may_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    one, other = (make_patch(tmp_path / name) for name in ("one", "other"))
    assert one.manifest.provenance.created == "2023-11-14T22:13:20+00:00"
    assert one.digest == other.digest
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(bench.UsageError, match="SOURCE_DATE_EPOCH is 'yesterday'"):
        make_patch(tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_a_bundle_for_other_arguments_than_the_op_has_now_is_refused() -> None:
    """Each call would fall back: this bundle is from before keys and values were two tensors."""
    folder = Path(__file__).resolve().parents[2] / "bench/results/h200-vllm/bundles"
    earlier = opened(folder / "rope_kv_update-triton-cdad0ac7.zip")
    with pytest.raises(bench.VerificationError, match=r"kv_cache\).* is now .*, key_cache, val"):
        earlier.verify_target()
    verify_calls(bench.load_op("rope_kv_update").contract)
    elsewhere = earlier.contract.model_copy(update={"name": "of_another_package"})
    verify_calls(elsewhere)


def entry(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo(name, DATE)
    made.external_attr = mode << 16
    return made


def with_entry(made: zipfile.ZipInfo, content: bytes = b"x") -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(made, content)

    return spoil


def bomb(path: Path) -> None:
    """A file of 300 MB that is 300 kB packed."""
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("sources/zeros", "w", force_zip64=True) as file,
    ):
        for _ in range(300):
            file.write(bytes(1_000_000))


def many(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        for index in range(300):
            archive.writestr(f"sources/{index}", "x")


def understated(path: Path) -> None:
    """An entry that declares one byte and unpacks to a million."""
    with_entry(entry("sources/a"), bytes(1_000_000))(path)
    content = path.read_bytes()
    path.write_bytes(content.replace((1_000_000).to_bytes(4, "little"), (1).to_bytes(4, "little")))


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def flipped(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        files = {one: archive.read(one) for one in archive.infolist()}
    [source] = [one for one, content in files.items() if b"// fused" in content]
    files[source] = files[source].replace(b"// fused", b"// Fused")
    with zipfile.ZipFile(path, "w") as archive:
        for one, content in files.items():
            archive.writestr(one, content)


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        longest = max(archive.infolist(), key=lambda one: one.compress_size)
    content[longest.header_offset + 30 + len(longest.filename) + longest.compress_size // 2] ^= 1
    path.write_bytes(content)


SPOILS: dict[str, Callable[[Path], None]] = {
    "parent": with_entry(entry("../outside")),
    "deep parent": with_entry(entry("sources/../../outside")),
    "absolute": with_entry(entry("/tmp/outside")),
    "backslash": with_entry(entry("..\\outside")),
    "drive": with_entry(entry("C:outside")),
    "link": with_entry(entry("sources/link", stat.S_IFLNK | 0o777), b"/etc/passwd"),
    "device": with_entry(entry("sources/null", stat.S_IFCHR | 0o666)),
    "added": with_entry(entry("sources/more.py")),
    "folder and file": with_entry(entry("sources")),
    "bomb": bomb,
    "many": many,
    "understated": understated,
    "half": half,
    "flipped": flipped,
    "damaged": damaged,
}


@pytest.mark.parametrize("case", SPOILS)
def test_an_archive_that_is_no_bundle_writes_nothing_and_says_so(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    path = tmp_path / "patch.zip"
    pack(make_patch(tmp_path / "patch"), path)
    before = sorted(tmp_path.rglob("*"))
    SPOILS[case](path)
    with pytest.raises(bench.VerificationError) as caught:
        opened(path)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    pack(make_patch(tmp_path / "patch"), tmp_path / "patch.zip")
    with_entry(entry("manifest.json"), b"{}")(tmp_path / "patch.zip")
    with pytest.raises(bench.VerificationError, match="twice"):
        opened(tmp_path / "patch.zip")


def test_what_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    for name in ("nothing.zip", "nothing"):
        with pytest.raises(bench.UsageError, match="not a patch bundle"):
            opened(tmp_path / name)


needs_compiler = pytest.mark.skipif(
    toolchain(Language.CPP).missing() is not None, reason="no C++ compiler here"
)


@pytest.fixture(scope="module")
def made() -> tuple[Candidate, Built]:
    candidate = next(found for info, found in OP.solutions() if info.name == "cpu_simd")
    return candidate, build(candidate, OP.contract)


def bundle(folder: Path, candidate: Candidate, built: Built) -> Patch:
    return Patch.create(
        folder,
        OP,
        candidate,
        evaluation(candidate),
        engine="transformers",
        made_by="test",
        built=built,
    )


def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a compiler nor anything that one has built."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path / "cache"))


def runs(found: Callable[..., object]) -> bool:
    torch.manual_seed(0)
    tensors = torch.randn(4, 256), torch.randn(4, 256), torch.randn(256)
    expected = [tensor.clone() for tensor in tensors]
    kernel(expected[0], expected[1], expected[2], 1e-5)
    found(*tensors, 1e-5)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(tensors, expected, strict=True))


def for_another_machine(folder: Path) -> None:
    path = folder / "manifest.json"
    document: dict[str, Any] = json.loads(path.read_text())
    document["binaries"][0]["processor"] = "Another Processor 9000"
    path.write_text(json.dumps(document))


@needs_compiler
def test_a_binary_for_this_machine_needs_no_compiler(
    made: tuple[Candidate, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = bundle(tmp_path / "patch", *made)
    [binary] = patch.manifest.binaries
    assert binary.command.startswith("g++")
    assert str(tmp_path) not in (patch.folder / "manifest.json").read_text()
    pack(patch, tmp_path / "patch.zip")
    no_compiler(monkeypatch, tmp_path)
    with unpacked(tmp_path / "patch.zip") as folder:
        carried = Patch.load(folder)
        assert runs(carried.kernel())
        assert verify(carried).checks[-1].detail == f"{binary.file} was built for this machine"
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_a_binary_for_another_machine_is_left_alone(
    made: tuple[Candidate, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_another_machine(bundle(tmp_path / "patch", *made).folder)
    patch = Patch.load(tmp_path / "patch")
    assert runs(patch.kernel())
    assert "built from sources/" in verify(patch).checks[-1].detail
    no_compiler(monkeypatch, tmp_path)
    with pytest.raises(bench.MissingError, match="not on PATH") as caught:
        patch.kernel()
    assert caught.value.exit_code == 3
    failure = verify(patch).failure
    assert failure is not None
    assert (failure.name, failure.exit_code) == ("kernel", 3)
    assert "Another Processor 9000" in failure.detail


@needs_compiler
def test_a_bundle_without_its_binary_is_the_same_bundle_and_is_built_from_source(
    made: tuple[Candidate, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bundle(tmp_path / "patch", *made)
    [binary] = whole.manifest.binaries
    (whole.folder / binary.file).unlink()
    patch = Patch.load(whole.folder)
    assert patch.digest == whole.digest
    assert runs(patch.kernel())
    checks = {check.name: check.detail for check in verify(patch).checks}
    assert checks["files"] == f"1 unchanged since the patch was made; left out: {binary.file}"
    assert checks["kernel"] == f"built from {patch.manifest.source} at first use"
    pack(patch, tmp_path / "patch.zip")
    assert opened(tmp_path / "patch.zip").digest == whole.digest
    with zipfile.ZipFile(tmp_path / "patch.zip") as archive:
        assert archive.namelist() == ["manifest.json", patch.manifest.source]
    with monkeypatch.context() as without:
        no_compiler(without, tmp_path)
        with pytest.raises(bench.MissingError, match="not on PATH"):
            patch.kernel()
        failure = verify(patch).failure
        assert failure is not None
        assert "no binary for this machine (it has: none)" in failure.detail
    (patch.folder / binary.file).write_bytes(b"another")
    with pytest.raises(bench.VerificationError, match="was changed after"):
        Patch.load(patch.folder)
    (patch.folder / binary.file).unlink()
    (patch.folder / binary.file).symlink_to("/nowhere")
    with pytest.raises(bench.VerificationError, match="is missing from"):
        Patch.load(patch.folder)
    (patch.folder / binary.file).unlink()
    (patch.folder / patch.manifest.source).unlink()
    with pytest.raises(bench.VerificationError, match="is missing from"):
        Patch.load(patch.folder)


@feature("a binary of another ABI", "right", ANY)
@needs_compiler
def test_a_binary_that_does_not_load_is_built_anew_and_said(
    made: tuple[Candidate, Built], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    candidate, built = made
    (tmp_path / "broken.so").write_bytes(b"no ELF")
    broken = built.model_copy(update={"path": tmp_path / "broken.so"})
    patch = bundle(tmp_path / "patch", candidate, broken)
    with caplog.at_level(logging.WARNING, "patcher"):
        assert runs(patch.kernel())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not load" in caplog.text


def test_a_source_that_does_not_build_is_one_sentence(tmp_path: Path) -> None:
    if toolchain(Language.CPP).missing():
        pytest.skip("no C++ compiler here")
    patch = make_patch(tmp_path / "patch")  # its source is a comment
    with pytest.raises(bench.VerificationError, match="does not build on this machine") as caught:
        patch.kernel()
    assert "\n" not in caught.value.message


@feature("a build cache that cannot be written", "refused", ANY)
def test_a_cache_that_cannot_be_written_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path / "file" / "cache"))
    patch = make_patch(tmp_path / "patch")
    with pytest.raises(bench.UsageError, match="cannot write") as caught:
        patch.kernel()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("speedups", "guard"),
    [
        ({1: 1.2, 8: 1.1, 64: 1.0}, AxisGuard()),
        ({1: 1.2, 8: 1.1, 64: 0.9}, AxisGuard(maximum=8)),
        ({1: 0.9, 8: 1.1, 64: 0.9}, AxisGuard(minimum=8, maximum=8)),
        ({1: 1.2, 8: 0.9, 64: 1.1}, AxisGuard(maximum=1)),
        ({1: 1.2, 4: 0.9, 8: 1.1, 64: 1.1}, AxisGuard(minimum=8)),
        ({1: 0.9, 8: 0.9, 64: 0.9}, AxisGuard()),
    ],
)
def test_a_kernel_is_not_called_where_it_is_surely_slower(
    tmp_path: Path, speedups: dict[int, float], guard: AxisGuard
) -> None:
    judged = evaluation()
    timings = tuple(
        judged.timings[0].model_copy(
            update={
                "axes": {"tokens": size, "hidden": 2880},
                "speedup": speedup,
                "speedup_low": speedup - 0.02,
                "speedup_high": speedup + 0.02,
            }
        )
        for size, speedup in speedups.items()
    )
    judged = judged.model_copy(update={"timings": timings, "sweep": "cpu"})
    folder = tmp_path / "patch"
    made = Patch.create(folder, OP, CANDIDATE, judged, engine="transformers", made_by="test")
    unswept = {axis: one for axis, one in OP.contract.guards.axes.items() if axis != "tokens"}
    assert made.manifest.guards.axes == unswept | (
        {"tokens": guard} if guard != AxisGuard() else {}
    )


def test_the_workers_that_it_is_for_are_kept(tmp_path: Path) -> None:
    patch = Patch.create(
        tmp_path / "patch",
        OP,
        CANDIDATE,
        evaluation(),
        engine="transformers",
        made_by="test",
        tensor_parallel=(1, 2),
    )
    assert Patch.load(patch.folder).manifest.guards.tensor_parallel == (1, 2)


@needs_compiler
def test_a_cuda_binary_is_for_what_it_was_compiled_for(made: tuple[Candidate, Built]) -> None:
    binary = describe_binary("unit", made[1], "cuda")
    assert cuda_arch().rstrip("a") == f"sm_{binary.processor.replace('.', '')}"
    assert binary.file.endswith(f"-{binary.processor}/unit.so")


BUNDLES = Path(bench.__file__).resolve().parent / "results/h200-vllm/bundles/together"


@pytest.mark.parametrize("path", sorted(BUNDLES.glob("*.zip")), ids=lambda path: path.stem)
def test_a_bundle_with_the_former_name_of_its_point_resolves(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        [name] = [each for each in archive.namelist() if each.endswith("manifest.json")]
        written = json.loads(archive.read(name))["target"]["point"]
    patch = opened(path)
    point = find_point("vllm", written)
    assert point.name == patch.manifest.target.point == FORMER["vllm"][written] != ""
    assert point.op == patch.manifest.op
    assert patch.point is not None
    assert patch.point.point == point.name
    applied = {"id": "a", "digest": "b", "engine": "vllm", "point": written, "op": point.op}
    assert Applied.model_validate(applied).point == point.name


def test_calls_taken_over_are_known_by_former_names() -> None:
    def op(name: str) -> Patch:
        [path] = BUNDLES.glob(f"{name}-*.zip")
        return opened(path)

    norm, both = op("fused_add_rms_norm"), op("reduce_add_rms_norm")
    assert norm.calls_per_layer() == 2
    assert norm.calls_per_layer((norm, both)) == 1
    # those that are for the same calls do not take more than there are
    assert norm.calls_per_layer((norm, *(op("reduce_add_rms_norm") for _ in range(3)))) == 0


def test_former_names_are_of_the_engine_alone() -> None:
    assert present_name("transformers", "gpt_oss.attention") == "gpt_oss.attention"
    assert present_name("vllm", "add_norm") == "add_norm"
