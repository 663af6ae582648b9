"""`patcher.bundle`: a kernel that the judge found right and faster becomes a patch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from patcher.bench import (
    Candidate,
    Count,
    Evaluation,
    FilePath,
    Language,
    UsageError,
    check_arguments,
    load_op,
)
from patcher.extras import names_its_extra
from patcher.integrate import (
    Manifest,
    Patch,
    engine_version,
    is_archive,
    pack,
    patch_point,
    require_target,
)


@names_its_extra
@check_arguments
def bundle(
    evaluation: Evaluation | Sequence[Evaluation],
    source: FilePath,
    target: FilePath,
    *,
    engine: str = "transformers",
    tensor_parallel: Sequence[Count] = (),
) -> Path:
    """Package a judged kernel as a patch, guarded to the sizes at which it is not slower.

    Args:
        evaluation: the verdict on this very source, as `patcher.evaluate` returns it. Of several,
            each over another sweep, the first must be `correct`, the others may be slower at some
            sizes.
        source: the source file that was judged.
        target: where the bundle goes: a folder, or one `.zip` file.
        engine: the engine that it is for: `transformers`, `vllm` or `tensorrt_llm`.
        tensor_parallel: numbers of workers that may share a layer; empty: any number.

    Returns:
        The target.

    Raises:
        UsageError: a verdict is on another source or not `correct`, the op has no patch point in
            the engine, or the target holds something else.
        MissingError: the engine is not installed, so what is replaced has no fingerprint.

    Examples:
        >>> v = patcher.evaluate("fused_add_rms_norm", "kernel.cpp")
        >>> patcher.bundle(v, "kernel.cpp", "norm.zip")
    """
    evaluations = [evaluation] if isinstance(evaluation, Evaluation) else list(evaluation)
    if not evaluations:
        raise UsageError("no evaluation was given", "give what `patcher.evaluate` returned")
    first = evaluations[0]
    candidate = Candidate.from_file(first.op, Path(source), Language(first.language))
    make_bundle(
        Path(target),
        candidate,
        evaluations,
        engine=engine,
        made_by="patcher.bundle",
        tensor_parallel=tuple(tensor_parallel),
    )
    return Path(target)


def require_bundle(target: Path, op: str, engine: str, point: str | None = None) -> None:
    """Refuse a bundle that cannot be written, before its kernel is built or judged.

    Raises:
        UsageError: the op has no patch point in the engine, or the target holds something else.
        MissingError: the engine is not installed.
    """
    require_target(target)
    patch_point(load_op(op), engine, point)
    engine_version(engine)


def make_bundle(
    target: Path,
    candidate: Candidate,
    evaluations: Sequence[Evaluation],
    *,
    engine: str,
    made_by: str,
    tensor_parallel: tuple[int, ...] = (),
    point: str | None = None,
) -> Manifest:
    """Write it with its prebuilt binary; see `Patch.create` for what is raised."""
    from patcher.bench.toolchains import build

    require_bundle(target, candidate.op, engine, point)
    op = load_op(candidate.op)
    built = build(candidate, op.contract)
    with tempfile.TemporaryDirectory() as scratch:
        packed = is_archive(target)
        patch = Patch.create(
            Path(scratch) / "patch" if packed else target,
            op,
            candidate,
            evaluations[0],
            engine=engine,
            made_by=made_by,
            built=built,
            tensor_parallel=tensor_parallel,
            further=tuple(evaluations[1:]),
            point_name=point,
        )
        if packed:
            pack(patch, target)
        return patch.manifest
