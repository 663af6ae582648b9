"""Verdicts over a paged cache against what was served: lengths tell them apart, room does not."""

from __future__ import annotations

from typing import Any

import pytest
from measure_sample import decided
from measure_sample import evidence as ab_evidence
from report_sample import comparison, evaluation, sample, throughput_of

from patcher.bench import Evaluation, Throughput, Workload, load_op
from patcher.bench.engines import kv_cache
from patcher.reconciling import used_lengths as lengths
from patcher.reconciling.launches import ShapeLaunches, StepLaunches
from patcher.reconciling.micro import Saving, saving
from patcher.reconciling.reconcile import PatchedKernel, Reconciliation, reconcile
from patcher.reconciling.used_lengths import used_lengths
from patcher.report.html import render_html
from patcher.report.markdown import render_markdown

ATTENTION, LATENT = load_op("decode_attention").contract, load_op("mla_decode").contract
HEADS = {"group": 8, "kv_heads": 8, "head_dim": 64, "sinked": 1}
JUDGED = {"tokens": 8, "blocks": 4224, "block_size": 16, "pages": 66, "windowed": 0, **HEADS}
SERVED = {**JUDGED, "blocks": 12800, "pages": 256}


def workload(model: str = "gpt-oss-20b", **traffic: int) -> Workload:
    sizes = {"batch": 8, "input_len": 1024, "output_len": 64, **traffic}
    return Workload(
        model=model,
        engine="vllm",
        device="cuda",
        dtype="bfloat16",
        **sizes,  # type: ignore[arg-type]
    )


def judged_at(*axes: dict[str, int], op: str = "decode_attention") -> Evaluation:
    known = evaluation()
    one = known.timings[0]
    timings = tuple(one.model_copy(update={"axes": each}) for each in axes)
    return known.model_copy(update={"op": op, "timings": timings})


def shape(axes: dict[str, int]) -> ShapeLaunches:
    return ShapeLaunches(label="as served", axes=axes, per_step=12)


def saved(judged: Evaluation, served: dict[str, int], asked: Workload | None = None) -> Any:
    contract = load_op(judged.op).contract
    used = used_lengths(contract, asked or workload())
    assert used is not None
    return saving(judged, shape(served), (), None, contract.working_axes(), used)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"blocks": 9999}, ""),
        ({"pages": 64}, "judged with requests of 1,009 to 1,024 tokens (64 pages of 16); served"),
        ({"pages": 256, "blocks": 16384}, "judged with requests of 4,081 to 4,096 tokens (256 "),
        ({"blocks": 527}, "judged with requests that share 527 pages"),
    ],
)
def test_room_that_no_request_uses_tells_no_shapes_apart(changed: dict[str, int], why: str) -> None:
    found = saved(judged_at({**JUDGED, **changed}), SERVED)
    assert isinstance(found, Saving)
    assert found.us > 0
    assert found.apart.startswith(why)
    assert bool(found.apart) == bool(why)
    if not why:
        assert "pages=66" in found.note
        assert (
            "served ones had 1,025 to 1,088 tokens (65 to 68 pages of 16), 1,056 in" in found.note
        )


def test_other_sizes_are_never_taken_for_the_served_ones() -> None:
    for other in ({"block_size": 32}, {"group": 4}, {"tokens": 16}, {"sinked": 0}):
        found = saved(judged_at({**JUDGED, **other}), SERVED)
        [(axis, size)] = other.items()
        assert found == f"never judged at {axis}={SERVED[axis]}, the nearest is {axis}={size}"


def test_of_several_timings_the_one_of_the_served_length_counts() -> None:
    several = judged_at({**JUDGED, "pages": 64}, JUDGED, {**JUDGED, "pages": 256, "blocks": 16384})
    for traffic, counts in (
        (workload(), True),
        (workload(input_len=4064), True),
        (workload(input_len=2048), False),
    ):
        found = saved(several, SERVED, traffic)
        assert isinstance(found, Saving)
        assert (not found.apart) is counts


