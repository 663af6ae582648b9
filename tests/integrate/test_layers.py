"""Layers that a patch takes, and why a kernel can never run for a layer's own tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patcher.bench import VerificationError
from patcher.integrate.counts import CallCounters
from patcher.integrate.guards import AxisBounds, CallGuards, TensorGuard
from patcher.integrate.layers import LayerSurvey
from patcher.integrate.receipts import Receipt
from patcher.integrate.survey import report

GUARDS = CallGuards(
    device="cpu",
    tensors=(
        TensorGuard("x", ("tokens", "inner"), "T", mutated=False),
        TensorGuard("weight", ("outer", "inner"), "T", mutated=False, alignment=16),
    ),
    scalars=(),
    dtypes=({"T": torch.float32}, {"T": torch.float16}),
    axes={"tokens": AxisBounds(1, 48), "inner": AxisBounds(multiple_of=8)},
)


def refusal(weight: torch.Tensor) -> str | None:
    return GUARDS.refusal_for_good({"weight": weight})


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(4, 16), None),
        (torch.zeros(4, 16, dtype=torch.float16), None),
        (torch.zeros(4, 16, dtype=torch.bfloat16), "weight in bfloat16"),
        (torch.zeros(2, 4, 16), "weight with 3 axes"),
        (torch.zeros(4, 12), "inner no multiple of 8"),
        (torch.zeros(16, 4).t(), "weight not contiguous"),
        (torch.zeros(65)[1:].view(4, 16), "weight not aligned"),
    ],
)
def test_a_layers_own_tensor_may_rule_every_call_out(
    weight: torch.Tensor, reason: str | None
) -> None:
    assert refusal(weight) == reason
    calls = [GUARDS.refusal((torch.zeros(n, weight.shape[-1]).to(weight), weight)) for n in (1, 48)]
    assert all(call is None for call in calls) == (reason is None)


def test_a_tensor_that_is_offloaded_rules_nothing_out() -> None:
    """As the weights of `cpu_offload_gb` without UVA, which lie in memory until a layer runs."""
    elsewhere = torch.zeros(4, 16, device="meta")
    assert refusal(elsewhere) is None
    assert refusal(elsewhere[:, :12]) == "inner no multiple of 8"
    assert GUARDS.refusal((torch.zeros(1, 16), elsewhere)) == "device meta"


def test_a_layers_tensors_may_not_fit_each_other() -> None:
    bias = TensorGuard("bias", ("outer",), "T", mutated=False)
    guards = replace(GUARDS, tensors=(*GUARDS.tensors, bias))
    weight = torch.zeros(4, 16)
    assert guards.refusal_for_good({"weight": weight, "bias": torch.zeros(4)}) is None
    none, half = torch.zeros(0), torch.zeros(4, dtype=torch.float16)
    found = [guards.refusal_for_good({"weight": weight, "bias": each}) for each in (none, half)]
    assert found == ["shapes that do not fit: outer", "dtype float32/float16"]
    optional = replace(bias, axes=("biased * outer",))
    guards = replace(GUARDS, tensors=(*GUARDS.tensors, optional))
    assert guards.refusal_for_good({"weight": weight, "bias": none}) is None


def test_calls_of_many_sizes_fall_back_for_one_reason() -> None:
    weight = torch.zeros(4, 16)
    reasons = Counter(GUARDS.refusal((torch.zeros(n, 16), weight)) for n in range(40, 140))
    assert reasons == {None: 9, "tokens above 48": 91}
    solved = replace(GUARDS, solve=_solve)
    reasons = Counter(solved.refusal((torch.zeros(n, 24), weight)) for n in range(1, 5))
    assert reasons == {"shapes that do not fit: inner": 4}


def _solve(shapes: list[tuple[int, ...]]) -> dict[str, int]:
    from patcher.bench.ops.arithmetic import solve

    pairs = zip(GUARDS.tensors, shapes, strict=True)
    return solve([pair for g, shape in pairs for pair in zip(g.axes, shape, strict=True)])


def test_layers_of_several_models_are_added_and_a_reload_replaces_its_own() -> None:
    book = CallCounters("p", "d")
    assert Receipt.of(book).layers is None
    book.surveys[0] = LayerSurvey(70, Counter({"odd": 2}))
    book.surveys[1] = LayerSurvey(1, Counter({"odd": 1, "wide": 4}))
    book.surveys[0] = LayerSurvey(72)
    receipt = Receipt.of(book)
    assert (receipt.layers_taken, receipt.layers_refused) == (73, {"odd": 1, "wide": 4})
    assert str(receipt.layers) == "73 of 78 layers; 4: wide; 1: odd"
    assert str(LayerSurvey(1)) == "1 layer"
    assert str(LayerSurvey(0, Counter({"odd": 1}))) == "0 of 1 layer; 1: odd"
    assert Receipt.model_validate_json(receipt.model_dump_json()) == receipt


@pytest.mark.parametrize("later", [False, True])
def test_what_was_compiled_without_a_patch_is_no_reason_to_wait_for_other_calls(
    later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A second start loads that code and counts nothing: it must not fail where a first did not."""
    book = CallCounters("id", "0" * 64)
    item: Any = SimpleNamespace(book=book, patch=SimpleNamespace(manifest=SimpleNamespace(id="it")))
    book.leave_in_graph(["no norm", "no norm"])
    if later:
        book.reasons["tokens above 64"] += 1
        report([item], strict=True)
        assert "every call fell back (2: no norm, 1: tokens above 64)" in caplog.text
    else:
        with pytest.raises(VerificationError, match=r"every call fell back \(2: no norm\)"):
            report([item], strict=True)
    book.begin_again()
    assert not book.compiled_out
    with pytest.raises(VerificationError, match="no call reached it"):
        report([item], strict=True)
