"""Exported kernel repositories, loaded by Hugging Face's own `kernels`."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from formats_sample import (
    make_patch,
    norm_candidate,
    norm_expected,
    norm_inputs,
    softmax_candidate,
    softmax_library,
)
from kernels._rust import (
    Build,
    Digest,
    DigestAlgorithm,
    DigestValidationError,
    Metadata,
)
from kernels.variants import parse_variant

from kernels import (
    LocalLayerRepository,
    Mode,
    get_local_kernel,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from patcher import bench
from patcher.integrate import export_patch

EPSILON = 1e-3
COMPILED = pytest.param(
    "cpu_simd", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATCHER_CACHE", str(cache))


def exported(tmp_path: Path, solution: str, sweep: str = "cpu") -> Path:
    patch = make_patch(tmp_path / "patch", norm_candidate(solution), sweep)
    export_patch(patch, "hf-kernels", tmp_path / "repository", license="apache-2.0")
    return tmp_path / "repository"


@pytest.mark.parametrize("solution", ["torch", COMPILED])
def test_the_loader_loads_it_and_it_works_in_place(tmp_path: Path, solution: str) -> None:
    kernel = get_local_kernel(exported(tmp_path, solution))
    tensors = input, residual, weight = norm_inputs(5)
    expected = norm_expected(*tensors, EPSILON)
    kernel.fused_add_rms_norm(input, residual, weight, EPSILON)
    torch.testing.assert_close(input, expected["input"])
    torch.testing.assert_close(residual, expected["residual"])
    assert kernel.__all__ == ["fused_add_rms_norm", "layers"]


def test_what_the_contract_excludes_is_refused_and_untouched(tmp_path: Path) -> None:
    kernel = get_local_kernel(exported(tmp_path, "torch"))
    input, residual, weight = norm_inputs(4)
    wrong = {
        "hidden 60": (input[:, :60].contiguous(), residual[:, :60].contiguous(), weight[:60]),
        "not contiguous": (input.t().contiguous().t(), residual, weight),
        "dtypes": (input.half(), residual.half(), weight.bfloat16()),
        "differs in tokens": (input[:2], residual, weight),
        "is float64": (input, residual.double(), weight),
        "not aligned": (torch.empty(257)[1:].view(4, 64), residual, weight),
    }
    for reason, tensors in wrong.items():
        before = [tensor.clone() for tensor in tensors]
        with pytest.raises(ValueError, match=reason):
            kernel.fused_add_rms_norm(*tensors, EPSILON)
        for tensor, value in zip(tensors, before, strict=True):
            torch.testing.assert_close(tensor, value, equal_nan=True)


@pytest.mark.parametrize("solution", ["torch", COMPILED])
def test_metadata_names_the_digest_of_every_file(tmp_path: Path, solution: str) -> None:
    root = exported(tmp_path, solution)
    [variant] = (root / "build").iterdir()
    parse_variant(variant.name)
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.license) == ("fused-add-rms-norm", "apache-2.0")
    assert metadata.id.isidentifier()
    assert metadata.digest is not None
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    with (variant / "_op.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    with pytest.raises(DigestValidationError):
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_the_op_is_registered_under_the_id_and_passes_torchs_checks(tmp_path: Path) -> None:
    root = exported(tmp_path, "torch")
    get_local_kernel(root)
    metadata = Metadata.read_from_file(root / "build/torch-universal/metadata.json")
    op = getattr(torch.ops, metadata.id).fused_add_rms_norm.default
    results = torch.library.opcheck(op, (*norm_inputs(3), EPSILON))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("solution", ["torch", COMPILED])
def test_kernelize_maps_a_layer_to_it_compiled_too(tmp_path: Path, solution: str) -> None:
    root = exported(tmp_path, solution)

    @use_kernel_forward_from_hub("AddNorm")
    class Host(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(norm_inputs(1)[2], requires_grad=False)
            self.epsilon = EPSILON

        def forward(
            self, input: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            raise AssertionError("the original forward ran")

    host = Host()
    layer = LocalLayerRepository(root, layer_name="FusedAddRmsNorm")
    with use_kernel_mapping({"AddNorm": {"cpu": layer}}):
        mode = Mode.INFERENCE | Mode.TORCH_COMPILE
        kernelize(host, mode=mode, device="cpu", use_fallback=False)
    for forward in (host, torch.compile(host, backend="eager", fullgraph=True)):
        input, residual, _ = norm_inputs(6)
        expected = norm_expected(input, residual, host.weight, EPSILON)
        normed, total = forward(input, residual)
        torch.testing.assert_close(normed, expected["input"])
        torch.testing.assert_close(total, expected["residual"])


def test_a_layer_allocates_what_the_op_only_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(softmax_library(tmp_path / "ops")))
    op = bench.load_op("softmax_lse")
    patch = make_patch(tmp_path / "patch", softmax_candidate(op), "cpu", op=op)
    export_patch(patch, "hf-kernels", tmp_path / "repository")
    layer = get_local_kernel(tmp_path / "repository").layers.SoftmaxLse()
    logits = torch.randn(3, 7)
    probs, lse = layer(logits)
    torch.testing.assert_close(probs, torch.softmax(logits, -1))
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1))


def test_without_a_compiler_it_is_the_source_layout_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = make_patch(tmp_path / "patch", norm_candidate("cpu_simd"), "cpu")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    done = export_patch(patch, "hf-kernels", tmp_path / "repository")
    assert done.variant is None
    assert any("no build: g++ is not on PATH" in each for each in done.left_out)
    with pytest.raises(FileNotFoundError):
        get_local_kernel(tmp_path / "repository")


@pytest.mark.parametrize(
    ("solution", "sweep", "device"),
    [("cpu_simd", "cpu", "cpu"), ("cuda_row", "bf16", "cuda")],
)
def test_kernel_builders_parser_takes_the_source_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solution: str, sweep: str, device: str
) -> None:
    candidate = norm_candidate(solution)
    patch = make_patch(tmp_path / "patch", candidate, sweep)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr("patcher.bench.toolchains.compilers.search_path", lambda: str(tmp_path))
    root = tmp_path / "repository"
    assert export_patch(patch, "hf-kernels", root).variant is None
    [backend] = Build.open(root).general.backends
    assert str(backend) == device
    toml = tomllib.loads((root / "build.toml").read_text())
    for part in (toml["tvm-ffi"], *toml["kernel"].values()):
        assert [name for name in part["src"] if not (root / name).is_file()] == []
    [header] = (root / "csrc").glob("fused_add_rms_norm.*")
    assert header.read_text() == candidate.source


def test_a_triton_source_loads_anywhere_and_refuses_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    kernel = get_local_kernel(exported(tmp_path, "triton_row", "bf16"))
    with pytest.raises(ValueError, match="input is on cpu, not on cuda"):
        kernel.fused_add_rms_norm(*norm_inputs(2), EPSILON)


def test_a_folder_that_is_no_export_is_left_alone(tmp_path: Path) -> None:
    patch = make_patch(tmp_path / "patch", norm_candidate("torch"), "cpu")
    kept = tmp_path / "mine/notes.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(bench.UsageError, match="is not an export"):
        export_patch(patch, "hf-kernels", kept.parent)
    assert kept.read_text() == "mine"
    with pytest.raises(bench.UsageError, match="not a license identifier"):
        export_patch(patch, "hf-kernels", tmp_path / "out", license='mit"\n[evil]')
    with pytest.raises(bench.UsageError, match="unknown format"):
        export_patch(patch, "wheel", tmp_path / "wheel")
    first = export_patch(patch, "hf-kernels", tmp_path / "out")
    assert export_patch(patch, "hf-kernels", tmp_path / "out") == first
    assert export_patch(patch, "flashinfer", tmp_path / "out").files != first.files
    assert not (tmp_path / "out/build").exists(), "the earlier export is replaced, not mixed"
