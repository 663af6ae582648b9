"""Quality on the real gpt-oss-tiny: decode through the cache, kernels wrong at one shape only."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from measure_sample import TINY
from rich.console import Console

from patcher.bench import Quality, content
from patcher.bench.ab.logits import ALONE, served_alone, served_logits
from patcher.bench.ab.quality import assess, compare_logits
from patcher.bench.ab.records import LogitError
from patcher.bench.engines import Engine, open_engine
from patcher.show.quality import quality_lines

STEPS = 6


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(TINY)


def patched(engine: Engine, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A patch of one norm: what it gives is changed."""
    norm: Any = engine.model.get_submodule("model.layers.2.input_layernorm")

    @contextmanager
    def patch() -> Iterator[None]:
        original = norm.forward
        norm.forward = lambda hidden: change(original(hidden))
        try:
            yield
        finally:
            del norm.forward

    return patch


def assessed(engine: Engine, patch: Any) -> Quality:
    return assess(engine, {"baseline": nullcontext, "patched": patch}, 1, STEPS)


def test_served_logits_are_those_of_the_whole_sequence(engine: Engine) -> None:
    prompts = engine.prompts(1)
    picked = engine.generate(prompts, STEPS).tokens
    served = served_logits(engine, prompts, picked)
    whole = engine.logits(torch.cat([prompts, picked], dim=1), STEPS + 2)[:, :-1]
    assert served.shape == (TINY.batch, STEPS + 1, engine.vocab_size)
    assert torch.allclose(served, whole, atol=1e-4)
    assert torch.equal(served.argmax(-1), picked)
    other = served_logits(engine, prompts, picked.roll(1, dims=1))
    assert torch.equal(other[:, 0], served[:, 0])
    assert not torch.allclose(other[:, 1:], served[:, 1:], atol=1e-3)  # tokens are forced
    assert not engine.model._forward_hooks


def test_an_honest_patch_passes_and_the_yardstick_is_the_baselines_error(engine: Engine) -> None:
    same = assessed(engine, patched(engine, lambda hidden: hidden))
    assert same.passed
    assert same.positions == TINY.batch * (STEPS + 1)
    assert same.worst_flip_margin is None
    assert 0 < same.baseline_rmse < 1e-4
    assert "float64" in same.reference


