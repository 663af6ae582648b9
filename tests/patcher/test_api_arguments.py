"""A wrong argument of the Python API is a usage error that names it, before anything runs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import patcher
from patcher.api.display import Chart
from patcher.api.judge_request import JudgeRequest
from patcher.bench import Candidate, content, read_samples
from patcher.bench.records import MOST_SOURCE

DATA = Path(__file__).parents[1] / "data"
CSV = DATA / "nsys" / "cuda_gpu_kern_sum.csv"
OP = "fused_add_rms_norm"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "kernel.cpp"
    file.write_text("int x;", encoding="utf-8")
    return file


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e9, "x", None])
def test_a_timeout_has_bounds(source: Path, value: Any) -> None:
    for judge in (patcher.evaluate, JudgeRequest.of):
        with pytest.raises(patcher.UsageError, match="timeout_s should be"):
            judge(OP, source, timeout_s=value)  # type: ignore[operator]


@pytest.mark.parametrize("value", [0, -3, 10**30, "x", 2.5])
def test_counts_have_bounds(source: Path, value: Any, tmp_path: Path) -> None:
    with pytest.raises(patcher.UsageError, match="steps should be"):
        patcher.profile(CSV, steps=value)
    with pytest.raises(patcher.UsageError, match="batch should be"):
        patcher.profile(model="gpt-oss-tiny", device="cpu", batch=value)
    with pytest.raises(patcher.UsageError, match="threads should be"):
        patcher.evaluate(OP, source, threads=value)
    with pytest.raises(patcher.UsageError, match="quality_steps should be"):
        patcher.throughput("gpt-oss-tiny", ["x.zip"], quality_steps=value)
    with pytest.raises(patcher.UsageError, match="tensor_parallel should be"):
        patcher.bundle([], source, tmp_path / "x.zip", tensor_parallel=[value])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("islands", 10**9),
        ("islands", "x"),
        ("width", 0),
        ("seed", "x"),
        ("strategy", 5),
        ("threads", -1),
        ("runs_dir", "a\0b"),
    ],
)
def test_optimize(name: str, value: Any, tmp_path: Path) -> None:
    arguments = {"strategy": "evolve", "runs_dir": tmp_path, name: value}
    with pytest.raises(patcher.UsageError, match=f"{name} should be"):
        patcher.optimize(OP, **arguments)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "value"), [("processes", -1), ("margin_pct", float("nan"))])
def test_throughput(name: str, value: Any) -> None:
    with pytest.raises(patcher.UsageError, match=f"{name} should be"):
        patcher.throughput("gpt-oss-tiny", ["x.zip"], **{name: value})


def test_a_path_without_nul() -> None:
    def enter(context: AbstractContextManager[Any]) -> None:
        with context:
            pass

    for call in (
        lambda: patcher.profile("a\0b"),
        lambda: patcher.evaluate(OP, "a\0b"),
        lambda: patcher.read_run("a\0b"),
        lambda: patcher.throughput("gpt-oss-tiny", "a\0b"),
        lambda: enter(patcher.patched(object(), "a\0b")),
        lambda: Chart("title", "<svg/>").save("a\0b.svg"),
    ):
        with pytest.raises(patcher.UsageError, match="NUL"):
            call()


def test_a_string_is_one_item(tmp_path: Path) -> None:
    with pytest.raises(patcher.UsageError, match=r"^nope\.zip is neither a bundle"):
        patcher.throughput("gpt-oss-tiny", "nope.zip", device="cpu")
    with pytest.raises(patcher.UsageError, match=r"^nope\.zip is neither a bundle"):
        patcher.profile(model="gpt-oss-tiny", device="cpu", patches=Path("nope.zip"))
    with pytest.raises(patcher.UsageError, match="no solution 'nope'"):
        patcher.optimize(OP, from_solutions="nope", runs_dir=tmp_path)


def test_no_model_and_no_evaluation() -> None:
    with pytest.raises(patcher.UsageError, match="no model"), patcher.patched(None, "x.zip"):
        pass
    with pytest.raises(patcher.UsageError, match="evaluation should be"):
        patcher.bundle("rope", "kernel.cpp", "x.zip")  # type: ignore[arg-type]
    with pytest.raises(patcher.UsageError, match="no evaluation"):
        patcher.bundle([], "kernel.cpp", "x.zip")
    with pytest.raises(patcher.UsageError, match="source should be a path that is not empty"):
        patcher.profile("")


def test_a_model_instead_of_a_file() -> None:
    with pytest.raises(patcher.UsageError, match="a model of that name") as caught:
        patcher.profile("gpt-oss-tiny")
    assert 'model="gpt-oss-tiny"' in caught.value.hint


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        for call in (
            lambda: patcher.profile(path),  # noqa: B023
            lambda: patcher.profile(CSV, ncu=path),  # noqa: B023
            lambda: patcher.profile(CSV, minus=path),  # noqa: B023
            lambda: patcher.evaluate(OP, path, language="cpp"),  # noqa: B023
            lambda: content(path),  # noqa: B023
            lambda: read_samples(path),  # noqa: B023
        ):
            with pytest.raises(patcher.UsageError, match="pipe or a device"):
                call()


def test_a_source_has_a_largest_size(source: Path) -> None:
    source.write_bytes(b"// " + b"x" * MOST_SOURCE)
    with pytest.raises(patcher.UsageError, match="larger than 4 MiB"):
        patcher.evaluate(OP, source)


def test_line_ends_of_a_source_become_newlines(source: Path) -> None:
    source.write_bytes(b"int a;\r\nint b;\r")
    assert Candidate.from_file(OP, source).source == "int a;\nint b;\n"
