"""A judged candidate becomes a bundle: a folder, or one file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench import Candidate, Evaluation, UsageError, load_op
from bench.toolchains import build
from integrate import Manifest, Patch, is_archive, pack


def make_bundle(
    target: Path,
    candidate: Candidate,
    evaluation: Evaluation,
    *,
    engine: str,
    tensor_parallel: tuple[int, ...],
) -> Manifest:
    """Write it with its prebuilt binary; see `Patch.create` for what is raised."""
    op = load_op(candidate.op)
    built = build(candidate, op.contract)
    with tempfile.TemporaryDirectory() as scratch:
        packed = is_archive(target)
        patch = Patch.create(
            Path(scratch) / "patch" if packed else target,
            op,
            candidate,
            evaluation,
            engine=engine,
            made_by="patcher bundle",
            built=built,
            tensor_parallel=tensor_parallel,
        )
        if packed:
            pack(patch, target)
        return patch.manifest


def worker_counts(text: str | None) -> tuple[int, ...]:
    """`1,2` as numbers; none where nothing is said.

    Raises:
        UsageError: not such a list.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--tensor-parallel {text!r} is no list of numbers", "say 1,2")
    return tuple(sorted({int(part) for part in parts}))