@pytest.mark.parametrize("decode", [True, False])
def test_a_kernel_wrong_at_one_served_shape_fails(engine: Engine, decode: bool) -> None:
    """Right in prefill and wrong in decode, or the other way round: both are served."""

    def change(hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 1.001 if (hidden.shape[1] == 1) is decode else hidden

    found = assessed(engine, patched(engine, change))
    assert not found.passed
    assert "rmse" in found.reason


def test_a_lower_precision_fails(engine: Engine) -> None:
    found = assessed(engine, patched(engine, lambda hidden: hidden.bfloat16().float()))
    assert not found.passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_and_survive_json(engine: Engine, value: float) -> None:
    found = assessed(engine, patched(engine, lambda hidden: hidden * value))
    assert not found.passed
    assert "not finite" in found.reason
    assert Quality.model_validate_json(found.model_dump_json()) == found


def test_a_baseline_that_is_not_finite_is_no_yardstick(engine: Engine) -> None:
    broken = patched(engine, lambda hidden: hidden * math.nan)
    found = assess(engine, {"baseline": broken, "patched": broken}, 1, STEPS)
    assert not found.passed


def test_an_engine_that_repeats_itself_has_a_floor_of_zero(engine: Engine) -> None:
    found = assessed(engine, patched(engine, lambda hidden: hidden * (1 + 1e-5)))
    assert found.floor == LogitError(rmse=0, max_error=0, mean_kl=0, p99_kl=0, max_kl=0, flips=0)
    assert found.between is not None
    assert found.between.max_error > 0
    shown = printed(found)
    assert "bit-identical" in shown
    assert "no task score: the weights are random" in shown


def test_an_engine_that_does_not_repeat_itself_has_its_own_floor(engine: Engine) -> None:
    """Noise of 1e-4 in the baseline: a patch as noisy passes, one a hundred times so does not."""
    torch.manual_seed(0)

    def noisy(by: float) -> Any:
        return patched(engine, lambda hidden: hidden * (1 + by * torch.randn_like(hidden)))

    def found(by: float) -> Quality:
        return assess(engine, {"baseline": noisy(1e-4), "patched": noisy(by)}, 1, STEPS)

    same, worse = found(1e-4), found(1e-2)
    assert same.floor is not None
    assert same.between is not None
    assert 0 < same.floor.mean_kl <= same.floor.p99_kl <= same.floor.max_kl
    assert 0.5 < same.between.rmse / same.floor.rmse < 2
    assert "bit-identical" not in printed(same)
    assert same.passed, same.reason
    assert not worse.passed


def logits(positions: int = 200) -> torch.Tensor:
    return torch.randn(
        positions, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def noise(by: float, seed: int) -> torch.Tensor:
    return by * torch.randn(200, 50, generator=torch.Generator().manual_seed(seed)).double()


def test_the_worst_positions_are_told_apart_from_the_mean() -> None:
    reference = logits()
    baseline, hurt = reference + noise(1e-2, 1), reference + noise(1e-2, 2)
    hurt[17] += noise(4e-2, 3)[17]  # one position of 200
    found = compare_logits(baseline, baseline, hurt, reference, "float64")
    assert found.patched_max_kl is not None
    assert found.baseline_max_kl is not None
    assert found.baseline_p99_kl is not None
    assert found.patched_mean_kl < 1.3 * found.baseline_mean_kl
    assert found.baseline_mean_kl < found.baseline_p99_kl <= found.baseline_max_kl
    assert found.patched_max_kl > 4 * found.baseline_max_kl
    assert "largest KL" in found.reason
    assert "mean KL" not in found.reason
    exact = found.between
    assert exact is not None
    truth, guess = baseline.log_softmax(-1), hurt.log_softmax(-1)
    assert exact.max_kl == pytest.approx(float((truth.exp() * (truth - guess)).sum(-1).max()))


def test_one_rounding_of_float32_is_allowed_where_the_baseline_is_its_reference() -> None:
    reference = logits().float()
    eps = torch.finfo(torch.float32).eps

    def moved_by(roundings: float) -> Quality:
        moved = reference.double() * (1 + roundings * eps * noise(1, 1).sign())
        return compare_logits(reference, reference, moved, reference, "the same engine")

    assert moved_by(0.9).passed
    assert "rmse" in moved_by(1.2).reason
    assert "largest error" in moved_by(1.2).reason


def test_near_ties_are_counted_and_a_pick_across_a_wide_gap_fails() -> None:
    reference = logits()
    baseline = reference + noise(1e-2, 1)
    top = reference.topk(2, dim=-1)
    near = top.values[:, 0] - top.values[:, 1] < 5e-3
    swapped = baseline.clone()
    rows = near.nonzero().flatten()
    assert len(rows) > 0
    for row in rows:  # the two best change places
        first, second = top.indices[row]
        swapped[row, [first, second]] = baseline[row, [second, first]]
    found = compare_logits(baseline, baseline, swapped, reference, "float64")
    assert found.between is not None
    assert found.between.flips == found.near_tie_flips == len(rows)
    assert found.passed, found.reason
    assert f"{len(rows)} near ties, largest margin" in printed(found)
    assert found.near_ties is not None
    assert len(rows) <= found.near_ties < len(baseline) / 2
    assert f"at {found.near_ties} of {found.positions} positions" in printed(found)
    wide = swapped.clone()
    far = int((top.values[:, 0] - top.values[:, 1]).argmax())
    wide[far, top.indices[far, 1]] = wide[far, top.indices[far, 0]] + 1e-3
    worse = compare_logits(baseline, baseline, wide, reference, "float64")
    assert worse.near_tie_flips == len(rows)
    assert worse.between is not None
    assert worse.between.flips == len(rows) + 1
    assert not worse.passed
    assert "gap at a changed pick" in worse.reason


def test_a_record_of_before_the_floor_still_reads_and_shows() -> None:
    folder = Path(__file__).parents[3] / "bench/results/h200-transformers"
    files = sorted(folder.glob("throughput-*.json.xz"))
    assert len(files) == 2
    for file in files:
        recorded = json.loads(content(file))["measured"]["quality"]
        quality = Quality.model_validate(recorded)
        assert quality.floor is None
        assert len(quality_lines(quality)) == 1


def printed(quality: Quality) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(*quality_lines(quality), sep="\n")
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_reference_puts_back_a_forward_of_the_instances_own(engine: Engine) -> None:
    norm: Any = engine.model.get_submodule("model.layers.2.input_layernorm")
    original = norm.forward

    def own(hidden: torch.Tensor) -> torch.Tensor:
        return original(hidden)

    norm.forward = own
    try:
        engine.reference_logits(engine.prompts(1))
        assert norm.forward is own
    finally:
        del norm.forward
    engine.reference_logits(engine.prompts(1))
    assert "forward" not in norm.__dict__


def leading_by(values: torch.Tensor, lead: float) -> int:
    """The position whose best logit leads the next by nearest to this."""
    best, second = values.topk(2, dim=-1).values.unbind(-1)
    return int((best - second - lead).abs().argmin())


def second_wins(values: torch.Tensor, *rows: int) -> torch.Tensor:
    """A copy in which the second best token of these positions is the best one."""
    found = values.clone()
    for row in rows:
        found[row, values[row].topk(2).indices[1]] = values[row].amax() + 1e-3
    return found


def test_errors_that_change_no_pick_excuse_none() -> None:
    """Nor do all logits of a position that shift together, as in bfloat16 on real weights."""
    reference = logits()
    baseline = reference + noise(1e-2, 1)
    baseline[3, reference[3].argmin()] += 2
    baseline[5] += 1
    changed = second_wins(baseline, leading_by(reference, 0.5))
    found = compare_logits(baseline, baseline, changed, reference, "float64")
    assert found.worst_flip_margin is not None
    assert found.flip_allowance < 0.4 < found.worst_flip_margin < 4 * found.baseline_max_error
    assert not found.passed
    assert "gap at a changed pick" in found.reason
    assert found.near_ties is not None
    assert found.near_ties < len(baseline) / 2


def test_one_position_that_errs_much_excuses_no_other() -> None:
    """As a bfloat16 model of real weights does after random tokens."""
    reference = logits()
    baseline = reference + noise(1e-2, 1)
    row = leading_by(reference, 0.5)
    odd = (row + 1) % len(baseline)
    baseline[odd] += noise(1.0, 2)[odd]
    changed = second_wins(baseline, row)
    found = compare_logits(baseline, baseline, changed, reference, "float64")
    assert not found.passed
    assert "gap at a changed pick" in found.reason
    assert found.near_ties is not None
    assert found.near_ties < len(baseline) / 2


def test_the_position_furthest_beyond_what_is_allowed_is_told() -> None:
    reference = logits()
    baseline = reference + noise(1e-2, 1)
    top = reference.topk(2, dim=-1)
    gaps = top.values[:, 0] - top.values[:, 1]
    wide, odd = gaps.topk(2).indices.tolist()
    baseline[odd] += noise(2.0, 2)[odd]  # a wider gap changes there, and its errors explain it
    changed = second_wins(baseline, wide, odd)
    found = compare_logits(baseline, baseline, changed, reference, "float64")
    assert found.near_tie_flips == 1
    assert found.worst_flip_margin == pytest.approx(float(gaps[wide]), abs=0.1)
    assert found.flip_allowance < found.worst_flip_margin


def test_a_patch_may_err_as_the_baseline_does_with_each_sequence_alone() -> None:
    reference = logits()
    baseline = reference + noise(1e-3, 1)
    rare = baseline.clone()
    rare[3] += noise(0.01, 2)[3]  # one position that another batch rounds far otherwise
    single = reference + noise(1e-3, 3)
    single[3] += noise(0.7, 4)[3]
    refused = compare_logits(baseline, baseline, rare, reference, "float64")
    assert not refused.passed
    found = compare_logits(baseline, baseline, rare, reference, "float64", single)
    assert found.passed, found.reason
    assert found.alone is not None
    assert found.alone.max_error > 10 * found.baseline_max_error
    assert "each sequence alone" in printed(found)
    part = compare_logits(baseline, baseline, rare, reference, "float64", single[:5])
    assert part.passed, part.reason
    worse = baseline + noise(4e-3, 5)  # everywhere, which no single position excuses
    worse[3] += noise(0.5, 6)[3] * 4
    assert not compare_logits(baseline, baseline, worse, reference, "float64", single).passed


def test_what_is_served_alone_loosens_neither_the_mean_nor_by_being_infinite() -> None:
    reference = logits()
    baseline = reference + noise(1e-3, 1)
    single = reference + noise(1e-2, 2)  # all of it errs ten times as much
    patched = reference + noise(2e-3, 3)
    found = compare_logits(baseline, baseline, patched, reference, "float64", single)
    assert not found.passed
    assert found.reason.startswith("rmse")
    single[0, 0] = math.inf
    lost = compare_logits(baseline, baseline, baseline, reference, "float64", single)
    assert not lost.passed
    assert "the baseline's logits are not finite" in lost.reason


def test_sequences_are_served_one_by_one(engine: Engine) -> None:
    prompts = engine.prompts(1)
    forced = engine.generate(prompts, 3).tokens
    rows: list[int] = []

    def serve(prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        rows.append(len(prompts))
        return served_logits(engine, prompts, forced)

    found = served_alone(serve, prompts, forced)
    assert found is not None
    assert rows == [1] * len(prompts)
    together = served_logits(engine, prompts, forced)
    assert found.shape == together.shape
    assert torch.allclose(found, together, atol=1e-3)
    assert served_alone(serve, prompts[:1], forced[:1]) is None
    many = prompts[:1].expand(ALONE + 3, -1), forced[:1].expand(ALONE + 3, -1)
    short = served_alone(lambda prompts, _: prompts[:, :1, None].float(), *many)
    assert short is not None
    assert len(short) == ALONE
