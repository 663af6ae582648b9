"""Measurements on the GPUs of a host, with a shell for each and no GPU."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from patcher.bench.lab import gpu_queue
from patcher.bench.machine.environment import ROOT, python_path


def ran(folder: Path, plan: str, *arguments: str, gpus: str = "0,1") -> int:
    (folder / "plan.toml").write_text(plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        patch.setattr(gpu_queue, "POLL_S", 0.02)
        return gpu_queue.main([str(folder / "plan.toml"), str(folder / "out"), *arguments])


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


def test_a_part_needs_its_own_values_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = '[a]\nrun = "echo {a}"\n[b]\nafter = ["a"]\nrun = "echo {b}"\n'
    assert ran(tmp_path, plan, "--only", "b", "--set", "b=1") == 0
    assert log(tmp_path, "b").split() == ["1"]
    assert ran(tmp_path, plan, "--only", "b,c") == 2
    assert "has no job c, but a, b" in capsys.readouterr().err


def test_a_value_is_one_word_of_the_shell_whatever_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a file; no more").write_text("read")
    (tmp_path / "an environment").write_text("export GREETING=hello\n")
    plan = """
[words]
setup = "{env}"
run = "cat {file}; printf ' <%s>' $GREETING {one} {several...}"
"""
    values = {
        "env": str(tmp_path / "an environment"),
        "file": str(tmp_path / "a file; no more"),
        "one": "it's $HOME",
        "several": "--of 'two words'",
    }
    given = [word for item in values.items() for word in ("--set", "=".join(item))]
    assert ran(tmp_path, plan, *given) == 0
    assert log(tmp_path, "words") == "read <hello> <it's $HOME> <--of> <two words>"


def test_the_plan_of_vllm_names_what_there_is(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    kernels = tmp_path / "a checkout/kernels"
    kernels.parent.mkdir()
    kernels.symlink_to(root / "kernels")
    values = {"engine": "engine", "judge": "judge", "kernels": str(kernels), "two": ""}
    values |= {"older": "python-25", "newer": "python-33", "weights": "smollm2", "loops": "loops"}
    jobs = gpu_queue.read_plan(root / "bench/lab/vllm.toml", values)
    assert {"soak", "verdict", "features", "dense", "served", "points"} < {job.name for job in jobs}
    words = {word for job in jobs for word in shlex.split(job.run)}
    sources = {word for word in words if word.startswith(str(kernels))}
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


def test_a_queue_that_is_asked_to_end_ends_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[long]\nrun = "touch began; sleep 63.25"\n')
    command = [sys.executable, "-m", "patcher.bench.lab.gpu_queue", "plan.toml", "out"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": python_path(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as queue:
        until((tmp_path / "out/began").exists)
        queue.terminate()
        assert queue.wait(60) == 128 + signal.SIGTERM
    assert subprocess.run(["pgrep", "-f", "sleep 63.25"]).returncode == 1


def test_a_detached_queue_outlives_the_process_group_that_began_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = '[one]\nrun = "touch began; while [ ! -e go ]; do sleep 0.05; done; echo went on"\n'
    (tmp_path / "plan.toml").write_text(plan)
    words = [sys.executable, "-m", "patcher.bench.lab.gpu_queue", "plan.toml", "out"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": python_path(ROOT)}
    shell = subprocess.Popen(
        ["bash", "-c", f"{shlex.join([*words, '--detach'])}; touch left; sleep 60"],
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    )
    until(lambda: (tmp_path / "left").exists() and (tmp_path / "out/began").exists())
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait(10)
    assert gpu_queue.main(["plan.toml", str(tmp_path / "out"), "--look", "0"]) == 0
    assert "one                      runs on 0" in capfd.readouterr().out
    (tmp_path / "out/go").touch()
    assert gpu_queue.main(["plan.toml", str(tmp_path / "out"), "--look", "60"]) == 0
    assert "-- one: went on" in capfd.readouterr().out


def test_a_look_at_a_queue_that_died_fails_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gpu_queue.main(["plan.toml", str(tmp_path), "--look", "600"]) == 1
    (tmp_path / "queue.pid").write_text("999999999")
    (tmp_path / "queue.txt").write_text("one                      runs on 0 for 9 s\n")
    assert gpu_queue.main(["plan.toml", str(tmp_path), "--look", "600"]) == 1
    assert "the queue does not run" in capfd.readouterr().err
    missing = ["plan.toml", str(tmp_path / "out"), "--detach"]
    (tmp_path / "plan.toml").write_text("[one]\nrun = 'true'\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setenv("PATH", "/nowhere")
        assert gpu_queue.main(missing) != 0
    assert "no GPU: nvidia-smi did not run" in capfd.readouterr().err
