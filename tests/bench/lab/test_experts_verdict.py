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
    again = reconciled(KEPT, winners)
    assert again == KEPT.reconciliation
    decided = [
        decide(one, verdict, again) for one, verdict in zip(KEPT.measured, winners, strict=True)
    ]
    assert tuple(decided) == KEPT.decisions
    assert {one.verdict for one in decided} == {"accept"}


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
    [at_8] = [one for one in winners[0].timings if one.axes["tokens"] == 8]
    launches = reconciliation.rows[0].launches
    assert launches is not None
    apart = (at_8.baseline_us - at_8.candidate_us) * launches
    assert f"| {launches:.0f} | {apart:.0f} |" in section
    both = reconciliation.expected_us + apart
    missing = both - reconciliation.measured_us
    promised = (reconciliation.step_us / (reconciliation.step_us - both) - 1) * 100
    assert f"{both:,.0f} us, {promised:+.1f} %" in section
    assert f"{missing:.0f} us, {promised - kept.gain_pct:.1f}" in section
