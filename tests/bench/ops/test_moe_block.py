"""moe_block: kernels that are right whatever they round, and wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from patcher.bench import load_op
from patcher.bench.judge.cases import (
    Secrets,
    correctness_cases,
    expect,
    make_inputs,
    value_problem,
)

OP = load_op("moe_block")
SOURCE = (OP.folder / "solutions/cpu_torch/moe_block.py").read_text()
STORED = ").to(output.dtype).float()"
ENGINES = (
    ("= residual.float() + input.float()", f"= (residual.float() + input.float(){STORED}"),
    ("x = normed(stream, weight, epsilon)", f"x = (normed(stream, weight, epsilon){STORED}"),
    ("torch.addmm(bias, active", f"torch.addmm(bias, (active{STORED}"),
    ("gates[token, choice].unsqueeze(1) * sums", f"(gates[token, choice, None] * sums{STORED}"),
    # PyTorch's copy makes a NaN negative on some CPUs, and then nothing chooses it
    ("    # by bits,", "    logits[logits.isnan()] = float('nan')\n    # by bits,"),
)
RIGHT = {"float32 throughout": (), "as engines store": ENGINES}
SORT = "torch.sort(order, dim=1, descending=True, stable=True).indices"
WRONG = {
    "last of a tie": (SORT, f"order.shape[1] - 1 - {SORT.replace('order,', 'order.flip(1),')}"),
    "the first 64 experts alone": ("0x7FFFFFFF, bits)", "0x7FFFFFFF, bits)[:, :64]"),
    "softmax over all": ("logits.gather(1, found).float(), 1)", "logits.float(), 1)"),
    "no next norm": ("copy_(normed(stream, next_weight, epsilon))", "copy_(stream * next_weight)"),
    "no bias": ("torch.addmm(bias, active", "torch.addmm(0 * bias, active"),
    "alpha of the sweep": ("-alpha * gate", "-1.702 * gate"),
    "limit of the sweep": ("max=limit", "max=7.0"),
    "gate not clamped": ("0::2].clamp(max=limit)", "0::2]"),
    "up clamped above alone": ("clamp(min=-limit, max=limit)", "clamp(max=limit)"),
    "NaN hidden": ("    total.copy_(", "    stream.nan_to_num_(0.0)\n    total.copy_("),
}


def is_wrong(dtype: str, changes: tuple[tuple[str, str], ...]) -> list[str]:
    """The first case in which the judge says so, of the CPU's sweep in this dtype."""
    source, defined, sweep = SOURCE, dict[str, Any](), OP.sweep("cpu")
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    exec(source, defined)
    sweep = sweep.model_copy(update={"dtypes": {**sweep.dtypes, "T": dtype, "W": dtype}})
    for case in correctness_cases(OP, sweep, Secrets(7)):
        inputs = make_inputs(OP, case, "cpu")
        left = {name: value.clone() for name, value in inputs.items()}
        defined["moe_block"](*left.values(), *case.scalars)
        if said := value_problem(OP, [case], [expect(OP, case, inputs)], [left]):
            return [case.label(), said]
    return []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_may_be_rounded_may_be(dtype: str, name: str) -> None:
    assert is_wrong(dtype, RIGHT[name]) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(dtype: str, name: str) -> None:
    assert is_wrong(dtype, (WRONG[name],))
