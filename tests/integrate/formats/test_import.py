"""What comes in: our exports bit by bit, and datasets of others as ops and sources."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_sample import (
    NORM,
    make_patch,
    norm_candidate,
    softmax_candidate,
    softmax_library,
)

from patcher import bench
from patcher.bench import AxisGuard, Candidate, Contract, Language, toolchains
from patcher.bench.judge.op_calls import checked_results
from patcher.bench.toolchains import build
from patcher.cli import main
from patcher.integrate import export_patch, import_kernel

DEFINITION = {
    "name": "rmsnorm_h512",
    "op_type": "rmsnorm",
    "tags": ["status:verified"],
    "axes": {"batch": {"type": "var"}, "hidden": {"type": "const", "value": 512}},
    "inputs": {
        "x": {"shape": ["batch", "hidden"], "dtype": "bfloat16"},
        "scale": {"shape": None, "dtype": "float32"},
        "weight": {"shape": ["hidden"], "dtype": "bfloat16"},
    },
    "outputs": {"y": {"shape": ["batch", "hidden"], "dtype": "bfloat16"}},
    "constraints": ["hidden % 8 == 0", "hidden <= 4096", "batch != 3"],
    "reference": """import torch


@torch.no_grad()
def run(x, scale, weight):
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * inverse * weight.float() * scale).to(torch.bfloat16)
""",
}
PYTHON = """import torch


