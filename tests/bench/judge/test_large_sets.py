"""Input sets too large to be sent whole: how many there are, how they are made and checked."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patcher import bench, pipeline
from patcher.bench import Candidate, Evaluation, Language, Outcome
from patcher.bench.judge import JudgeSettings, cases, open_judge, planning, regimes
from patcher.bench.judge import random_pool as stock
from patcher.bench.judge.blob import FILL
from patcher.bench.judge.cases import Case, Secrets, tensors_of
from patcher.bench.judge.judge import Judge
from patcher.bench.judge.memory_file import Left
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sets import CallSets
from patcher.bench.judge.timed_arm import fresh, fresh_sets
from patcher.bench.judge.tools import Call
from patcher.bench.runner.mixing import WIDTH, Mixer
from patcher.plan import RunPlan
from patcher.settings import resolve

OP = bench.load_op("moe_matmul_down")
POINT = OP.sweep("cpu").points()[-1]
SERVED = OP.sweep("cuda").points()[-1]
SOURCE = next(c.source for i, c in OP.solutions() if i.language is Language.TORCH)
ENTRY = "    offsets = token_offsets.tolist()\n"
EACH = "numbers(weights[expert], scales[expert], bias.shape[1])"


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that this machine's sizes travel as those of a GPU do."""
    monkeypatch.setattr(cases, "MIXED_BYTES", 1 << 10)
    monkeypatch.setattr(cases, "CHECKED_BYTES", 1 << 8)
    monkeypatch.setattr(stock, "PIECE_BYTES", 1000)


@pytest.fixture
def judge(small_is_large: None) -> Iterator[Judge]:
    settings = JudgeSettings(
        baseline="eager", pairs=3, points=1, threads=1, calls=60, lives_s=0.0, timeout_s=20
    )
    with open_judge(settings) as opened:
        yield opened


def judged(judge: Judge, source: str, language: Language = Language.TORCH) -> Evaluation:
    candidate = Candidate(op=OP.name, language=language, source=source)
    return judge.evaluate(candidate, lambda *_: None)


def altered(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


def test_the_right_one_is_right_and_hardly_anything_is_sent(judge: Judge) -> None:
    evaluation = judged(judge, SOURCE)
    assert evaluation.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), evaluation.failed_checks
    plan = tensors_of(OP, POINT)
    assert {slot.name: slot.travel for slot in plan.watched} == {
        **dict.fromkeys(("x", "scales"), "checked"),
        **dict.fromkeys(("weights", "bias"), "mixed"),
    }
    assert plan.returned_bytes < plan.sent_bytes < plan.set_bytes


CHANGED = ENTRY + "    weights[-1, -1, -1] += 1\n"
AROUND = ENTRY + "    weights.as_strided((1,), (1,), weights.storage_offset() - 1).fill_(0)\n"
PACKED_ONCE = """
made = {}
def kept(expert, weights, scales, columns):
    key = KEY
    if key not in made:
        made[key] = numbers(weights, scales, columns)
    return made[key]


def moe_matmul_down("""


@pytest.mark.parametrize(
    ("change", "outcome", "checks", "said"),
    [
        ((ENTRY, CHANGED), "guard_violation", {"guards"}, "changed weights"),
        ((ENTRY, AROUND), "guard_violation", {"guards"}, "weights.* around it"),
        ((ENTRY, CHANGED.replace("weights", "scales")), "guard_violation", {"guards"}, "scales"),
        (
            ("(weights.data_ptr(), weights.shape, columns)",),
            "mismatch",
            {"values", "values after", "determinism", "timed outputs"},
            "output",
        ),
        (
            ("(bytes(weights.view(-1)[::97].tolist()), bytes(scales.reshape(-1).tolist()))",),
            "mismatch",
            {"timed outputs", "values after"},
            "output",
        ),
    ],
    ids=["written", "around", "sent-written", "cached-by-address", "cached-by-a-sample"],
)
def test_a_cheat_with_large_weights_is_caught(
    judge: Judge, change: tuple[str, ...], outcome: str, checks: set[str], said: str
) -> None:
    if len(change) == 2:
        source = altered(*change)
    else:
        source = altered(EACH, f"kept(expert, {EACH.removeprefix('numbers(')}")
        source = source.replace("\ndef moe_matmul_down(", PACKED_ONCE.replace("KEY", change[0]))
    evaluation = judged(judge, source)
    assert evaluation.outcome == outcome, evaluation.log
    [failed] = evaluation.failed_checks
    assert failed.name in checks
    assert re.search(said, failed.detail)


