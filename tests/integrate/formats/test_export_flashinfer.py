"""Exported datasets, read, validated and built by flashinfer-bench itself."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_sample import (
    NORM,
    make_patch,
    norm_candidate,
    norm_expected,
    norm_inputs,
    softmax_candidate,
    softmax_library,
)

from patcher import bench
from patcher.integrate import Patch, export_patch

EPSILON = 1e-3


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The library, with a cache of its own."""
    module = pytest.importorskip(
        "flashinfer_bench", reason="pip install --no-deps flashinfer-bench (.ci/setup does)"
    )
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "fib"))
    return module


def exported(tmp_path: Path, solution: str, sweep: str, **rest: Any) -> Path:
    patch = make_patch(tmp_path / "patch", norm_candidate(solution), sweep)
    export_patch(patch, "flashinfer", tmp_path / "dataset", **rest)
    return tmp_path / "dataset"


def load(real: Any, root: Path) -> tuple[Any, Any, list[Any]]:
    """The one Definition, its Solution and its Traces, validated by the library."""
    dataset = real.TraceSet.from_path(str(root))
    [definition] = dataset.definitions.values()
    [solution] = dataset.solutions[definition.name]
    workloads = [trace.workload for trace in dataset.workloads[definition.name]]
    traces = dataset.traces[definition.name]
    assert [trace.workload for trace in traces] == workloads
    assert len({workload.uuid for workload in workloads}) == len(workloads)
    return definition, solution, traces


@pytest.mark.parametrize(
    ("solution", "sweep", "dtypes"),
    [
        ("torch", "cpu", ["float32", "float32", "float32"]),
        ("cuda_row", "bf16-fp32-weight", ["bfloat16", "bfloat16", "float32"]),
        ("triton_row", "bf16", ["bfloat16", "bfloat16", "bfloat16"]),
    ],
)
def test_the_library_validates_it(
    tmp_path: Path, real: Any, solution: str, sweep: str, dtypes: list[str]
) -> None:
    definition, found, traces = load(real, exported(tmp_path, solution, sweep))
    assert definition.var_axes == ["tokens"]
    assert list(definition.inputs) == ["input", "residual", "weight", "epsilon"]
    assert list(definition.outputs) == ["input_out", "residual_out"]
    assert [each.dtype.value for each in list(definition.inputs.values())[:3]] == dtypes
    assert definition.inputs["epsilon"].shape is None, "an input, never a constant"
    assert "EPS" not in definition.reference
    assert {trace.workload.inputs["epsilon"].value for trace in traces} == {1e-5}
    assert found.spec.destination_passing_style
    texts = {source.path: source.content for source in found.sources}
    assert norm_candidate(solution).source in texts.values(), "as it was judged, byte by byte"


def test_traces_say_what_was_measured_and_what_was_not(tmp_path: Path, real: Any) -> None:
    root = exported(tmp_path, "torch", "cpu")
    definition, _, traces = load(real, root)
    evidence = Patch.load(tmp_path / "patch").evaluation
    for trace, timing in zip(traces, evidence.timings, strict=True):
        assert trace.workload.axes == {"tokens": timing.axes["tokens"]}
        assert trace.is_successful()
        measured = trace.evaluation.performance
        assert measured.latency_ms == timing.candidate_us / 1000
        assert measured.reference_latency_ms == timing.baseline_us / 1000
        assert measured.speedup_factor == timing.speedup
        assert "baseline eager, not against the Definition's reference" in trace.evaluation.log
        errors = trace.evaluation.correctness
        assert math.isnan(errors.max_absolute_error)
        assert math.isnan(errors.max_relative_error)
    chosen = real.TraceSet.from_path(str(root)).filter_traces(definition.name, atol=1e9, rtol=1e9)
    assert chosen == [], "errors that nobody recorded pass no filter"


