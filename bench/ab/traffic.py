"""Shapes of traffic that have a name."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from pydantic import Field

from patcher.bench.ab.processes import ABPlan
from patcher.bench.errors import UsageError
from patcher.bench.records import Record


class Traffic(Record):
    """How many requests of which length, how many at a time."""

    summary: str
    batch: int = Field(ge=1)
    input_len: int = Field(ge=1)
    output_len: int = Field(ge=2)
    requests: int = Field(ge=1)
    """Of each arm in a run."""
    runs: int = Field(ge=1)

    def plan(self) -> ABPlan:
        """A run is a process pair, a batch of its requests a window of each arm."""
        return ABPlan(process_pairs=self.runs, pairs=-(-self.requests // self.batch))


@cache
def traffics() -> dict[str, Traffic]:
    """All that `traffic.toml` names."""
    text = resources.files("patcher.bench.ab").joinpath("traffic.toml").read_text(encoding="utf-8")
    return {name: Traffic(**fields) for name, fields in tomllib.loads(text).items()}


def traffic(name: str) -> Traffic:
    """Raises:
    UsageError: no such traffic.
    """
    try:
        return traffics()[name]
    except KeyError:
        raise UsageError(
            f"unknown preset {name!r}", f"presets are: {', '.join(traffics())}"
        ) from None
