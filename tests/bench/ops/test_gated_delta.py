"""gated_delta_decode's reference against the models whose step it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from patcher import bench
from patcher.bench.ops.contract import Point

OP = bench.load_op("gated_delta_decode")
POINTS = [
    Point(axes=hidden.axes, dtypes=OP.sweep("cpu").dtypes)
    for hidden in OP.contract.hidden
    # transformers has a whole number of values for each key
    if hidden.axes["value_heads"] % hidden.axes["heads"] == 0
]
FAMILIES = pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])


def by_transformers(family: str, point: Point, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`out` and each token's new state by the function that a decode step of the model calls, from
    the same projections. Its state has keys before values.
    """
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    axes, tokens = point.axes, point.axes["tokens"]
    keys, values = axes["heads"] * axes["key_dim"], axes["value_heads"] * axes["value_dim"]
    query, key, value = inputs["qkv"].split([keys, keys, values], 1)
    held = inputs["state"][inputs["slots"].long()]
    held = held.view(tokens, axes["value_heads"], axes["value_dim"], axes["key_dim"])
    query, key = (each.reshape(tokens, 1, axes["heads"], -1) for each in (query, key))
    group = axes["value_heads"] // axes["heads"]
    out, state = modeling.torch_recurrent_gated_delta_rule(
        query.repeat_interleave(group, 2),
        key.repeat_interleave(group, 2),
        value.reshape(tokens, 1, axes["value_heads"], -1),
        g=(-inputs["A_log"].exp() * softplus(inputs["a"] + inputs["dt_bias"])).unsqueeze(1),
        beta=inputs["b"].sigmoid().unsqueeze(1),
        initial_state=held.transpose(2, 3),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out.view(tokens, -1), state.transpose(2, 3).reshape(tokens, -1)


@FAMILIES
@pytest.mark.parametrize("regime", ["normal", "forgets", "remembers", "replaces", "first", "ramp"])
def test_the_reference_is_the_models_step(family: str, regime: str) -> None:
    for seed, point in enumerate(POINTS):
        inputs = OP.inputs.make(point, torch.Generator().manual_seed(seed), regime)
        out, state = by_transformers(family, point, inputs)
        expected = OP.reference(**inputs)
        torch.testing.assert_close(out.double(), expected["out"], rtol=1e-4, atol=1e-5)
        written = expected["state"][inputs["slots"].long()]
        torch.testing.assert_close(state.double(), written, rtol=1e-4, atol=1e-5)


def test_a_token_of_padding_gives_zeros_whatever_its_slot_holds() -> None:
    point = POINTS[0]
    inputs = OP.inputs.make(point, torch.Generator().manual_seed(3), "padding")
    padded = inputs["slots"] == 0
    assert padded.any()
    assert inputs["state"][0].isnan().all()
    found = OP.reference(**inputs)
    assert (found["out"][padded] == 0).all()
    assert found["state"][0].isnan().all()
    assert not found["state"][1:].isnan().any()


def test_heads_that_share_no_whole_number_of_values_have_their_place() -> None:
    """Value head h has key head h * heads // value_heads, so that any sizes mean something."""
    axes = {"tokens": 1, "slots": 2, "heads": 2, "value_heads": 3, "value_dim": 8, "key_dim": 16}
    point = Point(axes=axes, dtypes=OP.sweep("cpu").dtypes)
    inputs = OP.inputs.make(point, torch.Generator().manual_seed(1), "first")
    inputs["qkv"][:, 16:32] = 0  # the query of the second head
    expected = OP.reference(**inputs)["out"]
    assert [bool(head.any()) for head in expected.view(3, 8)] == [True, True, False]
    OP.baselines[OP.accuracy_baseline]("cpu")(*inputs.values())
    torch.testing.assert_close(inputs["out"].double(), expected, rtol=1e-5, atol=1e-6)
