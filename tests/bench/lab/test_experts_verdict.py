"""The verdict on two kernels that loops made for Qwen3-30B-A3B fp8: samples give it again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patcher.ab.decision import decide
from patcher.ab.result import ABResult
from patcher.ab.verdict import read_result
from patcher.bench import Evaluation, content, load_op, presets, sweep_named
from patcher.bench.ab.throughput import compare_windows
from patcher.bench.ab.windows import PairKind
from patcher.kernel_search.recording import EVALUATIONS, read
from patcher.kernel_search.recording_archive import recordings
from patcher.reconciling.launches import step_launches
from patcher.reconciling.reconcile import PatchedKernel, Reconciliation, reconcile
from patcher.reconciling.used_lengths import used_lengths

RESULTS = Path(__file__).parents[3] / "bench/results"
FOLDER = RESULTS / "h200-vllm-0.33"
KEPT = read_result(FOLDER / "qwen3-30b-a3b-fp8.json.xz")
SECOND = Evaluation.model_validate_json(content(FOLDER / "linear_fp8.o_proj.json.xz"))
LOOPS = ("decode_attention-triton", "linear_fp8-cuda")


@pytest.fixture(scope="module")
def winners() -> list[Evaluation]:
    """The verdict on the best candidate of each loop, as its recording has it."""
    found: list[Evaluation] = []
    with recordings(RESULTS / "loop/recordings.tar.xz") as folders:
        by_name = {folder.name: folder for folder in folders}
        for name in LOOPS:
            best = read(by_name[name]).optimisation.best_digest
            lines = (by_name[name] / EVALUATIONS).read_text(encoding="utf-8").splitlines()
            verdicts = [Evaluation.model_validate_json(line) for line in lines]
            [won] = [one for one in verdicts if one.digest == best]
            found.append(won)
    return found


def dtypes_of(evaluation: Evaluation) -> tuple[str, ...]:
    sweep = sweep_named(load_op(evaluation.op).contract, evaluation.sweep)
    assert sweep is not None
    return tuple(dict.fromkeys(sweep.dtypes.values()))


def at_served_lengths(verdict: Evaluation, pages: int) -> Evaluation:
    """The verdict as if its requests had had so many pages."""
    sizes = {"pages": pages, "blocks": 64 * pages}
    timings = [one.model_copy(update={"axes": one.axes | sizes}) for one in verdict.timings]
    return verdict.model_copy(update={"timings": tuple(timings)})


def reconciled(kept: ABResult, verdicts: list[Evaluation]) -> Reconciliation:
    """The reconciliation by what the loops' judge and the receipts say, without the bundles."""
    throughput = kept.measured[0].throughput
    layers = presets()[throughput.workload.model].layers
    assert layers == kept.measured[0].receipt.layers_taken
    kernels = []
    for verdict, one in zip(verdicts, kept.measured, strict=True):
        contract = load_op(verdict.op).contract
        sweep = sweep_named(contract, verdict.sweep)
        assert sweep is not None
        further = (SECOND,) if verdict.digest == SECOND.digest else ()
        attention = verdict.op == "decode_attention"
        launches = step_launches(
            verdict.op,
            throughput,
            one.receipt.calls,
            axis=sweep.axis,
            contract=float(layers) if attention else None,  # once a layer
        )
        kernel = PatchedKernel(
            evaluation=verdict,
            launches=launches,
            dtypes=dtypes_of(verdict),
            further=tuple((other, dtypes_of(other)) for other in further),
            replayed=bool(one.receipt.replayed),
            pdl=attention,
            working_axes=contract.working_axes(),
            used=used_lengths(contract, throughput.workload),
        )
        kernels.append(kernel)
    return reconcile(kernels, throughput)


def test_the_patches_are_what_won_the_loops(winners: list[Evaluation]) -> None:
    names = [f"{one.op}-{one.language}-{one.digest[:8]}" for one in winners]
    assert tuple(names) == KEPT.patches
    assert SECOND.digest == winners[1].digest


def test_its_windows_give_the_comparison_and_the_control_again() -> None:
    found = KEPT.measured[0].throughput
    windows = list(found.windows)
    kinds: tuple[PairKind, ...] = ("ab", "aa")
    for kind, stated in zip(kinds, (found.comparison, found.control), strict=True):
        assert stated is not None
        again = compare_windows(windows, kind, stated.margin_pct, stated.confidence_pct)
        assert again is not None
        assert again.model_dump(exclude={"reason"}) == stated.model_dump(exclude={"reason"})
    for one in KEPT.measured:
        assert one.receipt.layers_refused == {}
        assert one.receipt.failure is None
    timed = sum(window.kernel_calls or 0 for window in windows)
    assert sum(one.receipt.total_calls for one in KEPT.measured) == timed


