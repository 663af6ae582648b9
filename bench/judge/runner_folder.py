"""What a runner finds in its folder: a copy of the build, and its home and caches."""

from __future__ import annotations

import shutil
from pathlib import Path

from patcher.bench.ops.op import user_op_folders
from patcher.bench.toolchains import Built, cache_root


def placed(built: Built, folder: Path) -> Path:
    """Copy a build into a folder that the sandbox can read."""
    assert built.path is not None
    target = folder / built.path.name
    shutil.copyfile(built.path, target)
    target.chmod(0o755)
    return target


def caches(folder: Path, trusted: bool) -> dict[str, str]:
    """Environment variables for the home and the caches of a runner.

    Trusted runners share one cache folder; others have one in `folder`.
    """
    caches = cache_root() / "baselines" if trusted else folder / "cache"
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
        "TVM_FFI_CACHE_DIR": str(caches / "tvm-ffi"),
        "PATCHER_CACHE": str(caches),
        **({"PATCHER_OPS": user_op_folders()} if trusted else {}),
    }