@pytest.mark.parametrize(
    ("pages", "window", "traffic", "why"),
    [
        (64, 128, {}, ""),
        (66, 128, {"input_len": 8192}, ""),
        (64, 512, {}, "judged with a window of 128 tokens, served with 512"),
        (64, None, {}, "judged with a window of 128 tokens, served with one that is not known"),
        (4, 128, {"input_len": 40, "output_len": 20}, ""),
        (5, 128, {"input_len": 40, "output_len": 20}, "judged with requests of 65 to 80 tokens"),
        (66, 128, {"input_len": 100}, "judged with requests of 1,041 to 1,056 tokens"),
    ],
)
def test_a_window_hides_how_long_requests_are(
    pages: int,
    window: int | None,
    traffic: dict[str, int],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stated = kv_cache.CachedAttention(window=window or 0)
    monkeypatch.setattr(lengths, "cached_attention", lambda _: stated)
    windowed = {"windowed": 1}
    judged = judged_at({**JUDGED, "pages": pages, **windowed})
    found = saved(judged, {**SERVED, **windowed}, workload(**traffic))
    assert isinstance(found, Saving)
    assert found.apart.startswith(why)
    assert bool(found.apart) == bool(why)


def test_a_model_that_is_not_here_has_no_known_window() -> None:
    used = used_lengths(ATTENTION, workload("/nowhere/at-all"))
    assert used is not None
    assert used.window is None
    known = used_lengths(ATTENTION, workload())
    assert known is not None
    assert known.window == 128
    assert used_lengths(load_op("rope_kv_update").contract, workload()) is None
    renamed = ATTENTION.sweeps[0].model_copy(update={"fixed": {"pages": 4}})
    assert used_lengths(ATTENTION.model_copy(update={"sweeps": (renamed,)}), workload()) is None


def test_latent_attention_goes_by_its_own_pages() -> None:
    axes = {"tokens": 8, "heads": 128, "latent": 512, "rope": 64, "blocks": 1088, "block_size": 64}
    judged = judged_at({**axes, "pages": 17}, op="mla_decode")
    asked = workload("deepseek-v3-cut")
    served = {**axes, "blocks": 999, "pages": 64}
    found = saved(judged, served, asked)
    assert isinstance(found, Saving)
    assert not found.apart
    short = saved(judged_at({**axes, "pages": 16}, op="mla_decode"), served, asked)
    assert isinstance(short, Saving)
    assert "served ones had 1,025 to 1,088 tokens (17 pages of 64)" in short.apart


def reconciled(*judged: dict[str, int]) -> tuple[Reconciliation, Throughput]:
    throughput = throughput_of(comparison=comparison(2.0, 0.2, 23), workload=workload())
    launches = StepLaunches(
        op="decode_attention", shapes=(shape(SERVED),), source="a profile of the patched engine"
    )
    first, *others = (judged_at(axes) for axes in judged)
    kernel = PatchedKernel(
        evaluation=first,
        launches=launches,
        further=tuple((one, ()) for one in others),
        working_axes=ATTENTION.working_axes(),
        used=used_lengths(ATTENTION, throughput.workload),
    )
    return reconcile([kernel], throughput), throughput


def test_a_verdict_at_the_served_length_goes_before_one_at_another() -> None:
    found, _ = reconciled({**JUDGED, "pages": 64}, JUDGED)
    assert [row.counted for row in found.rows] == [True]
    assert not found.left_out
    assert found.expected_us is not None
    assert found.expected_us == found.rows[0].saved_us


def test_what_is_left_out_is_in_the_report_and_the_verdict() -> None:
    found, throughput = reconciled({**JUDGED, "pages": 64})
    assert found.expected_us is None
    [row] = found.rows
    assert not row.counted
    assert row.saved_us is not None, "it is shown beside what it was judged at"
    [left] = found.left_out
    assert left.startswith("decode_attention, 12 launches a step: judged with requests of 1,009")
    assert found.said == f"not reconciled: {left}"
    told = decided(**ab_evidence(), reconciliation=found)
    assert told.reasons[-1] == f"micro gains leave out {left}"
    assert told.verdict == decided(**ab_evidence()).verdict
    shown = sample(throughput=throughput, reconciliation=found)
    assert f"not in the sum: {left}" in render_markdown(shown).replace("\\", "")
    page = render_html(shown)
    assert "Not in the sum: decode_attention, 12 launches a step: judged with requests of" in page
