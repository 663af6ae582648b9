"""Traffic presets."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from pydantic import Field

from patcher.bench.ab.processes import ABPlan
from patcher.bench.errors import UsageError
from patcher.bench.records import Record


class Traffic(Record):
    """The number and lengths of requests, and how many run at a time."""

    summary: str
    batch: int = Field(ge=1)
    input_len: int = Field(ge=1)
    output_len: int = Field(ge=2)
    requests: int = Field(ge=1)
    """Requests of each arm in a run."""
    runs: int = Field(ge=1)

    def plan(self) -> ABPlan:
        """Runs: each is a process pair, and each batch of its requests a window per arm."""
        return ABPlan(process_pairs=self.runs, pairs=-(-self.requests // self.batch))


@cache
def traffics() -> dict[str, Traffic]:
    """All presets of `traffic.toml`."""
    text = resources.files("patcher.bench.ab").joinpath("traffic.toml").read_text(encoding="utf-8")
    return {name: Traffic(**fields) for name, fields in tomllib.loads(text).items()}


def traffic(name: str) -> Traffic:
    """The preset of that name.

    Raises:
        UsageError: there is no such preset.
    """
    try:
        return traffics()[name]
    except KeyError:
        raise UsageError(
            f"unknown preset {name!r}", f"presets are: {', '.join(traffics())}"
        ) from None
