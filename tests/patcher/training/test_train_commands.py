"""The commands of `patcher train` on a CPU, with a tiny model whose words are whole kernels: right,
wrong, a cheat and a fault of the corpus, and prose. The judge is the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, error_of, patcher
from ray_cluster import ray_cluster
from tiny_writer import chance_of, write_model

from patcher.training.folder import UpdateMetrics, read_metrics

pytestmark = pytest.mark.slow

OP = "linear"
# slower than eager without doubt, so that its reward is the same whenever it is judged
RIGHT = """import torch


def linear(x, weight, out):
    for _ in range(4):
        torch.mm(x, weight.t(), out=out)
"""
CORPUS = ROOT / "tests" / "corpus"
CHEAT = (CORPUS / "cheats" / "63b_weights_rounded_in_place.py").read_text()
LEAVES = (CORPUS / "faults" / "exit_at_load.py").read_text().replace("fused_add_rms_norm", OP)
WRONG = RIGHT.replace("weight.t()", "-weight.t()")
FENCED = [f"```python\n{each}```" for each in (RIGHT, WRONG, LEAVES, CHEAT)]
REPLIES = [*FENCED[:2], "I cannot.", *FENCED[2:]]
TASK = ("--op", OP, "--language", "torch", "--reply-tokens", "1", "--prompt-tokens", "99")
JUDGING = ("--judges", "2", "--threads", "1", "--pairs", "2")
LEARNING = ("--updates", "3", "--tasks-per-update", "1", "--replies-per-task", "16")
MORE = ("--learning-rate", "0.05", "--save-every", "1", "--seed", "2", "--json")


def reinforce(folder: Path, model: Path, *more: str) -> list[str]:
    words = ["train", "reinforce", str(folder), "--model", str(model)]
    return [*words, *TASK, *JUDGING, *LEARNING, *MORE, *more]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'patcher[trl]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATCHER_OPS", str(CORPUS / "ops"))
        yield write_model(tmp_path_factory.mktemp("model"), REPLIES)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "rl"
    result = patcher(*reinforce(folder, model), cwd=folder.parent)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["updates"] == 3
    return folder


def without_times(lines: list[UpdateMetrics]) -> list[dict[str, Any]]:
    times = {"training_s", "generating_s", "judging_s"}
    return [each.model_dump(exclude=times) for each in lines]


def adapter(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_tricks_and_faults_in_a_rollout_are_counted_and_training_goes_on(whole: Path) -> None:
    lines = read_metrics(whole)
    assert [each.update for each in lines] == [1, 2, 3]
    samples = [json.loads(line) for line in (whole / "samples.jsonl").open()]
    assert len(samples) == 48
    outcomes = {each["reply"]: each["judged"]["outcome"] for each in samples}
    expected = ["too_slow", "mismatch", "runtime_error", "guard_violation"]
    assert [outcomes.get(each) for each in FENCED] == expected
    first = [each["judged"] for each in samples if each["number"] == 1]
    caught = sum(each["outcome"] == "guard_violation" for each in first)
    right = [each["reward"]["value"] for each in first if each["outcome"] == "too_slow"]
    assert right
    assert set(right) == {1.0}
    assert lines[0].shares["caught"] == caught / 16
    assert lines[0].shares["right"] == len(right) / 16
    assert lines[0].reward == pytest.approx((2 * len(right) - 16) / 16)
    # no source was judged twice, and what holds none was not judged at all
    assert len((whole / "verdicts.jsonl").read_text().splitlines()) <= len(REPLIES) + 3


def test_judges_on_ray_reward_as_those_of_this_machine(
    whole: Path, model: Path, tmp_path: Path
) -> None:
    with ray_cluster() as ray:
        place = ray.get_runtime_context().gcs_address
        words = reinforce(tmp_path / "rl", model, "--judge", f"ray:{place}")
        token = {"RAY_AUTH_MODE": "token"}
        result = patcher(*words, cwd=tmp_path, env=token, limit_s=900)
    assert result.returncode == 0, result.stderr
    assert without_times(read_metrics(tmp_path / "rl")) == without_times(read_metrics(whole))
    assert adapter(tmp_path / "rl") == adapter(whole)


def test_the_adapter_has_learned(whole: Path, model: Path) -> None:
    from patcher.training.weights import load_model

    before, after = load_model(str(model)).model, load_model(str(model), whole).model
    assert chance_of(after, 0) > chance_of(before, 0)


KILLED = """
import os, signal, sys
from patcher.training import updates

real = updates.UpdateWriter.on_log

def on_log(self, args, state, control, **more):
    real(self, args, state, control, **more)
    if state.global_step == 2:
        os.kill(os.getpid(), signal.SIGKILL)

