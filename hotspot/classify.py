"""Origin and operation of a kernel, by the rules of families.toml."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

from hotspot.names import normalise


@cache
def _rules() -> tuple[list[tuple[str, re.Pattern[str]]], list[tuple[str, re.Pattern[str]]]]:
    text = resources.files("hotspot").joinpath("families.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    return tuple(  # type: ignore[return-value]
        [(rule["name"], re.compile(rule["pattern"], re.VERBOSE)) for rule in document[kind]]
        for kind in ("origin", "operation")
    )


@cache
def classify(name: str) -> tuple[str, str]:
    """(origin, operation) of a kernel as any profiler spells it; never fails."""
    subject = normalise(name)[:4000] + ("()" if name.endswith(")") else "")
    origins, operations = _rules()
    return _first(origins, subject), _first(operations, subject)


def _first(rules: list[tuple[str, re.Pattern[str]]], subject: str) -> str:
    return next(name for name, pattern in rules if pattern.search(subject))
