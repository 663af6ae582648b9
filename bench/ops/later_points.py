"""Patch points of the library's ops that their contracts do not name: `points.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from patcher.bench.machine.environment import ROOT
from patcher.bench.ops.contract import Contract, PatchPointSpec


@cache
def _read() -> dict[str, tuple[PatchPointSpec, ...]]:
    text = Path(__file__).with_name("points.toml").read_text(encoding="utf-8")
    return {
        op: tuple(PatchPointSpec.model_validate(each) for each in points)
        for op, points in tomllib.loads(text).items()
    }


def later_points(folder: Path) -> tuple[PatchPointSpec, ...]:
    """Those of the op in a folder of the library; a user's op of that name has none."""
    library = (ROOT / "patcher" / "kernel_library").resolve()
    return _read().get(folder.name, ()) if folder.resolve().parent == library else ()


def with_later_points(contract: Contract, folder: Path) -> Contract:
    """The contract, with these after its own. `op.toml` stays as it is: with one more it would have
    another digest, and every verdict on its kernels would be of no use."""
    points = (*contract.patch_points, *later_points(folder))
    return contract.model_copy(update={"patch_points": points})
