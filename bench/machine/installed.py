"""Find NVIDIA's tools on this machine and their versions."""

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
    """Find Nsight Compute: `$PATCHER_NCU`, PATH, or the newest in the usual install folders."""
    return find_tool("ncu", NCU_PLACES)


def find_compute_sanitizer() -> Path | None:
    """Find compute-sanitizer: `$PATCHER_COMPUTE_SANITIZER`, PATH, `$CUDA_HOME`, or the usual
    install folders.
    """
    home = os.environ.get("CUDA_HOME")
    own = (f"{glob.escape(home)}/bin/compute-sanitizer",) if home else ()
    return find_tool("compute-sanitizer", (*own, *SANITIZER_PLACES))


def compute_sanitizer_finding() -> tuple[Literal["ok", "warn", "fail"], str, str]:
    """Status, message and fix for `patcher doctor`."""
    tool = find_compute_sanitizer()
    if tool is None:
        fix = "install the CUDA toolkit, or set PATCHER_COMPUTE_SANITIZER; for evaluate --sanitize"
        return "warn", "not found on PATH, in CUDA_HOME or in /usr/local/cuda", fix
    try:
        return "ok", version_of(tool), ""
    except OSError as error:
        return "fail", f"does not run: {error}", "reinstall the CUDA toolkit"


def find_tool(name: str, places: Sequence[str]) -> Path | None:
    """Find a tool.

    Args:
        name: name of the executable.
        places: glob patterns of the usual install paths, searched after `$PATCHER_<NAME>` and PATH.

    Returns:
        Its path, the newest version if a pattern matches several; None if there is none.
    """
    if chosen := os.environ.get(f"PATCHER_{name.upper().replace('-', '_')}"):
        return Path(chosen) if os.access(chosen, os.X_OK) else None
    if path := shutil.which(name):
        return Path(path)
    for pattern in places:
        candidates = [each for each in glob.glob(pattern) if os.access(each, os.X_OK)]
        if candidates:
            return Path(max(candidates, key=_version_key))
    return None


def version_of(tool: Path) -> str:
    """Version that a tool reports; `found` if it reports none.

    Raises:
        OSError: the tool does not run.
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
