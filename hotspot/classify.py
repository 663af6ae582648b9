"""Origin and operation of a kernel, by the rules of families.toml."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from patcher.hotspot.names import normalise
from patcher.hotspot.rules import rules

_GENERATED = re.compile(r"triton_(?:poi|red|per|for)_")
"""Inductor's pointwise kernels and reductions; `tem` are templates of matmul and attention."""


class _Rule(NamedTuple):
    name: str
    pattern: re.Pattern[str]
    external: bool
    """Whether no kernel that Inductor generates computes this."""


@cache
def _rules() -> tuple[list[_Rule], list[_Rule]]:
    document = rules("families")
    origins, operations = (
        [
            _Rule(
                rule["name"],
                re.compile(rule["pattern"], re.VERBOSE),
                rule.get("external", False),
            )
            for rule in document[kind]
        ]
        for kind in ("origin", "operation")
    )
    return origins, operations


@cache
def _buffers() -> re.Pattern[str]:
    return re.compile(rules("families")["generated"]["buffers"], re.VERBOSE)


@cache
def classify(name: str) -> tuple[str, str]:
    """Classify a kernel by its name, in any profiler's spelling.

    Args:
        name: the kernel's name as nsys, Kineto or Nsight Compute writes it.

    Returns:
        (origin, operation): whose source it is and what it computes, both from `families.toml`.
        Every name matches a rule.
    """
    subject = normalise(name)[:4000] + ("()" if name.endswith(")") else "")
    origins, operations = _rules()
    origin = _first(origins, subject)
    if _GENERATED.match(subject) is not None:
        operations = [rule for rule in operations if not rule.external]
        subject = _buffers().sub("", subject)
    return origin, _first(operations, subject)


def _first(ordered: list[_Rule], subject: str) -> str:
    return next(rule.name for rule in ordered if rule.pattern.search(subject))
