"""Tasks for training: composed, filtered, told apart by structure, created and resumed."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from patcher.bench import Op
from patcher.cli import main
from patcher.tasks import examine as examining
from patcher.tasks import load_tasks
from patcher.tasks.compose import compose, operators
from patcher.tasks.create import split_of
from patcher.tasks.datasheet import datasheet_text
from patcher.tasks.known import KnownStructures
from patcher.tasks.pool import WorkerPool
from patcher.tasks.records import load_times
from patcher.tasks.structure import GraphStructure, structure_of_graph

SEED = 5
COUNT = 2


def patcher(*words: str) -> int | str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["patcher", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code


def create(out: Path, against: Path, *more: str, count: int = COUNT, seed: int = SEED) -> Any:
    sized = ["--count", str(count), "--seed", str(seed), "--workers", "1", "--no-compile"]
    return patcher("tasks", "create", str(out), *sized, "--against", str(against), *more)


def test_every_operator_names_what_pytorch_has() -> None:
    entries = [text for names in operators().values() for both in names.values() for text in both]
    assert len(entries) > 300
    named = {each for text in entries for each in re.findall(r"\b(torch|nn|F)\.([\w.]+)\(", text)}
    assert len(named) > 80
    rooms = {"torch": torch, "nn": nn, "F": F}
    for room, path in named:
        found: Any = rooms[room]
        for name in path.split("."):
            found = getattr(found, name)
        assert callable(found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_candidate_is_a_function_of_seed_and_index(device: Any) -> None:
    made = [compose(3, index, device) for index in range(12)]
    assert made == [compose(3, index, device) for index in range(12)]
    assert made[0].source != compose(4, 0, device).source
    assert {len(each.operators) for each in made} <= {1, 2, 3, 4, 5}
    assert len({each.source for each in made}) == 12
    known = {name for names in operators().values() for name in names}
    assert {name for each in made for name in each.operators} <= known


def structure(function: Any, *sizes: tuple[int, ...]) -> GraphStructure:
    from torch._decomp import core_aten_decompositions

    def run(*tensors: torch.Tensor) -> Any:
        return function(*tensors)

    traced = make_fx(run, dict(core_aten_decompositions()), "fake")(*map(torch.ones, sizes))
    return structure_of_graph(traced)


def test_a_structure_has_operators_and_topology_alone() -> None:
    silu = structure(F.silu, (4, 8))
    assert silu == structure(lambda x: torch.sigmoid(x) * x, (2, 3, 16))
    assert silu.digest == structure(lambda x: F.silu(x.double().t()).float(), (4, 8)).digest
    assert silu.digest != structure(F.relu, (4, 8)).digest
    gate = structure(lambda x, y: x * torch.sigmoid(y), (4, 8), (4, 8))
    assert gate.digest != silu.digest
    assert gate.family == silu.family
    assert split_of(gate, 50.0) == split_of(silu, 50.0)
    one, two = structure(lambda x: x * x, (4,)), structure(lambda x, y: x * y, (4,), (4,))
    assert one.digest != two.digest
    assert structure(lambda x: x.t().reshape(-1), (4, 8)).digest == ""
    assert silu.likeness(silu) == 1.0
    assert 0 < structure(lambda x: F.silu(x) + 1, (4, 8)).likeness(silu) < 1


def test_likeness_is_refused_with_the_name() -> None:
    silu = structure(F.silu, (4, 8))
    known = KnownStructures(against={"level1/25_Swish.py": silu}, library={}, untraced={})
    reason, detail = known.like(structure(F.silu, (2, 2))) or ("", "")
    assert (reason, detail) == ("like a benchmark's", "same structure as level1/25_Swish.py")
    assert known.like(structure(F.gelu, (2, 2))) is None
    # the same operators and edges in another topology
    near = structure(lambda x, y: torch.sigmoid(x) * y, (4, 8), (4, 8))
    assert (known.like(near) or ("", ""))[1].endswith("like level1/25_Swish.py")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("v0 = x * 0.0 + 1.0", "constant"),
        ("v0 = x * 1e-4 + 1.0", "constant"),
        ("v0 = x + torch.randn_like(x)", "not deterministic"),
        ("v0 = x / (x - x)", "not finite"),
        ("v0 = x @ x", "eager fails"),
        ("v0 = x.reshape(-1)", "no structure"),
        ("v0 = torch._fused_rms_norm(x, (8,), None, 1e-5)[0]", "cannot be an op"),
        ("v0 = torch.relu(x)", "kept"),
    ],
)
def test_filters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, reason: str) -> None:
    made = next(each for each in (compose(0, i, "cpu") for i in range(9)) if each.shapes)
    source = re.sub(r"class Model.*?\n\n\n", "", made.source, flags=re.DOTALL)
    source = re.sub(r"return \[torch.*\]", "return [torch.randn(batch_size, 8)]", source)
    source = re.sub(r"batch_size = \d+", "batch_size = 64", source)
    model = (
        f"class Model(nn.Module):\n    def forward(self, x):\n        {line}\n        return v0\n"
    )
    crafted = made.model_copy(
        update={"name": "task_crafted", "source": f"{source}\n\n{model}", "precision": "fp32"}
    )
    monkeypatch.setattr(examining, "compose", lambda *_: crafted)
    found = examining.examine(0, 0, "cpu", False, str(tmp_path / "lock"))
    assert found.reason == reason, found.detail


WORKER = """import os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    if "crash" in line: os.abort()
    if "hang" in line: time.sleep(600)
    if "raise" in line: print('{"unexpected": "a bug"}', flush=True)
    print('{"result": {"process": %d}}' % os.getpid(), flush=True)
