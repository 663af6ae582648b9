"""An arm as a real process: gpt-oss-tiny in transformers on the CPU, and what the pipe refuses."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patch_sample import LAYERS, OP, evaluation
from pydantic import ValidationError

from patcher import bench
from patcher.ab import arm_protocol as say
from patcher.ab.arm import serve
from patcher.ab.arm_process import ArmProcess, arm_environment
from patcher.ab.job import ABJob
from patcher.ab.launcher import loads_beside
from patcher.ab.quality_check import identical
from patcher.ab.receipt_counts import difference, merged
from patcher.ab.session import PATCHED, PatchSession, compare_in_pairs
from patcher.bench import Candidate, Language, Workload
from patcher.bench.ab.blocks import BASELINE, CONTROL, Block
from patcher.bench.ab.phases import silent
from patcher.bench.ab.processes import ABPlan
from patcher.bench.ab.windows import Pair, Side, take_pair
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.comparison import Arm
from patcher.integrate import Patch, Receipt

WORKLOAD = Workload(
    model="gpt-oss-tiny",
    device="cpu",
    dtype="float32",
    batch=2,
    input_len=8,
    output_len=10,
    threads=1,
)


@pytest.fixture(scope="module")
def patch(tmp_path_factory: pytest.TempPathFactory) -> Patch:
    [candidate] = [one for info, one in OP.solutions() if info.language == Language.CPP]
    folder = tmp_path_factory.mktemp("bundle") / "patch"
    return Patch.create(
        folder, OP, candidate, evaluation(candidate), engine="transformers", made_by="test"
    )


@pytest.fixture(scope="module")
def session(patch: Patch, tmp_path_factory: pytest.TempPathFactory) -> PatchSession:
    job = ABJob(workload=WORKLOAD, process_pairs=3, quality_steps=4)
    return PatchSession(job, {PATCHED: [patch]}, tmp_path_factory.mktemp("blocks"))


@pytest.fixture(scope="module")
def arms(session: PatchSession) -> Iterator[dict[Arm, ArmProcess]]:
    """A process for each arm, started side by side; with a key in the environment."""
    names: tuple[Arm, Arm] = ("baseline", "patched")
    with pytest.MonkeyPatch.context() as environment, ThreadPoolExecutor() as pool:
        environment.setenv("ANTHROPIC_API_KEY", "sk-secret")
        environment.setenv("HF_TOKEN", "secret")
        start = session.launcher.start
        made = dict(zip(names, pool.map(lambda arm: start(arm, 0.4), names), strict=True))
    yield made
    for process in made.values():
        process.close()


def environ(process: ArmProcess) -> dict[str, str]:
    text = Path(f"/proc/{process.pid}/environ").read_text()
    return dict(line.split("=", 1) for line in text.split("\0") if line)


def test_an_arm_has_its_own_switches_and_no_key(arms: dict[Arm, ArmProcess], patch: Patch) -> None:
    base, patched = environ(arms["baseline"]), environ(arms["patched"])
    assert (base["PATCHER_PATCHES"], patched["PATCHER_PATCHES"]) == ("off", "on")
    assert base["PATCHER_STRICT"] == patched["PATCHER_STRICT"] == "1"
    assert base["PATCHER_HOME"] != patched["PATCHER_HOME"]
    assert Path(patched["PATCHER_HOME"], "patches", patch.manifest.id).is_dir()
    assert not {"ANTHROPIC_API_KEY", "HF_TOKEN"} & (base.keys() | patched.keys())


def test_a_pair_of_windows_in_two_processes(arms: dict[Arm, ArmProcess]) -> None:
    sides: dict[Arm, Side] = {arm: process.side() for arm, process in arms.items()}
    pair = Pair(0, "ab", ("patched", "baseline"), process=1, swapped=True)
    vocab = arms["baseline"].vocab_size
    for _ in range(2):
        windows = take_pair(pair, sides, WORKLOAD, vocab, 7, ClockMonitor("cpu"))
        assert [window.arm for window in windows] == ["patched", "baseline"]
        assert {(window.process, window.swapped) for window in windows} == {(1, True)}
        # one turn, whose first step is not timed
        assert {window.tokens for window in windows} == {2 * 9}
        # prefill, then ten steps, two norms a layer but for what the point leaves out
        calls = {window.arm: window.kernel_calls for window in windows}
        assert calls["baseline"] == 0
        assert calls["patched"] == 11 * arm_calls(arms["patched"])


NAN = """#include <tvm/ffi/container/tensor.h>
#include <cmath>
using tvm::ffi::TensorView;
void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  auto* values = static_cast<float*>(input.data_ptr());
  for (int64_t i = 0; i < input.size(0) * input.size(1); ++i) values[i] = NAN;
}
"""


def test_a_patch_that_gives_no_numbers_is_measured_for_a_verdict(tmp_path: Path) -> None:
    """A model that gives none is refused as it is loaded: this one is sound."""
    candidate = Candidate(op=OP.name, language=Language.CPP, source=NAN)
    made = Patch.create(
        tmp_path / "nan",
        OP,
        candidate,
        evaluation(candidate),
        engine="transformers",
        made_by="test",
    )
    job = ABJob(workload=WORKLOAD, process_pairs=3, quality_steps=4)
    session = PatchSession(job, {PATCHED: [made]}, tmp_path / "blocks")
    process = session.launcher.start("patched", 0.4)
    try:
        assert arm_calls(process) > 0
    finally:
        process.close()


def arm_calls(process: ArmProcess) -> int:
    """Calls of the patched kernel in one forward."""
    [before] = process.receipts()
    process.ask(say.Generate(seed=1, steps=1), say.Generated)
    [after] = process.receipts()
    made = difference(after, before).total_calls
    assert made % 2 == 0
    assert made // 2 in (2 * LAYERS, 2 * LAYERS - 1)
    return made // 2


def test_what_an_engine_calls_to_get_ready_is_not_what_is_timed(
    arms: dict[Arm, ArmProcess], patch: Patch
) -> None:
    process, name = arms["patched"], patch.manifest.id
    [before] = process.receipts()
    process.warm_up(seed=3, steps=2)
    [warm] = process.receipts()
    assert warm.total_calls > before.total_calls
    assert process.called_since_warm()[name].total_calls == 0
    forward = arm_calls(process)
    since = process.called_since_warm()[name]
    assert since.total_calls == 2 * forward
    assert since.calls.keys() <= warm.calls.keys()
    assert arms["baseline"].called_since_warm() == {}


def test_both_arms_are_asked_for_tokens_logits_and_memory(
    arms: dict[Arm, ArmProcess], session: PatchSession, patch: Patch
) -> None:
    session.ask(0, BASELINE, arms["baseline"])
    session.ask(0, CONTROL, arms["baseline"])
    session.keep(Block(number=0, swapped={}, windows={}, steps={}, peak={}, loaded=2))
    session._begin_block()
    for arm, process in arms.items():
        assert len(process.in_steps(3)) == WORKLOAD.output_len - 1
        session.ask(1, arm, process)
        memory = process.memory()
        assert memory.free > memory.held == memory.peak > 1 << 20
    swapped = {PATCHED: False}
    session.keep(Block(number=1, swapped=swapped, windows={}, steps={}, peak={}, loaded=2))
    assert session.reverted_identical(PATCHED)
    logits = {arm: session.folder.served(arm).logits for arm in arms}
    assert torch.equal(logits["baseline"], session.folder.served(CONTROL).logits)
    assert session.folder.served(CONTROL).answers is None, "weights are random"
    [own] = [one for one in session.taken if one.receipts]
    timed = own.receipts[PATCHED][patch.manifest.id]
    compared = own.quality_receipts[PATCHED][patch.manifest.id]
    assert logits["baseline"].shape == (2 * 5, 1024)
    assert not torch.equal(logits["baseline"], logits["patched"])
    assert torch.allclose(logits["baseline"], logits["patched"], atol=1e-4)
    # prefill is of another shape
    assert len(compared.calls) == 2
    assert compared.total_calls == 5 * arm_calls(arms["patched"])
    assert timed.total_calls > 0
    assert timed.calls.keys() <= compared.calls.keys()
    turned = own.model_copy(
        update={"greedy": {"after": [row[::-1] for row in own.greedy["after"]]}}
    )
    session.taken[1] = turned
    assert not session.reverted_identical(PATCHED)


def test_a_reference_is_of_higher_precision(arms: dict[Arm, ArmProcess], tmp_path: Path) -> None:
    process = arms["baseline"]
    forced = process.ask(say.Generate(seed=5, steps=3), say.Generated).tokens
    path = tmp_path / "wide.npy"
    wrote = process.ask(
        say.Logits(seed=5, forced=forced, path=str(path), reference=True), say.Wrote
    )
    assert "float64" in wrote.how
    assert np.load(path, allow_pickle=False).shape == (2 * 4, 1024)
    entropy = process.ask(say.AskRouting(seed=0, steps=4), say.Entropy).percent
    assert entropy is not None
    assert 40 < entropy <= 100


def test_a_planted_delay_is_in_every_step_until_it_is_taken_out(
    arms: dict[Arm, ArmProcess],
) -> None:
    process, steps = arms["baseline"], 2 * (WORKLOAD.output_len - 1)
    process.ask(say.PlantDelay(seconds=0.05), say.Done)
    slow = process.in_steps(3) + process.in_steps(4)
    assert len(slow) == steps
    assert min(slow) >= 0.05
    process.ask(say.PlantDelay(seconds=0), say.Done)
    with pytest.raises(bench.PatcherError):
        process.ask(say.PlantDelay.model_construct(seconds=-1.0), say.Done)


def test_what_is_no_command_is_refused_and_the_process_lives(
    arms: dict[Arm, ArmProcess],
) -> None:
    process = arms["baseline"]

    class Odd(bench.Record):
        do: str = "run"
        code: str = "print(1)"

    with pytest.raises(bench.UsageError, match="invalid command"):
        process.ask(Odd(), say.Done)
    with pytest.raises(bench.UsageError, match="no window is open"):
        process.ask(say.Decode(steps=1), say.Done)
    process.ask(say.Prefill(seed=1, shape=bench.Shape(batch=1, context=3)), say.Done)
    with pytest.raises(bench.UsageError, match="a window is already open"):
        process.ask(say.Prefill(seed=1), say.Done)
    process.ask(say.End(), say.Ended)


def test_a_process_that_dies_is_an_error_with_how_it_died(arms: dict[Arm, ArmProcess]) -> None:
    process = arms["patched"]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(bench.PatcherError, match="patched process ended") as caught:
        process.ask(say.AskMemory(), say.MemoryUse)
    assert "killed by SIGKILL" in caught.value.message
    with pytest.raises(bench.PatcherError, match="has ended"):
        process.memory()
    process.close()


def test_a_close_takes_the_whole_group_with_it(arms: dict[Arm, ArmProcess]) -> None:
    process = arms["baseline"]
    process.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    process.close()


def test_a_load_that_fails_says_why(patch: Patch) -> None:
    too_big = WORKLOAD.model_copy(update={"model": "gpt-oss-20b"})
    with pytest.raises(bench.MissingError, match="does not fit a CPU"):
        ArmProcess("baseline", say.Load(workload=too_big, memory_share=0.4))


def test_a_changed_bundle_starts_nothing(patch: Patch, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "patch"
    shutil.copytree(patch.folder, copy)
    damaged = Patch.load(copy)
    next(copy.glob("*/*.cpp"), next(copy.rglob("*.cpp"))).write_text("// other\n")
    with pytest.raises(bench.VerificationError):
        arm_environment(tmp_path, (damaged,))


def test_without_anyone_who_asks_an_arm_ends() -> None:
    replies = io.BytesIO()
    asked = b'\xff\n{"do": "load"}\n{"do": "memory"}\n'
    assert serve(io.BytesIO(asked), replies) == 1
    told = [say.REPLY.validate_json(line) for line in replies.getvalue().splitlines()]
    assert [reply.error["kind"] for reply in told if isinstance(reply, say.Failed)] == ["usage"] * 3


def test_a_patch_of_another_engine_starts_nothing(patch: Patch) -> None:
    job = ABJob(workload=WORKLOAD.model_copy(update={"engine": "vllm"}), process_pairs=3)
    with pytest.raises(bench.UsageError, match="is for transformers, not for vllm"):
        compare_in_pairs(job, [patch], silent)


def test_what_is_served_alone_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[bool | None] = []

    def taken(session: Any, plan: ABPlan, *_: Any) -> Any:
        planned.append(plan.together)
        raise bench.PatcherError("planned")

    monkeypatch.setattr(PatchSession, "take", taken)
    for alone in (True, False):
        job = ABJob(workload=WORKLOAD, process_pairs=3, alone=alone)
        with pytest.raises(bench.PatcherError, match="planned"):
            compare_in_pairs(job, [], silent)
    assert planned == [False, None]


def test_vllm_loads_one_after_the_other_unless_its_cache_has_a_size() -> None:
    job = ABJob(workload=WORKLOAD.model_copy(update={"engine": "vllm"}), process_pairs=3)
    assert not loads_beside(job)
    assert loads_beside(job.model_copy(update={"arguments": {"kv_cache_memory_bytes": 1 << 31}}))
    assert loads_beside(ABJob(workload=WORKLOAD, process_pairs=3))


def test_replies_are_checked() -> None:
    assert isinstance(say.REPLY.validate_json('{"kind": "done"}'), say.Done)
    for line in ("{}", "[]", "x", '{"kind": "done", "more": 1}', '{"kind": "loaded"}'):
        with pytest.raises(ValidationError):
            say.REPLY.validate_json(line)


def test_identical_is_as_far_as_two_stock_processes_agree() -> None:
    before = [[1, 2, 3], [4, 5, 6]]
    assert identical(before, before, before)
    assert not identical(before, before, [[1, 2, 3], [4, 5, 0]])
    assert identical(before, [[1, 2, 3], [4, 5, 9]], [[1, 2, 3], [4, 5, 0]])
    assert not identical(before, [[1, 2, 3], [4, 5, 9]], [[1, 2, 3], [4, 0, 6]])
    assert not identical(before, [[0, 2, 3], [0, 5, 6]], before)
    assert not identical(before, before, before[:1])
    assert not identical([], [], [])


def test_receipts_of_several_processes_are_one() -> None:
    first = Receipt(patch_id="p", digest="d", pid=1, calls={"a": 2}, fallbacks={"r": 1})
    second = Receipt(patch_id="p", digest="d", pid=2, calls={"a": 3, "b": 1}, replayed={"b": 1})
    both = merged([first, second])
    assert (both.calls, both.fallbacks, both.replayed) == ({"a": 5, "b": 1}, {"r": 1}, {"b": 1})
    assert difference(both, second).calls == {"a": 2}
