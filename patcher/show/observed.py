"""What a recording says of an op's contract, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from patcher.bench.judge.contract_observation import (
    ContractObservation,
    ObservedGroup,
    TensorValues,
)
from patcher.visible import visible


def observed_tables(found: ContractObservation) -> Iterator[Table | Text]:
    """One table of groups of equal calls, one of their tensors, and what is not judged."""
    kept = sum(len(group.calls) for group in found.groups)
    head = (
        f"{found.op}: {kept} of {found.seen:,} calls of {found.engine} {found.engine_version} at "
        f"{found.point}, on {found.device}"
    )
    yield _groups(head, found)
    yield _tensors(found)
    for index, group in enumerate(found.groups):
        for line in (*group.not_judged, *([group.problem] if group.problem else [])):
            yield _shown(f"group {index}: {line}")
    for reason, count in found.left_out.items():
        yield _shown(f"not recorded: {count:,}: {reason}")


def _groups(title: str, found: ContractObservation) -> Table:
    table = Table(title=_shown(title))
    for name in ("group", "calls", "sizes", "contract", "engine's error", "baseline's", "judged"):
        table.add_column(name)
    for index, group in enumerate(found.groups):
        row = group.sizes, group.finding, _errors(group.error), _errors(group.baseline)
        table.add_row(str(index), str(len(group.calls)), *map(_shown, row), _judged(group))
    return table


def _shown(text: str) -> Text:
    """A recording may be of others, who wrote its header: neither escapes nor markup are obeyed."""
    return Text(visible(text))


def _judged(group: ObservedGroup) -> str:
    if group.finding == "left to the engine":
        return "never called"
    return f"{len(group.not_judged)} things are not" if group.not_judged else "yes"


def _errors(errors: Mapping[str, float]) -> str:
    return "\n".join(f"{name} {error:.2e}" for name, error in errors.items())


def _tensors(found: ContractObservation) -> Table:
    table = Table(title="tensors")
    for name in ("group", "tensor", "dtype", "shape", "strides", "values"):
        table.add_column(name)
    for index, group in enumerate(found.groups):
        for each in group.tensors:
            shape, strides = str(list(each.shape)), str(list(each.strides))
            row = each.name, each.dtype, shape, strides, _range(each)
            table.add_row(str(index), *map(_shown, row))
    return table


def _range(tensor: TensorValues) -> str:
    numbers = "" if tensor.low is None else f"{tensor.low:.3g} to {tensor.high:.3g}"
    special = f"{tensor.not_finite:,} not finite" if tensor.not_finite else ""
    return ", ".join(filter(None, (numbers, special)))
