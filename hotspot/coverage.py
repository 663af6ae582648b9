"""Which op of the library covers a kernel: by the parts of what both compute, and by the place.

A name alone says too little. The parts of a kernel must all be among those of the op; its weights
must have the format that the op multiplies by; and the module that launched it must be the op's.
The tables are `coverage.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from patcher.bench import Op, load_ops
from patcher.hotspot.classify import classify
from patcher.hotspot.names import MODULE, normalise
from patcher.hotspot.rules import rules
from patcher.hotspot.shipped import op_of_kernel

PLAIN = "plain"
"""The format of weights that are not quantised."""
SCHEDULE = "schedule of attention"
"""The part of what plans an attention, which may run long before it."""
_SEEN = 4000
"""Characters of a name that are looked at."""


@dataclass(frozen=True)
class _Part:
    name: str
    operations: frozenset[str]
    instead: bool
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class Covered:
    """What an op computes, by its table in `coverage.toml`."""

    parts: frozenset[str]
    several: bool = False
    """Whether it stands in the place of several launches, each of which computes a part."""
    main: frozenset[str] = frozenset()
    """The parts of the kernel that costs what the op costs."""
    weights: str | None = None
    """The format that it multiplies by; None if it multiplies by none."""
    experts: bool = False
    """Whether the module of the experts launches it."""
    but: re.Pattern[str] | None = None
    """Names of kernels that compute another thing."""
    beside: str = ""
    """The op that has to be in as well for kernels that write scales column by column."""
    columns: re.Pattern[str] | None = None
    """Names of these kernels."""


@cache
def parts_of(kernel: str) -> frozenset[str]:
    """The parts of what a kernel computes; empty if they say nothing of the model's chain."""
    own = op_of_kernel(kernel)
    if own is not None and own.name in _ops():
        return _ops()[own.name].parts
    spelled, operation = normalise(kernel)[:_SEEN], classify(kernel)[1]
    if operation in rules("coverage")["silent"]["operations"]:
        return frozenset()
    told = [p for p in _parts() if operation in p.operations and p.pattern.search(spelled)]
    first = next((part.name for part in told if part.instead), operation)
    return frozenset([first, *(part.name for part in told if not part.instead)])


def does_chain(op: str, kernels: Iterable[str]) -> bool:
    """Whether an op computes all that these kernels do together, but what belongs to heavy ones."""
    known, left = _ops().get(op), set(rules("coverage")["heavy"]["parts"])
    return known is None or all(parts_of(kernel) - left <= known.parts for kernel in kernels)


def costs(op: str, kernel: str) -> bool:
    """Whether a launch of a kernel costs what a call of an op that covers it does."""
    known = _ops().get(op)
    if known is None or kernel.startswith(MODULE) or not (parts := parts_of(kernel)):
        return True
    return known.main <= parts


@cache
def by_symbols(kernel: str, role: str | None = None) -> tuple[Op, ...]:
    """The ops whose symbols name this kernel, and that compute all of it.

    Args:
        kernel: its name in any profiler's spelling.
        role: its role in the step; None if its place is not known.
    """
    spelled = normalise(kernel)
    return tuple(
        op
        for op in load_ops().values()
        if op.contract.matches(spelled)
        and (op.name not in _ops() or parts_of(kernel) <= _ops()[op.name].parts)
        and not _is_another(op.name, spelled)
        and (role is None or fits_module(op.name, role))
    )


def by_role(kernel: str, role: str) -> tuple[Op, ...]:
    """The ops of a role that compute what this kernel does there, whatever its weights are."""
    parts, spelled = parts_of(kernel), normalise(kernel)
    found = []
    for name in _roles()[role].get("ops", ()):
        op, known = load_ops().get(name), _ops()[name]
        whole = parts <= known.parts if known.several else parts == known.parts
        if op is not None and parts and whole and not _is_another(name, spelled):
            found.append(op)
    return tuple(found)


def takes_weights(op: str, kernel: str, formats: Collection[str]) -> bool:
    """Whether an op multiplies by the weights of a kernel.

    Args:
        op: its name.
        kernel: its name may show that the weights are narrow.
        formats: those of the weights of the kernel's role; empty if they are not known.
    """
    known = _ops().get(op)
    if known is None or known.weights is None:
        return True
    narrow = _narrow().search(normalise(kernel)[:_SEEN]) is not None
    if known.weights == PLAIN and narrow:
        return False
    if len(formats) > 1 and known.weights != PLAIN and not narrow:
        return False  # some of the role's weights are plain, and nothing says which these are
    return not formats or known.weights in formats


def beside(op: str, kernel: str) -> str:
    """The op that has to be in as well for an op to stand in a kernel's place; empty: none."""
    known = _ops().get(op)
    if known is None or known.columns is None:
        return ""
    return known.beside if known.columns.search(normalise(kernel)[:_SEEN]) else ""


def weights_of(role: str) -> list[str]:
    """The roles whose weights the module multiplies by that launches a role's kernels."""
    row = _roles()[role]
    return [*row.get("parts", ()), *([row["weights_of"]] if "weights_of" in row else [])]


def of_experts(role: str) -> bool:
    """Whether the module of the experts launches the kernels of a role."""
    return bool(_roles()[role].get("experts", False))


def fits_module(op: str, role: str) -> bool:
    """Whether the module that launches the kernels of a role is that of an op."""
    return op not in _ops() or _ops()[op].experts == of_experts(role)


def _is_another(op: str, spelled: str) -> bool:
    but = _ops()[op].but if op in _ops() else None
    return but is not None and but.search(spelled[:_SEEN]) is not None


@cache
def _parts() -> tuple[_Part, ...]:
    return tuple(
        _Part(
            row["name"],
            frozenset(row["of"]),
            row.get("instead", False),
            re.compile(row["pattern"], re.VERBOSE),
        )
        for row in rules("coverage")["part"]
    )


@cache
def _ops() -> dict[str, Covered]:
    return {
        name: Covered(
            frozenset(row["parts"]),
            row.get("several", False),
            frozenset(row.get("main", row["parts"])),
            row.get("weights"),
            row.get("experts", False),
            re.compile(row["but"]) if "but" in row else None,
            row.get("beside", ""),
            re.compile(row["columns"]) if "columns" in row else None,
        )
        for name, row in rules("coverage")["op"].items()
    }


@cache
def _roles() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rules("roles")["role"]}


@cache
def _narrow() -> re.Pattern[str]:
    return re.compile(rules("coverage")["weights"]["narrow"])