@pytest.mark.parametrize(
    "solution",
    [
        "torch",
        pytest.param(
            "cpu_simd",
            marks=pytest.mark.skipif(
                not (shutil.which("c++") and shutil.which("ninja")) or " " in sys.prefix,
                reason="no c++ or no ninja, or a path with a space, which tvm_ffi's builder breaks",
            ),
        ),
    ],
)
def test_its_builders_build_and_run_it(tmp_path: Path, real: Any, solution: str) -> None:
    from flashinfer_bench.compile import BuilderRegistry

    definition, found, _ = load(real, exported(tmp_path, solution, "cpu"))
    registry = BuilderRegistry.get_instance()
    kernel, reference = registry.build(definition, found), registry.build_reference(definition)
    arguments = *norm_inputs(4, 256), EPSILON
    before = [tensor.clone() for tensor in arguments[:3]]
    expected = norm_expected(*arguments)
    for made in (kernel.call_value_returning(*arguments), reference(*arguments)):
        torch.testing.assert_close(made[0], expected["input"])
        torch.testing.assert_close(made[1], expected["residual"])
    for tensor, value in zip(arguments, before, strict=False):
        torch.testing.assert_close(tensor, value, rtol=0, atol=0)


def test_what_is_only_written_is_an_output_by_its_name(
    tmp_path: Path, real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashinfer_bench.compile import BuilderRegistry

    monkeypatch.setenv("PATCHER_OPS", str(softmax_library(tmp_path / "ops")))
    op = bench.load_op("softmax_lse")
    patch = make_patch(tmp_path / "patch", softmax_candidate(op), "cpu", op=op)
    export_patch(patch, "flashinfer", tmp_path / "dataset")
    definition, found, _ = load(real, tmp_path / "dataset")
    assert (list(definition.inputs), list(definition.outputs)) == (["logits"], ["probs", "lse"])
    registry = BuilderRegistry.get_instance()
    logits = torch.randn(16, 512)
    want = registry.build_reference(definition)(logits)
    got = registry.build(definition, found).call_value_returning(logits)
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value, expected)


def test_values_that_inputs_py_chooses_travel_as_safetensors(
    tmp_path: Path, real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashinfer_bench.bench.utils import load_safetensors

    library = softmax_library(tmp_path / "ops")
    toml = library / "softmax_lse/op.toml"
    given = 'access = "read"\nvalues = "given"'
    toml.write_text(toml.read_text().replace('access = "read"', given))
    monkeypatch.setenv("PATCHER_OPS", str(library))
    op = bench.load_op("softmax_lse")
    patch = make_patch(tmp_path / "patch", softmax_candidate(op), "cpu", op=op)
    root = tmp_path / "dataset"
    export_patch(patch, "flashinfer", root)
    definition, _, traces = load(real, root)
    for trace in traces:
        logits = load_safetensors(definition, trace.workload, root)["logits"]
        assert tuple(logits.shape) == (trace.workload.axes["rows"], 512)


def test_evidence_that_fits_two_sweeps_needs_to_be_told_which(tmp_path: Path) -> None:
    patch = make_patch(tmp_path / "patch", norm_candidate("cuda_row"), "bf16", said=False)
    with pytest.raises(bench.UsageError, match="fit bf16 and bf16-fp32-weight") as caught:
        export_patch(patch, "flashinfer", tmp_path / "out")
    assert "--sweep" in caught.value.hint
    export_patch(patch, "flashinfer", tmp_path / "out", sweep="bf16-fp32-weight")
    [path] = (tmp_path / "out/definitions").rglob("*.json")
    assert json.loads(path.read_text())["inputs"]["weight"]["dtype"] == "float32"
    with pytest.raises(bench.UsageError, match="to no sweep cpu"):
        export_patch(patch, "flashinfer", tmp_path / "out", sweep="cpu")


def test_an_op_that_changed_since_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = make_patch(tmp_path / "patch", norm_candidate("torch"), "cpu")
    changed = tmp_path / "ops"
    shutil.copytree(bench.load_op(NORM).folder, changed / NORM)
    toml = changed / NORM / "op.toml"
    toml.write_text(toml.read_text().replace("multiple_of = 8", "multiple_of = 16"))
    monkeypatch.setenv("PATCHER_OPS", str(changed))
    with pytest.raises(bench.VerificationError, match="has changed since"):
        export_patch(patch, "flashinfer", tmp_path / "out")
