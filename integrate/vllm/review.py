"""Compare a vLLM with the versions read; see `patcher.integrate.review`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from patcher.integrate import review
from patcher.integrate.vllm import sources, table
from patcher.integrate.vllm.point import VllmPoint


def main(points: Mapping[str, type[VllmPoint]], arguments: Sequence[str] | None = None) -> int:
    """See `patcher.integrate.review.main`."""
    return review.main(
        points, sources.record(), arguments, page=lambda trees: table.page(points, trees)
    )
