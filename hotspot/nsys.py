"""The nsys of this machine: found, checked, and made to export."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Literal

from patcher.bench import MissingError, UsageError
from patcher.bench.machine.environment import engine_environment
from patcher.bench.machine.installed import find_tool, version_of

PLACES = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/target-linux-x64/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/usr/local/cuda*/bin/nsys",
    # Nsight Compute carries a whole nsys
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
)


def find_nsys() -> Path | None:
    """`$PATCHER_NSYS`, PATH, the usual install folders, or inside Nsight Compute; newest first."""
    return find_tool("nsys", PLACES)


def nsys_environment() -> dict[str, str]:
    """The environment for nsys: no keys, which its reports would hold; `$PATCHER_NSYS_LIBS` holds
    libraries that it alone needs.
    """
    environment = engine_environment()
    if libraries := os.environ.get("PATCHER_NSYS_LIBS"):
        old = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{libraries}:{old}" if old else libraries
    return environment


def export_sqlite(report: Path, target: Path) -> Path:
    """Export a report with the nsys that is here.

    Raises:
        MissingError: no nsys, or it lacks a library.
        UsageError: it cannot read the report.
    """
    nsys = find_nsys()
    if nsys is None:
        raise MissingError(
            f"{report.name} needs nsys to be read, and none is here",
            f"where nsys is: nsys export --type sqlite {report.name}; then --from the .sqlite file",
        )
    if lacking := missing_libraries(nsys):
        raise MissingError(f"nsys lacks {', '.join(lacking)}", _library_fix(lacking))
    command = [str(nsys), "export", "--type", "sqlite", "--force-overwrite", "true"]
    result = subprocess.run(
        [*command, "-o", str(target), str(report)],
        capture_output=True,
        text=True,
        env=nsys_environment(),
        check=False,
    )
    if result.returncode != 0 or not target.is_file():
        last = (result.stderr or result.stdout).strip().splitlines()
        told = f": {last[-1][:300]}" if last else ""
        raise UsageError(f"nsys cannot export {report.name}{told}", "profile again")
    return target


def missing_libraries(nsys: Path) -> list[str]:
    """Libraries that nsys's importer wants and the loader does not find (`libdw.so.1`, often)."""
    # beside the command in `host-linux-x64` (Nsight Systems) or `linux-desktop-*` (Nsight Compute)
    importers = [nsys.resolve(), *nsys.resolve().parent.parent.glob("*/QdstrmImporter")]
    found: list[str] = []
    for importer in importers:
        result = subprocess.run(
            ["ldd", str(importer)],
            capture_output=True,
            text=True,
            env=nsys_environment() | {"LC_ALL": "C"},
            check=False,
        )
        found += re.findall(r"^\s*(\S+) => not found", result.stdout, re.MULTILINE)
    return sorted(set(found))


def nsys_finding() -> tuple[Literal["ok", "warn", "fail"], str, str]:
    """(status, message, fix) for `patcher doctor`."""
    nsys = find_nsys()
    if nsys is None:
        fix = "install Nsight Systems, or set PATCHER_NSYS; torch.profiler is used meanwhile"
        return "warn", "not found on PATH, in the usual folders, or in Nsight Compute", fix
    try:
        version = version_of(nsys)
    except OSError as error:
        return "fail", f"does not run: {error}", "reinstall Nsight Systems"
    if lacking := missing_libraries(nsys):
        return "fail", f"lacks {', '.join(lacking)}", _library_fix(lacking)
    return "ok", version, ""


def _library_fix(lacking: list[str]) -> str:
    package = "libdw1" if "libdw.so.1" in lacking else "them"
    return (
        f"install {package} (Debian: apt-get install {package}), or set PATCHER_NSYS_LIBS to a "
        "folder that holds them"
    )