def test_verdicts_on_the_kernels_give_what_was_promised_and_decided_again(
    winners: list[Evaluation],
) -> None:
    again, then = reconciled(KEPT, winners), KEPT.reconciliation
    assert then is not None
    figures = {name for name in Reconciliation.model_fields if name.endswith(("_us", "_pct"))}
    assert again.model_dump(include=figures) == then.model_dump(include=figures)
    assert again.rows[1:] == then.rows[1:]
    assert again.explained is then.explained is False
    decided = [
        decide(one, verdict, again) for one, verdict in zip(KEPT.measured, winners, strict=True)
    ]
    words = f"; not in that promise: {again.left_out[0]}"  # the file's words are of before
    for one, kept in zip(decided, KEPT.decisions, strict=True):
        told = (*kept.reasons[:-1], kept.reasons[-1] + words)
        assert one == kept.model_copy(update={"reasons": told})
        assert one.verdict == "accept"


def test_attention_is_left_out_of_the_promise_in_words(winners: list[Evaluation]) -> None:
    again = reconciled(KEPT, winners)
    why = (
        "judged with requests of 1,009 to 1,024 tokens (64 pages of 16); served ones had 1,025 to "
        "1,088 tokens (65 to 68 pages of 16), 1,056 in the middle of the output, of a table of 256"
    )
    assert again.left_out == (f"decode_attention, 48 launches a step: {why}",)
    row = again.rows[0]
    assert (row.name, row.launches, row.counted) == ("decode_attention", 48, False)
    [at_8] = [one for one in winners[0].timings if one.axes["tokens"] == 8]
    assert row.saved_us == pytest.approx(48 * at_8.baseline_us * (1 - 1 / at_8.speedup))
    assert row.note.startswith(why)


@pytest.mark.parametrize(("pages", "counts"), [(66, True), (65, False), (256, False)])
def test_the_promise_has_attention_where_requests_were_as_long(
    winners: list[Evaluation], pages: int, counts: bool
) -> None:
    """66 pages are those of 1,056 tokens; 256 are the width of the engine's table, whose rest no
    request used."""
    attention, linear = winners
    alone = reconciled(KEPT, winners)
    found = reconciled(KEPT, [at_served_lengths(attention, pages), linear])
    assert found.rows[0].saved_us == alone.rows[0].saved_us
    assert found.rows[0].counted is counts
    assert bool(found.left_out) is not counts
    assert alone.expected_us is not None
    saved = alone.rows[0].saved_us if counts else 0.0
    assert saved is not None
    assert found.expected_us == pytest.approx(alone.expected_us + saved)
    if counts:
        assert "judged at blocks=4224, pages=66; served ones had 1,025 to 1,088 tokens" in (
            found.rows[0].note
        )


def test_the_pages_have_its_figures(winners: list[Evaluation]) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    [title] = re.findall(r"## Qwen3-30B-A3B fp8 with two patches.*", page)
    section = page.split(title)[1].split("\n## ")[0]
    kept, reconciliation = KEPT.decisions[0], KEPT.reconciliation
    assert reconciliation is not None
    assert reconciliation.expected_us is not None
    assert reconciliation.expected_pct is not None
    gain = f"{kept.gain_pct:+.2f} %** [{kept.gain_low_pct:+.2f}, {kept.gain_high_pct:+.2f}]"
    for text in (section, (RESULTS / "README.md").read_text(encoding="utf-8")):
        assert f"**{gain}" in text
    assert f"**{gain}" in (RESULTS.parents[1] / "docs/results.md").read_text(encoding="utf-8")
    for row in reconciliation.rows:
        assert row.launches is not None
        assert row.saved_us is None or f"| {row.launches:g} | {row.saved_us:,.0f} |" in section
    assert f"**{reconciliation.expected_us:,.0f}**" in section
    assert f"+{reconciliation.expected_pct:.2f} %" in section
    assert f"**{reconciliation.measured_us:,.0f}**" in section
    attention = reconciled(KEPT, winners).rows[0]
    launches, apart = attention.launches, attention.saved_us
    assert apart is not None
    assert f"| {launches:.0f} | {apart:.0f} |" in section
    for lengths in (
        "1,009 to 1,024 tokens (64 pages)",
        "1,025 to 1,088 (65 to 68 of the 256 pages",
    ):
        assert lengths in section
    both = reconciliation.expected_us + apart
    missing = both - reconciliation.measured_us
    promised = (reconciliation.step_us / (reconciliation.step_us - both) - 1) * 100
    assert f"{both:,.0f} us, {promised:+.1f} %" in section
    assert f"{missing:.0f} us, {promised - kept.gain_pct:.1f}" in section