def test_how_many_sets_follows_from_what_one_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = bench.load_op("fused_add_rms_norm")
    small = norm.sweep("cuda").points()[0]
    assert planning.block_sets(norm, small, "cuda") == planning.SETS["cuda"]
    large = small.model_copy(update={"axes": {"tokens": 2048, "hidden": 2880}})
    assert planning.block_sets(norm, large, "cuda") == planning.FEWEST_SETS
    for name in ("moe_matmul_down", "moe_matmul_swiglu"):
        op = bench.load_op(name)
        planning.require_fits(op, op.sweep("cuda"), "cpu")
        for point in op.sweep("cuda").points():
            plan = tensors_of(op, point)
            assert planning.block_sets(op, point, "cuda") == planning.FEWEST_LARGE
            assert planning.soaked_sets(plan) == max(planning.SOAKED_BYTES // plan.set_bytes, 1)
            assert plan.sent_bytes < plan.set_bytes // 8
        assert planning.soaked_calls(op, op.sweep("cuda"), 1000) == planning.FEWEST_CALLS
        assert planning.soaked_calls(op, op.sweep("cuda"), 50) == 50
    assert planning.soaked_calls(norm, norm.sweep("cuda"), 1000) == 1000
    plan = tensors_of(OP, SERVED)
    monkeypatch.setattr(planning, "CAPACITY", 2 * plan.sent_bytes)
    assert planning.block_sets(OP, SERVED, "cuda") == planning.soaked_sets(plan) == 2


def test_an_op_too_large_is_an_error_with_a_hint_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sweep = OP.sweep("cuda").model_copy(update={"fixed": {**SERVED.axes, "experts": 5000}})
    with pytest.raises(
        bench.UsageError, match=r"too large to be judged: 1.\d+ GiB go to"
    ) as caught:
        planning.require_fits(OP, sweep, "cpu")
    assert 'values = "bits"' in caught.value.hint
    monkeypatch.setattr(planning, "CAPACITY", 1 << 10)
    candidate = Candidate(op=OP.name, language=Language.TORCH, source="does not even compile(")
    with open_judge(JudgeSettings()) as judge, pytest.raises(bench.UsageError, match="too large"):
        judge.evaluate(candidate, lambda *_: None)


def test_every_sweep_that_ships_can_be_judged() -> None:
    """The output matrix of a vocabulary in float32 could not, and only a GPU would have told."""
    for op in bench.load_ops().values():
        for sweep in op.contract.sweeps:
            planning.require_fits(op, sweep, "cpu")


def test_a_point_with_nothing_to_do_is_not_timed() -> None:
    """Its speedup would count as much as any other's."""
    norm = bench.load_op("fused_add_rms_norm")
    with pytest.raises(bench.UsageError, match="has nothing to do"):
        planning.require_fits(norm, norm.sweep("cpu", "cpu@tokens=0:4"), "cpu")


@pytest.mark.parametrize("sizes", ["tokens=0", "tokens=99999999"])
def test_no_model_is_asked_for_what_the_judge_would_refuse(
    sizes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = resolve({"model": "exchange:prompts", "judge": "exchange:jobs", "memory": "off"})
    op, language = "fused_add_rms_norm", Language.CPP
    plan = RunPlan(op=op, language=language, whole=False, sweep=f"cpu@{sizes}")
    with pytest.raises(bench.UsageError, match=r"nothing to do|too large"):
        pipeline.start(settings, "optimize", None, None, plan)
    assert not list(tmp_path.iterdir())


def test_a_call_in_a_wider_dtype_that_does_not_fit_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm = bench.load_op("fused_add_rms_norm")
    sweep = norm.sweep("cuda")  # in bfloat16; the op takes float32, too
    every = [tensor.name for tensor in norm.contract.tensors]
    sent = [
        tensors_of(norm, point, changed=every).sent_bytes
        for point in cases.shapes_tried(norm, sweep)
    ]
    monkeypatch.setattr(planning, "CAPACITY", max(sent))
    monkeypatch.setattr(planning, "FEWEST_LARGE", 1)
    planning.require_fits(norm, sweep, "cpu")
    monkeypatch.setattr(planning, "CAPACITY", max(sent) - 1)
    with pytest.raises(bench.UsageError, match=r"float32 is too large to be judged.*for 1 call$"):
        planning.require_fits(norm, sweep, "cpu")


def test_the_sets_of_a_block_differ_in_every_word_and_some_in_one_bit(small_is_large: None) -> None:
    draw = Secrets(3)
    bits = RandomPool(OP, OP.sweep("cpu"), "cpu", draw)
    sets = fresh_sets(OP, POINT, 12, "cpu", bits, draw)
    words = [values["weights"].flatten().view(torch.int64) for values in sets.inputs]
    twins = {}
    for index, case in enumerate(sets.cases):
        for other in range(index):
            same = int((words[index] == words[other]).sum())
            if case.seed == sets.cases[other].seed:
                twins[index] = len(words[0]) - same
            else:
                assert same < 8, (index, other)
    assert twins
    assert set(twins.values()) <= {1, 2}  # one bit of each


def test_a_buffer_is_used_again_when_its_sets_are_gone_and_not_before() -> None:
    draw = Secrets(3)
    bits = RandomPool(OP, OP.sweep("cpu"), "cpu", draw)
    first, second = (fresh_sets(OP, POINT, 2, "cpu", bits, draw) for _ in range(2))
    place, held = first.data.data_ptr(), second.data.clone()
    assert second.data.data_ptr() != place
    del first
    third = fresh_sets(OP, POINT, 2, "cpu", bits, draw)
    assert third.data.data_ptr() == place
    assert torch.equal(second.data, held)
    assert not torch.equal(third.data, held)


def test_a_mixed_tensor_is_the_stock_from_a_place_on_and_round_its_end(
    small_is_large: None,
) -> None:
    bits = RandomPool(OP, OP.sweep("cpu"), "cpu", Secrets(1))
    target, stored = torch.empty(800, dtype=torch.uint8), bits.bits.numpy().view(np.uint64)
    at, mask = len(stored) - 10, (1 << 62) + 12345
    Mixer().mix(target, bits.bits, [at, mask, 401, 1, 0, bits.size])
    expected = np.roll(stored, 10)[:100] ^ np.uint64(mask)
    expected.view(np.uint8)[401] ^= 1
    assert (target.numpy().view(np.uint64) == expected).all()
    with pytest.raises(ValueError, match="words of a stock"):
        Mixer().mix(
            torch.empty(bits.size + 8, dtype=torch.uint8), bits.bits, [0, 1, 0, 0, 0, bits.size]
        )


LINEAR = bench.load_op("linear")
BY_ROW = LINEAR.sweep("cpu").points()[-1]
KEPT = """import torch
made = {}
def linear(x, weight, bias, output):
    key = KEY
    if key not in made:
        made[key] = weight.float().T.contiguous()
    wide = x.float() @ made[key]
    output.copy_(wide + bias.float() if bias.numel() else wide)
"""


def test_weights_keep_their_size_and_sign_and_twins_differ_so_that_one_can_tell(
    small_is_large: None,
) -> None:
    draw = Secrets(3)
    pool = RandomPool(LINEAR, LINEAR.sweep("cpu"), "cpu", draw)
    sets = fresh_sets(LINEAR, BY_ROW, 12, "cpu", pool, draw)
    drawn = [values["weight"] for values in sets.inputs]
    spread = cases.make_inputs(LINEAR, Case(BY_ROW, "normal", 1, ()), "cpu")["weight"].double()
    twins = 0
    for index, case in enumerate(sets.cases):
        assert drawn[index].isfinite().all()
        assert float(drawn[index].double().std()) == pytest.approx(float(spread.std()), rel=0.3)
        for other in range(index):
            changed = (drawn[index] != drawn[other]).nonzero()
            if case.seed != sets.cases[other].seed:
                assert len(changed) > 0.9 * drawn[index].numel()
                continue
            twins += 1
            for at in map(tuple, changed.tolist()):
                now, before = float(drawn[index][at].abs()), float(drawn[other][at].abs())
                # large even in a sum of thousands of weights with the error of bfloat16
                assert 0.5 <= max(now, before) < 32
                assert abs(now - before) > 0.2
    assert twins


@pytest.mark.parametrize(
    ("key", "right"),
    [("0\n    made.clear()", True), ("weight.data_ptr()", False), ("0", False)],
    ids=["honest", "cached-by-address", "cached"],
)
def test_weights_of_a_block_are_not_those_of_another(judge: Judge, key: str, right: bool) -> None:
    source = KEPT.replace("KEY", key)
    found = judge.evaluate(
        Candidate(op="linear", language=Language.TORCH, source=source), lambda *_: None
    )
    assert (found.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)) is right, found.failed_checks
    assert tensors_of(LINEAR, BY_ROW).slots[1].travel == "mixed"
    assert tensors_of(LINEAR, BY_ROW, changed=["weight"]).slots[1].travel == "checked"


def test_weights_are_sent_only_in_cases_that_change_their_values(small_is_large: None) -> None:
    """What a case says to change is what the runner finds changed, whichever way it travels."""
    draw = Secrets(4)
    sweep = LINEAR.sweep("cpu")
    pool, spared = RandomPool(LINEAR, sweep, "cpu", draw), 0
    for case in cases.correctness_cases(LINEAR, sweep, draw):
        [values] = (sets := CallSets.made(LINEAR, [case], "cpu", pool)).inputs
        weight = sets.plan.slots[1]
        whole = weight.travel != "mixed"
        changed = "weight" in regimes.changed(LINEAR, case.regime, case.only)
        if changed:
            assert whole, case.label()
            plain = cases.make_inputs(LINEAR, case, "cpu")["weight"]
            assert torch.equal(values["weight"].view(torch.uint8), plain.view(torch.uint8))
        elif not whole:
            assert values["weight"].isfinite().all()
            spread = float(values["weight"].double().std())
            assert spread == pytest.approx(math.prod(weight.shape[1:]) ** -0.5, rel=0.3)
        if case.only in ("x", "bias") and not pool.lacks(tensors_of(LINEAR, case.point)):
            spared += not whole
            assert not whole, case.label()
    assert spared >= len(regimes.EACH)


def test_each_regime_says_which_values_it_changes() -> None:
    point = LINEAR.sweep("cpu").points()[0]
    for regime in regimes.regimes_of(LINEAR):
        for only in ("", *regimes.targets(LINEAR, regime)):
            normal = regimes.make(LINEAR, point, 7, "normal", "cpu")
            made = regimes.make(LINEAR, point, 7, regime, "cpu", only)
            differ = {
                name
                for name, value in made.items()
                if not torch.equal(value.view(torch.uint8), normal[name].view(torch.uint8))
            }
            assert differ <= regimes.changed(LINEAR, regime, only), (regime, only)
            assert bool(differ) == (regime != "normal")


@pytest.mark.parametrize("size", [4, 4 * WIDTH - 4, 4 * WIDTH, 3 * 4 * WIDTH + 20])
def test_a_digest_tells_every_change_and_depends_on_the_key(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    mixer, chosen = Mixer(), random.Random(size)
    right = mixer.digest(data, 5)
    assert mixer.digest(data.clone(), 5) == right
    assert mixer.digest(data, 6) != right
    for _ in range(20):
        other = data.clone()
        other[chosen.randrange(size)] ^= 1 << chosen.randrange(8)
        assert mixer.digest(other, 5) != right
    if size > 8:  # a plain sum would not tell
        other = data.clone()
        other[:4], other[4:8] = data[4:8].clone(), data[:4].clone()
        assert mixer.digest(other, 5) != right or data[:4].equal(data[4:8])


@pytest.mark.parametrize("said", [None, [], [[]], 5, [[1, 2, 3, 4]], ["weights"], {"0": [1]}])
def test_digests_are_the_runners_word_and_may_be_anything(small_is_large: None, said: Any) -> None:
    bits = RandomPool(OP, OP.sweep("cpu"), "cpu", Secrets(1))
    sets = CallSets.made(OP, [Case(POINT, "normal", 1, ())], "cpu", bits)
    back = torch.full((1, sets.plan.returned_bytes), FILL, dtype=torch.uint8)
    back[:, sets.plan.poisoned_bytes :] = sets.data
    left = Left(back, 9, [sets.digests(sets.inputs[0], 9)])
    found = sets.problem(left)
    assert found is not None
    assert found[0] == "values"  # nothing was written, and nothing touched
    found = sets.problem(replace(left, digests=said))
    assert found is not None
    assert found[0] == "guards"


def test_tools_that_watch_a_whole_process_are_given_all_bytes(small_is_large: None) -> None:
    call = Call.of(OP, POINT, 1)
    assert call.plan.sent_bytes == call.plan.returned_bytes == call.plan.set_bytes == len(call.data)
    inputs = cases.make_inputs(OP, Case(POINT, "normal", 1, ()), "cpu")
    slot = next(slot for slot in call.plan.slots if slot.name == "weights")
    held = call.data[slot.begin : slot.begin + slot.span_bytes]
    assert torch.equal(held, inputs["weights"].flatten())


def test_of_few_sets_some_are_twins_and_never_all() -> None:
    """A large op gets three; a call behind a late writer wants two that are unlike."""
    draw = Secrets(5)
    drawn = [fresh(OP, POINT, planning.FEWEST_LARGE, draw) for _ in range(400)]
    assert any(len({case.seed for case in sets}) < len(sets) for sets in drawn)
    assert all(any(a.seed != b.seed for b in sets) for sets in drawn for a in sets)
