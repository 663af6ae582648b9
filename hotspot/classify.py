"""Origin and operation of a kernel, by the rules of families.toml."""

from __future__ import annotations

import re
from functools import cache

from patcher.hotspot.names import normalise
from patcher.hotspot.rules import rules


@cache
def _rules() -> tuple[list[tuple[str, re.Pattern[str]]], list[tuple[str, re.Pattern[str]]]]:
    document = rules("families")
    return tuple(  # type: ignore[return-value]
        [(rule["name"], re.compile(rule["pattern"], re.VERBOSE)) for rule in document[kind]]
        for kind in ("origin", "operation")
    )


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
    return _first(origins, subject), _first(operations, subject)


def _first(ordered: list[tuple[str, re.Pattern[str]]], subject: str) -> str:
    return next(name for name, pattern in ordered if pattern.search(subject))