"""


def test_what_crashes_or_hangs_costs_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answering.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with WorkerPool(1, 3.0, "answering") as pool:
        jobs = [pool.submit(name) for name in ("a", "b", "crash", "c", "hang", "d", "raise")]
        first, second, crash, third, hang, fourth = [each.result() for each in jobs[:-1]]
        with pytest.raises(RuntimeError, match="a bug"):
            jobs[-1].result()
    assert crash.why == "crashed"
    assert hang.why == "timed out"
    assert first.result == second.result
    assert len({json.dumps(each.result) for each in (first, third, fourth)}) == 3


def test_a_worker_that_does_not_start_is_no_crash_of_a_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        WorkerPool(1, 3.0, "broken") as pool,
        pytest.raises(RuntimeError, match="nothing_of_this_name"),
    ):
        pool.submit("a").result()


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark that has the seed's first candidate."""
    folder = tmp_path_factory.mktemp("benchmark") / "level1"
    folder.mkdir()
    (folder / "1_first.py").write_text(compose(SEED, 0, "cpu").source)
    return folder


@pytest.fixture(scope="module")
def created(benchmark: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("created") / "tasks"
    assert create(out, benchmark) == 0
    return out


def test_tasks_are_ops(created: Path) -> None:
    tasks = load_tasks(created)
    assert len(tasks) == COUNT
    assert {each.op for each in load_times(created)} == {each.op for each in tasks}
    assert len(load_tasks(created, "train")) + len(load_tasks(created, "held-out")) == COUNT
    for task in tasks:
        assert (created / "problems" / task.problem).is_file()
        op = Op(created / "ops" / task.op)
        assert op.contract.summary.startswith("The module of patcher tasks's ")
        assert list(op.baselines) == ["eager", "torch.compile"]
        point = op.contract.sweeps[0].points()[0]
        values = op.inputs.make(point, torch.Generator().manual_seed(3), "normal")
        [exact] = op.reference(**values).values()
        [eager] = op.baselines["eager"]("cpu")(*values.values())
        assert exact.dtype == torch.float64
        torch.testing.assert_close(eager.double(), exact, rtol=0.1, atol=0.1)


def test_what_a_benchmark_has_is_no_task(created: Path) -> None:
    lines = (created / "candidates.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert first["reason"] == "like a benchmark's", first
    report = json.loads((created / "decontamination.json").read_text())
    assert report["against"]["compared"] == 1
    assert report["excluded"][0]["detail"] == "same structure as level1/1_first.py"
    assert report["splits"]["structures_in_both"] == 0
    assert report["library"]["compared"] > 10
    sheet = json.loads((created / "datasheet.json").read_text())
    assert sheet["examined"] == len(lines)
    assert sheet["outcomes"]["kept"] == COUNT == sum(sheet["depths"].values())
    text = (created / "datasheet.md").read_text()
    assert "like a benchmark's" in text
    # made with --no-compile
    assert "Modules were not compiled: that was not asked for." in text
    sheet["created"]["compile_asked"] = True
    assert "Modules were not compiled: no compiler was found." in datasheet_text(sheet)


def written(folder: Path) -> dict[str, bytes]:
    """All that must not depend on a clock."""
    timed = ("times.jsonl", "datasheet.json", "datasheet.md", ".timing.lock")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in timed and "__pycache__" not in path.parts
    }


def test_a_killed_folder_resumes_to_the_same_bytes(
    created: Path, benchmark: Path, tmp_path: Path
) -> None:
    other = tmp_path / "tasks"
    other.mkdir()
    shutil.copy(created / "created.json", other)
    known = json.loads((created / "known.json").read_text(encoding="utf-8"))
    known["against"].popitem()
    known["library"].popitem()
    (other / "known.json").write_text(json.dumps(known), encoding="utf-8")
    whole = (created / "candidates.jsonl").read_bytes()
    (other / "candidates.jsonl").write_bytes(whole[: whole.index(b"\n") + 40])
    assert create(other, benchmark) == 0
    assert written(other) == written(created)


def test_other_options_need_another_folder(
    created: Path, benchmark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        return " ".join(capsys.readouterr().err.split())  # lines are broken anywhere

    before = written(created)
    assert create(created, benchmark, seed=SEED + 1) == 2
    assert "another seed" in said()
    assert create(created, benchmark, count=1) == 2
    assert "holds 2 tasks" in said()
    assert create(tmp_path, tmp_path) == 2
    assert "no KernelBench" in said()
    (tmp_path / "file").touch()
    assert create(tmp_path, benchmark) == 2
    assert "not empty" in said()
    assert create(tmp_path / "new", benchmark, "--device", "tpu") == 2
    with (created / "created.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert create(created, benchmark) == 2
        assert "another process" in said()
    assert written(created) == before