updates.UpdateWriter.on_log = on_log
from patcher.cli import main
main()
"""


def test_a_killed_training_goes_on_as_if_undisturbed(
    whole: Path, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "rl"
    words = reinforce(folder, model)
    killed = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, *words], capture_output=True, check=False, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # the line of an update whose checkpoint was never written, and half a checkpoint
    assert [each.update for each in read_metrics(folder)] == [1, 2]
    half = folder / "checkpoints" / "checkpoint-2"
    half.mkdir()
    (half / "adapter_config.json").write_text("{")
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"schema_version":1,"num')
    result = patcher(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert without_times(read_metrics(folder)) == without_times(read_metrics(whole))
    assert adapter(folder) == adapter(whole)
    replies = [
        [json.loads(line)["reply"] for line in (each / "samples.jsonl").open()]
        for each in (folder, whole)
    ]
    assert replies[0] == replies[1]


def test_a_time_limit_ends_it_after_a_checkpoint(whole: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rl"
    words = reinforce(folder, model, "--minutes", "0")
    result = patcher(*words, cwd=tmp_path)
    assert result.returncode == 4, result.stderr
    assert "after update 1 of 3" in error_of(result)["message"]
    assert [each.update for each in read_metrics(folder)] == [1]
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    result = patcher(*reinforce(folder, model), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert adapter(folder) == adapter(whole)
    other = patcher(*words, "--seed", "5", cwd=tmp_path)
    assert other.returncode == 2
    assert "seed was 2, is 5" in error_of(other)["message"]
    longer = patcher(*reinforce(folder, model, "--updates", "4"), cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert without_times(read_metrics(folder)[:3]) == without_times(read_metrics(whole))


def test_a_round_of_several_updates_is_sampled_once(model: Path, tmp_path: Path) -> None:
    """A time limit waits for its end, so that nothing sampled is lost."""
    more = ("--updates", "4", "--updates-per-round", "2")
    result = patcher(*reinforce(tmp_path / "whole", model, *more), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = read_metrics(tmp_path / "whole")
    assert [each.replies for each in lines] == [32, 0, 32, 0]
    assert [each.reward is None for each in lines] == [False, True, False, True]
    # each update learns from a half of its own, by weights that the one before has changed
    assert all(each.loss for each in lines)
    words = reinforce(tmp_path / "rl", model, *more)
    result = patcher(*words, "--minutes", "0", cwd=tmp_path)
    assert result.returncode == 4, result.stderr
    assert "after update 2 of 4" in error_of(result)["message"]
    result = patcher(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert without_times(read_metrics(tmp_path / "rl")) == without_times(lines)
    assert adapter(tmp_path / "rl") == adapter(tmp_path / "whole")
    drawn = patcher("train", "curve", str(tmp_path / "rl"), "--out", "rl.svg", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    odd = patcher(*words, "--updates", "5", cwd=tmp_path)
    assert (odd.returncode, error_of(odd)["kind"]) == (2, "usage")
    assert error_of(odd)["hint"] == "give --updates 6, or other rounds"


def test_warm_up_then_evaluation_before_and_after(whole: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", REPLIES, chats=True)
    warm = patcher(
        *("train", "warm-up", "warm", "--model", str(model), "--from", str(whole)),
        *("--language", "torch", "--updates", "12", "--examples-per-update", "2", "--batch", "2"),
        *("--learning-rate", "0.1", "--json"),
        cwd=tmp_path,
    )
    assert warm.returncode == 0, warm.stderr
    examples = [json.loads(line) for line in (tmp_path / "warm" / "examples.jsonl").open()]
    assert [each["reply"] for each in examples] == [REPLIES[0]]
    assert examples[0]["source"] == "rl/samples.jsonl"
    losses = [each.loss for each in read_metrics(tmp_path / "warm")]
    assert len(losses) == 12
    assert losses[-1] < losses[0]

    shared = ("--model", str(model), *TASK, *JUDGING, "--samples", "24", "--json")
    before = patcher("train", "evaluate", "before", *shared, cwd=tmp_path)
    assert before.returncode == 0, before.stderr
    shares = json.loads(before.stdout)["shares"]
    assert 0 < shares["right"]["value"] < 1
    assert 0 < shares["caught"]["value"] < 1
    assert shares["right"]["low"] < shares["right"]["value"] < shares["right"]["high"]
    after = patcher(
        *("train", "evaluate", "after", *shared, "--adapter", "warm", "--against", "before"),
        cwd=tmp_path,
    )
    assert after.returncode == 0, after.stderr
    found = json.loads(after.stdout)
    gap = found["shares"]["right"]["value"] - shares["right"]["value"]
    assert gap > 0
    assert found["differences"]["right"]["value"] == pytest.approx(gap)

    drawn = patcher(
        *("train", "curve", str(whole), "--evaluation", "before", "--evaluation", "after"),
        *("--out", "curve.html"),
        cwd=tmp_path,
    )
    assert drawn.returncode == 0, drawn.stderr
    page = (tmp_path / "curve.html").read_text()
    assert page.startswith("<!doctype html>")
    for said in ("mean reward", "share of replies", "any right", "before", "after"):
        assert said in page


def test_what_is_wrong_is_said_with_its_mend(model: Path, tmp_path: Path) -> None:
    nothing = patcher("train", "reinforce", "rl", "--op", OP, "--json", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "--model" in error_of(nothing)["hint"]
    absent = patcher(
        *("train", "evaluate", "ev", "--model", "nowhere/there.gguf", "--op", OP),
        *("--language", "torch", "--json"),
        cwd=tmp_path,
    )
    assert (absent.returncode, error_of(absent)["kind"]) == (2, "usage")
    without = "import sys; sys.modules['trl'] = None; from patcher.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-P", "-c", without, *reinforce(tmp_path / "rl", model)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert result.returncode == 3, result.stderr
    assert error_of(result)["hint"] == "pip install 'patcher[trl]'"
