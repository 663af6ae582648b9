"""Which axes of an op are sizes of a served, paged KV cache, as data (`served_axes.toml`)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from pydantic import Field

from patcher.bench.records import Record


class ServedAxes(Record):
    """The names of such an op's axes."""

    batch: str
    """Requests, each with one new token."""
    block_size: str
    """Tokens of a page."""
    pages: str
    """Entries of a row of the block table. In a verdict requests use all of them; an engine's rows
    are as wide as its longest sequence needs, so that a receipt has what there is room for."""
    blocks: str
    """Pages of the cache, those that no request uses among them."""
    windowed: str = ""
    """1 where a layer attends to the last tokens alone, else 0; empty: no such axis."""
    window: int = 0
    """How many tokens these are where the op's kernels are timed."""
    model: dict[str, str] = Field(default_factory=dict)
    """Further axes, each with its field of `patcher.bench.engines.kv_cache.CachedAttention`."""

    @property
    def room(self) -> frozenset[str]:
        """Of a served call, the axes that say what there is room for, whatever is used of it."""
        return frozenset({self.pages, self.blocks})

    @property
    def axes(self) -> frozenset[str]:
        """All that are named."""
        own = {self.batch, self.block_size, self.pages, self.blocks, self.windowed, *self.model}
        return frozenset(own - {""})


def served_axes(op: str) -> ServedAxes | None:
    """Those of an op; None if it reads no paged cache."""
    return _all().get(op)


@cache
def _all() -> dict[str, ServedAxes]:
    text = resources.files("patcher.bench.engines").joinpath("served_axes.toml").read_text("utf-8")
    return {op: ServedAxes(**fields) for op, fields in tomllib.loads(text).items()}
