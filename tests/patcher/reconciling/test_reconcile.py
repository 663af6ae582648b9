"""Micro gain times launches against the measured gain: arithmetic, intervals, words, caveats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from measure_sample import decided, evidence
from patch_sample import evaluation as sample_evaluation
from patch_sample import make_patch
from report_lanes_sample import decode, without_times
from report_sample import (
    WORKLOAD,
    comparison,
    evaluation,
    patched,
    patched_kernel,
    throughput_of,
    windows,
)

from patcher.ab import verdict as judging
from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.bench import (
    Candidate,
    Environment,
    Evaluation,
    Language,
    Throughput,
    UsageError,
    load_op,
)
from patcher.integrate import Patch
from patcher.reconciling.launches import ShapeLaunches, StepLaunches, patched_steps, step_launches
from patcher.reconciling.micro import Saving, saving
from patcher.reconciling.patch_kernel import patched_kernel as kernel_of
from patcher.reconciling.reconcile import reconcile

OP = "fused_add_rms_norm"
DECODE, PREFILL = f"{OP} tokens=8 hidden=256 float32", f"{OP} tokens=<=256 hidden=256 float32"
STEP_US = 8 / 551.3 * 1e6
SHAPE = ShapeLaunches(label="tokens=8 hidden=256", axes={"tokens": 8, "hidden": 256}, per_step=1)


def ab(gain: float, half: float = 0.2, **changes: Any) -> Throughput:
    return throughput_of(comparison=comparison(gain, half, 23), **changes)


def on_gpu(**times: float) -> Evaluation:
    """The evaluation as of a CUDA kernel, its point at the batch with more times."""
    plain = evaluation()
    gpu = Environment(device="NVIDIA H200", device_kind="cuda", python="3.12", packages={})
    timings = [one.model_copy(update=times) for one in plain.timings]
    return plain.model_copy(update={"environment": gpu, "timings": tuple(timings)})


def test_the_sum_is_arithmetic() -> None:
    timing = evaluation().timings[2]  # the workload's batch
    assert timing.axes["tokens"] == WORKLOAD.batch
    found = reconcile([patched_kernel(16)], ab(2.04))
    assert found.step_us == pytest.approx(STEP_US)
    assert found.expected_us == pytest.approx(16 * (timing.baseline_us - timing.candidate_us))
    assert found.expected_low_us == pytest.approx(
        16 * timing.baseline_us * (1 - 1 / timing.speedup_low)
    )
    assert found.measured_us == pytest.approx(STEP_US * (1 - 1 / 1.0204))
    assert found.expected_pct == pytest.approx(
        100 * found.expected_us / (STEP_US - found.expected_us)
    )
    assert found.unexplained_pct == pytest.approx(2.04 - found.expected_pct)
    assert found.unexplained_low_pct is not None
    assert found.unexplained_high_pct is not None
    assert found.unexplained_low_pct < found.unexplained_pct < found.unexplained_high_pct


@pytest.mark.parametrize(
    ("gain", "half", "explained", "words"),
    [
        (2.04, 0.2, False, "explained 0.71 of 2.04 %; +1.33 % ["),
        (0.80, 0.2, True, "expected 0.71 %, measured 0.80 %: the difference, +0.09 % ["),
        (0.20, 0.2, False, "expected 0.71 %, measured 0.20 %: -0.51 % ["),
        (1.20, 0.6, True, "no more than the intervals allow"),
        (2.04, 1.5, None, "known too roughly to tell"),
    ],
)
def test_what_is_not_explained_is_said(
    gain: float, half: float, explained: bool | None, words: str
) -> None:
    found = reconcile([patched_kernel()], ab(gain, half))
    assert found.explained is explained
    assert words in found.said


def test_two_kernels_add_up_and_a_slower_one_costs() -> None:
    one = reconcile([patched_kernel()], ab(1.4)).expected_us
    two = reconcile([patched_kernel(), patched_kernel()], ab(1.4))
    assert one is not None
    assert two.expected_us == pytest.approx(2 * one)
    slow = evaluation()
    update = {"speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6}
    slower = tuple(timing.model_copy(update=update) for timing in slow.timings)
    cost = reconcile(
        [patched_kernel(evaluation=slow.model_copy(update={"timings": slower}))], ab(0)
    )
    assert cost.expected_us is not None
    assert cost.expected_us < 0
    assert cost.expected_low_us is not None
    assert cost.expected_high_us is not None
    assert cost.expected_low_us < cost.expected_us < cost.expected_high_us


def test_a_shape_that_was_never_judged_is_not_guessed() -> None:
    odd = ShapeLaunches(label="tokens=7", axes={"tokens": 7, "hidden": 256}, per_step=4)
    launches = StepLaunches(op=OP, shapes=(odd,), source="the contract")
    alone = reconcile([patched_kernel(launches=launches)], ab(2))
    assert alone.explained is None
    assert alone.expected_us is None
    why = "never judged at tokens=7, the nearest is tokens=8"
    assert alone.said == f"not reconciled: {OP}, 4 launches a step: {why}"
    both = StepLaunches(op=OP, shapes=(SHAPE, odd), source="the contract")
    some = reconcile([patched_kernel(launches=both)], ab(2))
    assert [row.counted for row in some.rows] == [True, False]
    assert some.left_out == (f"{OP}, 4 launches a step: {why}",)
    assert some.said.endswith(f"; not in that promise: {some.left_out[0]}")
    whole, part = (
        reconcile([patched_kernel(1, launches=each)], ab(0.05, 0.02))
        for each in (StepLaunches(op=OP, shapes=(SHAPE,), source="the contract"), both)
    )
    assert (whole.explained, part.explained) == (True, None), "what is left out has a gain, too"
    assert whole.expected_us == part.expected_us
    known = evaluation()
    at_odd = tuple(one.model_copy(update={"axes": odd.axes}) for one in known.timings)
    over_another = known.model_copy(update={"timings": at_odd})
    two = reconcile([patched_kernel(launches=both, further=((over_another, ()),))], ab(2))
    assert [row.counted for row in two.rows] == [True, True]
    assert "how often it runs" in reconcile([patched_kernel(launches=None)], ab(2)).said


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"axes": {"tokens": 9}}, "never judged at tokens=9, the nearest is tokens=8"),
        (
            {"axes": {"tokens": 8, "hidden": 512}},
            "never judged at hidden=512, the nearest is hidden=256",
        ),
        ({"axes": {"other": 8}}, "never judged at this shape"),
        ({"bucket": "tokens"}, "a range of sizes of tokens only"),
        ({"dtypes": ("bfloat16",)}, "judged with float32 only"),
    ],
)
def test_why_a_saving_is_not_known(shape: dict[str, Any], why: str) -> None:
    found = saving(evaluation(), SHAPE.model_copy(update=shape), ("float32",), None)
    assert isinstance(found, str)
    assert why in found


def test_the_size_of_a_cache_tells_no_shapes_apart() -> None:
    contract = load_op("rope_kv_update").contract
    working = contract.working_axes()
    judged = {
        "tokens": 8,
        "q_heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "blocks": 32,
        "positions": 9,
    }
    timing = evaluation().timings[0].model_copy(update={"axes": judged})
    known = evaluation().model_copy(update={"op": "rope_kv_update", "timings": (timing,)})

    def of(working: frozenset[str] | None = working, **served: int) -> Saving | str:
        shape = SHAPE.model_copy(update={"axes": judged | served})
        return saving(known, shape, (), None, working)

    exact, larger = of(), of(blocks=2730, positions=131072)
    assert isinstance(exact, Saving)
    assert isinstance(larger, Saving)
    assert larger.us == exact.us
    assert "judged at" not in exact.note
    assert "judged at blocks=32, positions=9" in larger.note
    assert of(None, blocks=2730) == "never judged at blocks=2730, the nearest is blocks=32"
    assert of(tokens=16) == "never judged at tokens=16, the nearest is tokens=8"
    assert of(q_heads=64) == "never judged at q_heads=64, the nearest is q_heads=8"
    assert {"tokens", "q_heads", "kv_heads", "head_dim", "biased"} <= working
    assert not {"blocks", "positions", "block_size"} & working


def test_a_kernel_that_ran_outside_of_graphs_goes_by_its_eager_times() -> None:
    eager = on_gpu(candidate_eager_us=6.0, baseline_eager_us=9.0)
    inside = saving(eager, SHAPE, (), replayed=True)
    outside = saving(eager, SHAPE, (), replayed=False)
    unknown = saving(eager, SHAPE, (), replayed=None)
    assert isinstance(inside, Saving)
    assert isinstance(outside, Saving)
    assert isinstance(unknown, Saving)
    assert inside.us == pytest.approx(8.8 * (1 - 1 / 3.6))
    assert not inside.caveats
    assert outside.us == pytest.approx(3.0)
    assert outside.low_us < outside.us < outside.high_us
    assert "outside of graphs" in outside.note
    assert "was not recorded" in unknown.caveats[0]
    bare = saving(on_gpu(), SHAPE, (), replayed=False)
    assert isinstance(bare, Saving)
    assert "launched it outside of graphs" in bare.caveats[0]
    cold = saving(on_gpu(candidate_cold_us=7.0, baseline_cold_us=9.5), SHAPE, (), replayed=True)
    assert isinstance(cold, Saving)
    assert "+2.50 us a call where L2 is cold" in cold.note


def test_dependent_launch_and_another_device_are_said() -> None:
    found = reconcile([patched_kernel(pdl=True, evaluation=on_gpu(), replayed=True)], ab(2))
    assert any("programmatic dependent launch" in caveat for caveat in found.caveats)
    assert any("timed on NVIDIA H200, the model on AMD" in caveat for caveat in found.caveats)


@pytest.mark.parametrize(("source", "told"), [("// griddepcontrol.wait\n", True), ("//\n", False)])
def test_what_a_bundle_says_of_dependent_launch_is_told(
    source: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, parts = load_op(OP), evidence()
    candidate = Candidate(op=OP, language=Language.CPP, source=source)
    judged = sample_evaluation(candidate)
    Patch.create(tmp_path / "patch", op, candidate, judged, engine="transformers", made_by="test")
    taken = Measurement(**{name: parts[name] for name in Measurement.model_fields if name in parts})
    monkeypatch.setattr(judging, "compare_patches", lambda *_: (taken,))
    found = judging.compare_and_decide(
        ABJob(workload=WORKLOAD), [tmp_path / "patch"], lambda *_: None
    ).reconciliation
    assert found is not None
    assert any("programmatic dependent launch" in caveat for caveat in found.caveats) == told


def test_rows_of_a_profile_take_part() -> None:
    before = decode()
    after = patched(before)
    moe = next(spot for spot in before.hotspots if spot.kind == "kernel" and not spot.op)
    faster = moe.model_copy(update={"exposed_ns": (moe.exposed_ns or 0) // 2})
    spots = tuple(faster if spot == moe else spot for spot in after.hotspots)
    after = after.model_copy(update={"hotspots": spots})
    step_us = (before.wall_ns or 0) / (before.steps or 1) / 1e3
    rate = {"baseline_tokens_per_s": WORKLOAD.batch / step_us * 1e6}
    served = throughput_of(comparison=comparison(9.0, 0.5, 23, **rate))
    alone = reconcile([patched_kernel()], served)
    found = reconcile([patched_kernel()], served, before, after)
    moved = [row for row in found.rows if row.kind == "moved" and row.counted]
    assert [row.name for row in moved] == [moe.name]
    half = (moe.exposed_ns or 0) / 2 / (before.steps or 1) / 1e3
    assert moved[0].saved_us == pytest.approx(half, rel=1e-3)
    assert moved[0].low_us is None
    assert found.expected_us == pytest.approx((alone.expected_us or 0) + half, rel=1e-3)
    own = next(row for row in found.rows if "to compare with its micro gain" in row.note)
    assert not own.counted
    assert own.saved_us is not None
    assert own.saved_us > 0
    assert any("has no interval" in caveat for caveat in found.caveats)
    assert not any("not to scale" in caveat for caveat in found.caveats)


def test_what_a_patched_kernel_took_the_place_of_is_not_counted_twice() -> None:
    """A kernel that only one profile has, a patch's own by its name, and idle time."""
    before = decode()
    after = patched(before)
    moe = next(spot for spot in before.hotspots if spot.kind == "kernel" and not spot.op)
    step_us = (before.wall_ns or 0) / (before.steps or 1) / 1e3
    rate = {"baseline_tokens_per_s": WORKLOAD.batch / step_us * 1e6}
    served = throughput_of(comparison=comparison(9.0, 0.5, 23, **rate))
    alone = reconcile([patched_kernel()], served)
    other = moe.model_copy(
        update={"name": "mine::kernel", "exposed_ns": (moe.exposed_ns or 0) // 2}
    )
    spots = tuple(other if spot == moe else spot for spot in after.hotspots)
    renamed = after.model_copy(update={"hotspots": spots})
    found = reconcile([patched_kernel()], served, before, renamed)
    shown = {row.name: row for row in found.rows if row.kind == "moved"}
    assert (shown[moe.name].note, shown["mine::kernel"].note) == ("gone", "new")
    assert not any(row.counted for row in shown.values())
    assert found.expected_us == alone.expected_us
    mine = patched_kernel(owns=lambda name: name in (moe.name, "mine::kernel"))
    found = reconcile([mine], served, before, renamed)
    assert not {moe.name, "mine::kernel"} & {row.name for row in found.rows}
    [own] = [row for row in found.rows if "to compare with its micro gain" in row.note]
    half = (moe.exposed_ns or 0) / 2 / (before.steps or 1) / 1e3
    assert any("a step keeps the GPU busy for" in caveat for caveat in found.caveats)
    was = next(row for row in shown.values() if "to compare" in row.note)
    assert own.saved_us == pytest.approx((was.saved_us or 0) + half, rel=1e-3)


def test_a_profile_that_cannot_take_part_says_so() -> None:
    found = reconcile([patched_kernel()], ab(2), decode(), without_times())
    assert any("does not know its decode steps" in caveat for caveat in found.caveats)
    assert all(row.kind == "kernel" for row in found.rows)
    other_step = reconcile([patched_kernel()], ab(2), decode(), patched(decode()))
    assert any("not to scale" in caveat for caveat in other_step.caveats)
    assert not [row for row in other_step.rows if row.kind == "moved" and row.counted]
    busy = decode().busy_ns or 0
    crowded = decode().model_copy(update={"total_kernel_ns": int(busy * 1.3)})
    overlap = reconcile([patched_kernel()], ab(2), crowded)
    assert any("kernels overlap (30 %" in caveat for caveat in overlap.caveats)


def test_launches_come_from_profile_contract_and_receipts_in_that_order() -> None:
    throughput = throughput_of()
    steps = patched_steps(throughput)
    assert steps == 24 * WORKLOAD.output_len  # of 32 pairs, 8 are the control's
    calls = {DECODE: 16 * steps, PREFILL: 16 * 24, "other tokens=8": 10**9}
    found = step_launches(OP, throughput, calls, contract=16.0)
    assert found is not None
    assert [(shape.per_step, shape.bucket) for shape in found.shapes] == [
        (16.0, None),
        (0.0, "tokens"),
    ]
    assert found.shapes[0].dtypes == ("float32",)
    assert found.source == "the contract"
    assert not found.notes
    seen = step_launches(OP, throughput, calls, contract=16.0, profile=12.0)
    assert seen is not None
    assert seen.shapes[0].per_step == 12.0
    assert "12 launches a step in the profile, 16 by the contract" in seen.notes[0]
    assert "receipts count about 16" in seen.notes[1]
    counted = step_launches(OP, throughput, calls)
    assert counted is not None
    assert counted.source == "the receipts"
    bare = step_launches(OP, throughput, {}, axis="tokens", contract=16.0)
    assert bare is not None
    assert bare.shapes[0].axes == {"tokens": WORKLOAD.batch}
    assert "taken from the batch" in bare.source
    assert step_launches(OP, throughput, {}, axis="tokens") is None
    assert step_launches(OP, throughput, {}, contract=16.0) is None


def test_a_bucket_that_holds_the_batch_is_the_batch() -> None:
    many = throughput_of(workload=WORKLOAD.model_copy(update={"batch": 200}), windows=windows(1))
    found = step_launches(OP, many, {PREFILL: 10**6}, contract=2.0)
    assert found is not None
    assert found.shapes[0].axes["tokens"] == 200


def test_one_measured_patch_is_put_together(tmp_path: Path) -> None:
    throughput = throughput_of()
    calls = {DECODE: 16 * patched_steps(throughput)}
    judged = evaluation().model_copy(update={"sweep": "cpu"})
    patch = make_patch(tmp_path / "patch")
    manifest = patch.manifest.model_copy(update={"evidence": judged})
    patch = Patch(patch.folder, manifest, patch.digest)
    found = reconcile([kernel_of(patch, throughput, calls)], throughput)
    assert [row.launches for row in found.rows] == [2 * 6]  # two a layer
    assert found.explained is False


def test_a_point_may_take_calls_from_another(tmp_path: Path) -> None:
    made = make_patch(tmp_path / "patch")

    def at(op: str, engine: str = "vllm") -> Patch:
        contract = load_op(op).contract
        point = next(one for one in contract.patch_points if one.engine == engine)
        target = made.manifest.target.model_copy(update={"engine": engine, "point": point.point})
        update = {"contract": contract, "target": target, "id": f"{op}-{engine}"}
        return Patch(made.folder, made.manifest.model_copy(update=update), op)

    norm, sums, both = at(OP), at("moe_reduce"), at("reduce_add_rms_norm")
    assert [one.calls_per_layer() for one in (norm, sums, both)] == [2, 1, 1]
    assert [one.calls_per_layer([norm, both]) for one in (norm, both)] == [1, 1]
    elsewhere = at(OP, "transformers")
    assert elsewhere.calls_per_layer([elsewhere, both]) == 2
    judging.refuse_one_point_twice([norm, sums])
    judging.refuse_one_point_twice([norm, both])
    with pytest.raises(UsageError, match="takes all calls of moe_reduce-vllm"):
        judging.refuse_one_point_twice([norm, sums, both])


def test_an_unexplained_gain_is_a_reason_and_never_a_rejection() -> None:
    given = evidence()
    plain = decided(**given)
    for gain in (2.04, 0.2):
        odd = reconcile([patched_kernel()], ab(gain))
        said = decided(**given, reconciliation=odd)
        assert said.verdict == plain.verdict == "accept"
        assert said.reasons == (
            *plain.reasons,
            f"micro and measured gain do not agree: {odd.said}",
        )
    fits = reconcile([patched_kernel()], ab(0.8))
    assert decided(**given, reconciliation=fits) == plain
    wrong = decided(**evidence(same_model=False), reconciliation=odd)
    assert wrong.verdict == "reject"