def run(x, scale, weight):
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * inverse * weight.float() * scale).bfloat16()
"""
CPP = """#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <cmath>
#include <cstdint>
#include <cstring>
namespace rms {
float up(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
uint16_t down(float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  return uint16_t((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}
void norm(tvm::ffi::TensorView x, double scale, tvm::ffi::TensorView w, tvm::ffi::TensorView y) {
  auto *a = static_cast<uint16_t *>(x.data_ptr()), *b = static_cast<uint16_t *>(w.data_ptr());
  auto *out = static_cast<uint16_t *>(y.data_ptr());
  const int64_t rows = x.size(0), hidden = x.size(1);
  for (int64_t r = 0; r < rows; ++r) {
    float squares = 0;
    for (int64_t i = 0; i < hidden; ++i) squares += up(a[r * hidden + i]) * up(a[r * hidden + i]);
    const float inverse = 1 / std::sqrt(squares / hidden + 1e-6f);
    for (int64_t i = 0; i < hidden; ++i)
      out[r * hidden + i] = down(up(a[r * hidden + i]) * inverse * up(b[i]) * float(scale));
  }
}
}  // namespace rms
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, rms::norm);
"""


def solution(name: str, language: str, path: str, content: str, **spec: Any) -> dict[str, Any]:
    told = {"language": language, "target_hardware": ["cpu"], "entry_point": f"{path}::run"}
    return {
        "name": name,
        "definition": DEFINITION["name"],
        "author": "someone",
        "spec": told | spec,
        "sources": [{"path": path, "content": content}],
    }


def workload(batch: int, **inputs: Any) -> dict[str, Any]:
    given = {"x": {"type": "random"}, "weight": {"type": "random"}}
    scalar = {"scale": {"type": "scalar", "value": 1.5}}
    told = {"axes": {"batch": batch}, "inputs": given | scalar | inputs, "uuid": str(batch)}
    return {"definition": DEFINITION["name"], "workload": told}


def dataset(
    root: Path,
    solutions: list[dict[str, Any]],
    workloads: list[dict[str, Any]] | None = None,
    **changed: Any,
) -> Path:
    for name in ("definitions", "solutions", "workloads"):
        (root / name).mkdir(parents=True)
    definition = json.dumps(DEFINITION | changed)
    (root / "definitions/definition.json").write_text(definition, encoding="utf-8")
    for each in solutions:
        (root / f"solutions/{each['name']}.json").write_text(json.dumps(each), encoding="utf-8")
    lines = [workload(batch) for batch in (4, 16, 1)] if workloads is None else workloads
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "workloads/all.jsonl").write_text(text, encoding="utf-8")
    return root


def library(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATCHER_OPS", str(folder))


@pytest.mark.parametrize("to", ["hf-kernels", "flashinfer"])
@pytest.mark.parametrize(
    ("name", "sweep"), [("torch", "cpu"), ("cpu_simd", "cpu"), ("triton_row", "bf16")]
)
def test_out_and_in_again_is_the_same_source_and_contract(
    tmp_path: Path, to: str, name: str, sweep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = toolchains.Missing(reason="not in this test", fix="nothing")
    monkeypatch.setattr(toolchains.native.CppToolchain, "missing", lambda _: lacking)
    candidate = norm_candidate(name)
    patch = make_patch(tmp_path / "patch", candidate, sweep)
    export_patch(patch, to, tmp_path / "out")
    done = import_kernel(tmp_path / "out", tmp_path / "in")
    [(path, digest)] = done.sources.items()
    source = tmp_path / "in" / path
    assert Candidate.from_file(NORM, source, candidate.language) == candidate
    assert digest == candidate.digest == patch.evaluation.digest
    assert (done.ops, done.refused) == ((), {}), "the library has the op, with this contract"
    info = tomllib.loads((source.parent / "solution.toml").read_text())
    assert info["language"] == candidate.language
    assert not (tmp_path / "in" / NORM / "op.toml").exists()


def test_an_op_that_the_library_lacks_comes_with_its_whole_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(monkeypatch, softmax_library(tmp_path / "ops"))
    theirs = bench.load_op("softmax_lse")
    patch = make_patch(tmp_path / "patch", softmax_candidate(theirs), "cpu", op=theirs)
    export_patch(patch, "flashinfer", tmp_path / "dataset")
    export_patch(patch, "hf-kernels", tmp_path / "repository")
    monkeypatch.delenv("PATCHER_OPS")

    done = import_kernel(tmp_path / "repository", tmp_path / "source-only")
    assert done.ops == ()
    assert any("this format has no reference" in note for note in done.notes)

    done = import_kernel(tmp_path / "dataset", tmp_path / "in")
    assert done.ops == ("softmax_lse",)
    library(monkeypatch, tmp_path / "in")
    ours = bench.load_op("softmax_lse")
    assert ours.contract == theirs.contract
    point = ours.sweep("cpu").points()[0]
    made = ours.inputs.make(point, torch.Generator().manual_seed(0), "normal")
    for found, expected in zip(
        ours.reference(**made).values(), theirs.reference(**made).values(), strict=True
    ):
        assert torch.equal(found, expected)
    rounded = ours.baselines[ours.accuracy_baseline]("cpu")(*made.values())
    assert [value.dtype for value in rounded] == [torch.float32, torch.float32]


def test_an_export_that_was_changed_is_refused(tmp_path: Path) -> None:
    patch = make_patch(tmp_path / "patch", norm_candidate("torch"), "cpu")
    export_patch(patch, "hf-kernels", tmp_path / "out")
    source = tmp_path / "out/build/torch-universal/kernel.py"
    source.write_text(source.read_text() + "# faster\n")
    with pytest.raises(bench.VerificationError, match="is not what was exported"):
        import_kernel(tmp_path / "out", tmp_path / "in")
    record = tmp_path / "out/patcher.json"
    record.write_text(record.read_text().replace("build/torch-universal/", "../patch/sources/"))
    with pytest.raises(bench.VerificationError, match="is not what was exported"):
        import_kernel(tmp_path / "out", tmp_path / "in")
    record.write_text(record.read_text().replace(f'"op": "{NORM}"', '"op": "../mine"', 1))
    with pytest.raises(bench.VerificationError, match="damaged"):
        import_kernel(tmp_path / "out", tmp_path / "in")
    record.write_text("{}")
    with pytest.raises(bench.VerificationError, match="damaged"):
        import_kernel(tmp_path / "out", tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_a_kernel_judged_by_another_contract_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = make_patch(tmp_path / "patch", norm_candidate("torch"), "cpu")
    export_patch(patch, "hf-kernels", tmp_path / "out")
    shutil.copytree(bench.load_op(NORM).folder, tmp_path / "ops" / NORM)
    toml = tmp_path / "ops" / NORM / "op.toml"
    toml.write_text(toml.read_text().replace("value = 1e-5", "value = 1e-6"))
    library(monkeypatch, tmp_path / "ops")
    with pytest.raises(bench.VerificationError, match="was judged by another contract"):
        import_kernel(tmp_path / "out", tmp_path / "in")


def test_a_foreign_definition_becomes_an_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = import_kernel(dataset(tmp_path / "theirs", []), tmp_path / "in")
    assert done.ops == ("rmsnorm_h512",)
    for said in (
        "reduction is a guess",
        "expresses: batch != 3",
        "status:verified",
        "trusted code",
    ):
        assert any(said in note for note in done.notes), said
    library(monkeypatch, tmp_path / "in")
    op = bench.load_op("rmsnorm_h512")
    assert op.contract.signature() == "rmsnorm_h512(x, weight, y, scale)"
    assert op.contract.guards.axes == {"hidden": AxisGuard(maximum=4096, multiple_of=8)}
    sweep = op.sweep("cpu")
    assert (sweep.axis, sweep.values, sweep.fixed) == ("batch", (1, 4, 16), {"hidden": 512})
    assert op.contract.scalars[0].value == 1.5

    point = sweep.points()[1]
    made = op.inputs.make(point, torch.Generator().manual_seed(1), "normal")
    x, weight = made["x"].double(), made["weight"].double()
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight * 1.5
    found = op.reference(**made, scale=1.5)["y"]
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    [honest] = op.baselines[op.accuracy_baseline]("cpu")(*made.values(), 1.5)
    coarse = op.control(**made, scale=1.5)["y"]
    assert honest.dtype == coarse.dtype == torch.bfloat16
    assert (coarse.double() - exact).norm() > 2 * (honest.double() - exact).norm()


def test_whole_numbers_and_those_that_a_reference_makes_are_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """import torch
def run(x, scale, weight):
    made = torch.zeros(x.shape)
    made[:] = x / 3
    return x.argmax(1), made * x
"""
    outputs = {
        "best": {"shape": ["batch"], "dtype": "int64"},
        "y": {"shape": ["batch", "hidden"], "dtype": "float32"},
    }
    file = tmp_path / "best.json"
    inputs = DEFINITION["inputs"] | {"scale": DEFINITION["inputs"]["weight"]}
    changed = {"name": "best", "reference": text, "outputs": outputs, "inputs": inputs}
    file.write_text(json.dumps(DEFINITION | changed))
    import_kernel(file, tmp_path / "in")
    library(monkeypatch, tmp_path / "in")
    op = bench.load_op("best")
    made = op.inputs.make(op.sweep("cpu").points()[0], torch.Generator(), "normal")
    found = checked_results(op, "reference.py", "reference", op.reference(**made))
    assert found["best"].equal(made["x"].argmax(1).double())
    x = made["x"].double()
    torch.testing.assert_close(found["y"], x / 3 * x, rtol=1e-13, atol=0.0)


SOURCES: dict[str, tuple[dict[str, Any], Language]] = {
    "returns": (
        solution("returns", "python", "main.py", PYTHON, destination_passing_style=False),
        Language.TORCH,
    ),
    "writes": (
        solution(
            "writes",
            "python",
            "main.py",
            PYTHON.replace("def run(x, scale, weight):", "def made(x, scale, weight):")
            + "\n\ndef run(x, scale, weight, y):\n    y.copy_(made(x, scale, weight))\n",
        ),
        Language.TORCH,
    ),
    "native": (solution("native", "cpp", "kernel.cpp", CPP), Language.CPP),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_foreign_solution_runs_in_our_order_of_arguments(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, language = SOURCES[case]
    if language is Language.CPP and shutil.which("g++") is None:
        pytest.skip("no g++ here")
    done = import_kernel(dataset(tmp_path / "theirs", [theirs]), tmp_path / "in")
    assert done.refused == {}
    library(monkeypatch, tmp_path / "in")
    op = bench.load_op("rmsnorm_h512")
    [(info, candidate)] = list(op.solutions())
    assert (info.name, info.origin, candidate.language) == (case, "someone", language)
    [digest] = done.sources.values()
    assert candidate.digest == digest
    built = build(candidate, op.contract, tmp_path)
    kernel = toolchains.load(built, op.name)
    made = op.inputs.make(op.sweep("cpu").points()[1], torch.Generator().manual_seed(1), "normal")
    kernel(*made.values(), 1.5)
    expected = op.reference(**made, scale=1.5)["y"].bfloat16()
    torch.testing.assert_close(made["y"], expected, rtol=1e-2, atol=1e-2)


def test_what_cannot_be_carried_over_is_refused_by_name(tmp_path: Path) -> None:
    two = solution("two", "python", "main.py", PYTHON)
    two["sources"].append({"path": "more.py", "content": "x = 1\n"})
    elsewhere = solution("elsewhere", "python", "main.py", PYTHON) | {"definition": "gemm"}
    cases = [
        (solution("tiles", "tilelang", "main.py", PYTHON), "no toolchain for tilelang"),
        (two, "has 2 sources"),
        (solution("pybind", "cuda", "k.cu", CPP, binding="torch"), "binds itself"),
        (solution("silent", "cpp", "k.cpp", "void run() {}\n"), "no TVM_FFI_DLL_EXPORT"),
        (
            solution("value", "cpp", "k.cpp", CPP, destination_passing_style=False),
            "returns its outputs",
        ),
        (elsewhere, "Definition gemm is missing"),
        (solution("newer", "python", "main.py", PYTHON, cluster="8"), "cluster"),
    ]
    root = dataset(tmp_path / "theirs", [each for each, _ in cases])
    refused = import_kernel(root, tmp_path / "in").refused
    found = {name.removesuffix(".json"): reason for name, reason in refused.items()}
    assert set(found) == {each["name"] for each, _ in cases}
    for each, reason in cases:
        assert reason in found[each["name"]]


DEFINITIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]] | None, str]] = {
    "indices": (
        {"inputs": DEFINITION["inputs"] | {"kv": {"shape": ["batch"], "dtype": "int32"}}},  # type: ignore[operator]
        None,
        "a person must define",
    ),
    "files": (
        {},
        [workload(1, x={"type": "safetensors", "path": "blob/x", "tensor_key": "x"})],
        "as a file",
    ),
    "scalar of no workload": ({}, [], "no workload has the value of scalar scale"),
    "two varying axes": (
        {"axes": {"batch": {"type": "var"}, "hidden": {"type": "var"}}},
        [
            {**line, "workload": line["workload"] | {"axes": {"batch": size, "hidden": size}}}
            for size in (1, 2)
            for line in [workload(1)]
        ],
        "vary; a sweep of patcher varies one axis",
    ),
    "dtype": (
        {"outputs": {"y": {"shape": ["batch", "hidden"], "dtype": "float8_e4m3fn"}}},
        None,
        "float8_e4m3fn",
    ),
    "field": ({"epilogue": "gelu"}, None, "epilogue"),
    "reference": ({"reference": "x = 1"}, None, "no function run"),
    "axis": (
        {"outputs": {"y": {"shape": ["batch", "heads"], "dtype": "float32"}}},
        None,
        "has an axis heads",
    ),
    "name": ({"inputs": {"in-put": {"shape": ["batch"], "dtype": "float32"}}}, None, "in-put"),
}


@pytest.mark.parametrize("case", DEFINITIONS)
def test_a_definition_that_no_contract_expresses_is_one_sentence(case: str, tmp_path: Path) -> None:
    changed, workloads, reason = DEFINITIONS[case]
    root = dataset(tmp_path / "theirs", [], workloads, **changed)
    with pytest.raises(bench.UsageError, match=r"nothing of .* can be imported") as caught:
        import_kernel(root, tmp_path / "in")
    assert reason in caught.value.hint
    assert not (tmp_path / "in").exists()


def test_our_reading_of_the_schema_is_the_librarys() -> None:
    real = pytest.importorskip(
        "flashinfer_bench", reason="pip install --no-deps flashinfer-bench (.ci/setup does)"
    )
    from patcher.integrate.formats import foreign_schema as ours

    pairs = [(real.Definition, ours.Definition), (real.Solution, ours.Solution)]
    pairs += [(real.BuildSpec, ours.BuildSpec), (real.SourceFile, ours.Source)]
    pairs += [(real.Workload, ours.ForeignWorkload), (real.Trace, ours.Trace)]
    pairs += [(real.TensorSpec, ours.Tensor), (real.AxisConst, ours.Axis)]
    for theirs, mine in pairs:
        assert set(theirs.model_fields) == set(mine.model_fields), mine.__name__


def test_records_as_the_library_writes_them_are_read(tmp_path: Path) -> None:
    real = pytest.importorskip(
        "flashinfer_bench", reason="pip install --no-deps flashinfer-bench (.ci/setup does)"
    )
    from flashinfer_bench.data import save_json_file, save_jsonl_file

    ran = workload(8) | {
        "solution": "returns",
        "evaluation": {
            "status": "PASSED",
            "environment": {"hardware": "NVIDIA H200", "libs": {}},
            "timestamp": "2026-01-01T00:00:00",
            "correctness": {"max_relative_error": 0.0, "max_absolute_error": 0.0},
            "performance": {"latency_ms": 1, "reference_latency_ms": 2, "speedup_factor": 2},
        },
    }
    theirs = solution("returns", "python", "main.py", PYTHON, destination_passing_style=False)
    root = tmp_path / "theirs"
    save_json_file(real.Definition(**DEFINITION), root / "definitions/rmsnorm/d.json")
    save_json_file(real.Solution(**theirs), root / "solutions/someone/s.json")
    save_jsonl_file([real.Trace(**ran)], root / "traces/rmsnorm/t.jsonl")
    done = import_kernel(root, tmp_path / "in")
    assert (done.refused, done.ops) == ({}, ("rmsnorm_h512",))
    assert any("their evaluations and identities are not imported" in note for note in done.notes)
    toml = tomllib.loads((tmp_path / "in/rmsnorm_h512/op.toml").read_text())
    assert Contract(**toml).sweeps[0].values == (8,)


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_patch(tmp_path / "patch", norm_candidate("torch"), "cpu")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int | str | None, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["patcher", *words, "--json"])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code, json.loads(capsys.readouterr().out)

    code, told = run("export", "patch", "--to", "flashinfer", "--out", "out")
    assert (code, bool(told["left_out"])) == (0, True)
    code, told = run("import", "out", "--out", "in")
    assert (code, list(told["sources"].values())) == (0, [norm_candidate("torch").digest])
    for words in (
        ("export", "patch", "--to", "wheel", "--out", "out"),
        ("export", "in", "--to", "flashinfer", "--out", "out"),
        ("import", "patch"),
        ("import", "nothing"),
    ):
        code, told = run(*words)
        assert (code, told["error"]["kind"]) == (2, "usage"), words
        assert told["error"]["hint"]
    (tmp_path / "out/patcher.json").write_text("{}")
    code, told = run("import", "out")
    assert (code, told["error"]["kind"]) == (5, "verification")


def test_a_file_that_is_another_is_not_overwritten(tmp_path: Path) -> None:
    root = dataset(tmp_path / "theirs", [])
    first = import_kernel(root, tmp_path / "in")
    assert import_kernel(root, tmp_path / "in") == first, "the same again is no change"
    reference = tmp_path / "in/rmsnorm_h512/reference.py"
    reference.write_text("mine")
    with pytest.raises(bench.UsageError, match="exists and differs"):
        import_kernel(root, tmp_path / "in")
    assert reference.read_text() == "mine"
