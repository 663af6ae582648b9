"""Measurements on the GPUs of a host, with a shell for each and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from patcher.bench.lab import gpu_queue


def ran(folder: Path, plan: str, *arguments: str, gpus: str = "0,1") -> int:
    (folder / "plan.toml").write_text(plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        patch.setattr(gpu_queue, "POLL_S", 0.02)
        return gpu_queue.main([str(folder / "plan.toml"), str(folder / "out"), *arguments])


def log(folder: Path, name: str) -> str:
    return (folder / f"out/jobs/{name}.log").read_text().strip()


def test_each_job_has_gpus_of_its_own_and_waits_for_others(tmp_path: Path) -> None:
    (tmp_path / "environment").write_text("export GREETING=hello\n")
    plan = """
[one]
setup = "{env}"
run = "echo $GREETING $CUDA_VISIBLE_DEVICES; sleep 0.2"
[two]
run = "echo $CUDA_VISIBLE_DEVICES; sleep 0.2"
[both]
gpus = 2
after = ["one"]
run = "echo $CUDA_VISIBLE_DEVICES; cat jobs/one.log"
"""
    assert ran(tmp_path, plan, "--set", f"env={tmp_path / 'environment'}") == 0
    assert (log(tmp_path, "one"), log(tmp_path, "two")) == ("hello 0", "1")
    assert log(tmp_path, "both") == "0,1\nhello 0"
    assert "both                     ended with 0" in (tmp_path / "out/queue.txt").read_text()


def test_what_ended_well_is_not_run_again(tmp_path: Path) -> None:
    plan = '[good]\nrun = "echo x >> runs"\n[bad]\nrun = "echo y >> runs; exit 3"\n'
    assert ran(tmp_path, plan) == 1
    assert ran(tmp_path, plan) == 1
    assert sorted((tmp_path / "out/runs").read_text().split()) == ["x", "y", "y"]
    assert json.loads((tmp_path / "out/jobs/bad.json").read_text())["code"] == 3


def test_a_job_that_is_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    plan = '[long]\nlimit_s = 0.3\nrun = "sleep 61.25 & sleep 62.25"\n[next]\nrun = "true"\n'
    assert ran(tmp_path, plan, gpus="0") == 1
    assert json.loads((tmp_path / "out/jobs/long.json").read_text())["code"] == 124
    assert subprocess.run(["pgrep", "-f", "sleep 6[12].25"]).returncode == 1
    assert json.loads((tmp_path / "out/jobs/next.json").read_text())["code"] == 0


def test_a_job_may_be_chosen_without_those_before_it(tmp_path: Path) -> None:
    plan = '[one]\nrun = "false"\n[two]\nafter = ["one"]\nrun = "true"\n'
    assert ran(tmp_path, plan, "--only", "two") == 0


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ('[a]\nrun = "{env}"\n', "add --set env="),
        ('[a]\nrun = "true"\nafter = ["b"]\n', "a is after b, not before it"),
        ('[a]\nrun = "true"\nminutes = 3\n', "minutes"),
        ('[a]\nrun = "true"\ngpus = 3\n', "a needs more than the 2 GPUs"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: str, said: str
) -> None:
    assert ran(tmp_path, plan) == 2
    assert said in capsys.readouterr().err


def test_the_plan_of_vllm_names_what_there_is() -> None:
    root = Path(__file__).parents[3]
    kernels = root / "kernels"
    values = {"engine": "engine", "judge": "judge", "kernels": str(kernels)}
    jobs = gpu_queue.read_plan(root / "bench/lab/vllm.toml", values)
    assert {"soak", "verdict", "features", "dense", "served", "points"} < {job.name for job in jobs}
    sources = {word for job in jobs for word in job.run.split() if word.startswith(str(kernels))}
    named = [Path(word) for word in sources if Path(word).suffix in (".cu", ".py")]
    assert len(named) >= 8
    assert all(path.is_file() for path in named)
    for job in jobs:
        checked = subprocess.run(["bash", "-n", "-c", job.command], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_the_threads_of_a_core_go_to_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_queue, "core_of", lambda cpu: (0, cpu % 4, cpu))
    assert gpu_queue.shares(["4", "7"], {9, 3, 1, 2, 5, 7}) == {"4": [1, 5, 9], "7": [2, 3, 7]}


def test_the_kernel_tells_the_core_of_a_cpu() -> None:
    assert gpu_queue.core_of(0)[-1] == 0
    assert gpu_queue.core_of(999_999) == (0, 0, 999_999)


def test_each_gpu_has_cpus_of_its_own(tmp_path: Path) -> None:
    plan = "[one]\nrun = \"python3 -c 'import os; print(len(os.sched_getaffinity(0)))'\"\n"
    assert ran(tmp_path, plan, gpus="0") == 0
    assert int(log(tmp_path, "one")) == len(os.sched_getaffinity(0))
    here = os.sched_getaffinity(0)
    if len(here) > 1:
        assert ran(tmp_path, plan.replace("one", "half")) == 0
        assert int(log(tmp_path, "half")) == len(here) // 2
