"""What a contract can get wrong across its fields."""

from __future__ import annotations

import re
from collections import Counter

from patcher.bench.ops.arithmetic import names_in
from patcher.bench.ops.contract import Contract
from patcher.bench.records import SCHEMA_VERSION


def unsound(contract: Contract) -> str | None:
    """What is wrong with a contract whose fields are valid one by one, in words; None: nothing."""
    if contract.schema_version != SCHEMA_VERSION:
        return f"schema_version: {contract.schema_version} is not {SCHEMA_VERSION}"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", contract.name):
        return f"name: {contract.name!r} cannot be the name of a function"
    tensors = [tensor.name for tensor in contract.tensors]
    arguments = Counter([*tensors, *(scalar.name for scalar in contract.scalars)])
    if twice := [name for name, count in arguments.items() if count > 1]:
        return f"two of its arguments are named {twice[0]}"
    for symbol in contract.symbols:
        try:
            re.compile(symbol.pattern)
        except re.error as error:
            return f"the symbol {symbol.pattern!r} is no regular expression: {error}"
    return _unknown_name(contract)


def _unknown_name(contract: Contract) -> str | None:
    """What a contract's arithmetic names that has no size, in words; None if all have one."""
    told = [
        *((f"a shape of {one.name}", size) for one in contract.tensors for size in one.shape),
        *(
            (f"a block of {one.name}", size)
            for one in contract.tensors
            for size in one.block
            if isinstance(size, str)
        ),
        ("accuracy.reduction", contract.accuracy.reduction),
        ("cost.bytes", contract.cost.bytes),
        ("cost.flops", contract.cost.flops),
    ]
    sizes = {f"sweep {one.name}": {one.axis, *one.fixed} for one in contract.sweeps}
    sizes |= {f"hidden shape {at}": set(one.axes) for at, one in enumerate(contract.hidden, 1)}
    for what, expression in told:
        try:
            names = names_in(expression) - contract.dtypes.keys()
        except SyntaxError:
            return f"{what} is no arithmetic: {expression}"
        for place, axes in sizes.items():
            if missing := sorted(names - axes):
                return f"{what} names {missing[0]}, of which {place} has no size"
    known = set[str]().union(*sizes.values())
    if strange := sorted(contract.guards.axes.keys() - known):
        return f"a guard is of {strange[0]}, of which no sweep has a size"
    return None
