"""NVIDIA's tools on this machine: where they are and which version."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

NCU_PLACES = (
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/cuda*/bin/ncu",
    "/usr/local/cuda*/nsight-compute*/ncu",
)
SANITIZER_PLACES = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda*/bin/compute-sanitizer",
    "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
)


def find_ncu() -> Path | None:
    """`$PATCHER_NCU`, PATH, or the usual install folders; newest first."""
    return find_tool("ncu", NCU_PLACES)


def find_compute_sanitizer() -> Path | None:
    """`$PATCHER_COMPUTE_SANITIZER`, PATH, `$CUDA_HOME`, or the usual install folders."""
    home = os.environ.get("CUDA_HOME")
    own = (f"{glob.escape(home)}/bin/compute-sanitizer",) if home else ()
    return find_tool("compute-sanitizer", (*own, *SANITIZER_PLACES))


def compute_sanitizer_finding() -> tuple[Literal["ok", "warn", "fail"], str, str]:
    """(status, message, fix) for `patcher doctor`."""
    tool = find_compute_sanitizer()
    if tool is None:
        fix = "install the CUDA toolkit, or set PATCHER_COMPUTE_SANITIZER; for evaluate --sanitize"
        return "warn", "not found on PATH, in CUDA_HOME or in /usr/local/cuda", fix
    try:
        return "ok", version_of(tool), ""
    except OSError as error:
        return "fail", f"does not run: {error}", "reinstall the CUDA toolkit"


def find_tool(name: str, places: Sequence[str]) -> Path | None:
    """`$PATCHER_<NAME>`, PATH, or one of the usual places (globs); of several the newest."""
    if chosen := os.environ.get(f"PATCHER_{name.upper().replace('-', '_')}"):
        return Path(chosen) if os.access(chosen, os.X_OK) else None
    if found := shutil.which(name):
        return Path(found)
    for pattern in places:
        candidates = [path for path in glob.glob(pattern) if os.access(path, os.X_OK)]
        if candidates:
            return Path(max(candidates, key=_version_key))
    return None


def version_of(tool: Path) -> str:
    """What it says of itself; `found` where that is no version.

    Raises:
        OSError: it does not run.
    """
    try:
        result = subprocess.run(
            [str(tool), "--version"], capture_output=True, text=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired as error:
        raise OSError("it does not end") from error
    if result.returncode != 0:
        raise OSError(f"it ends with status {result.returncode}")
    version = re.search(r"[vV]ersion (\S+)", result.stdout)
    return version[1] if version else "found"


def _version_key(path: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", path)]
