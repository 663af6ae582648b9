"""The installed Nsight Systems (nsys): find it, check it, and export reports."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Literal

from patcher.bench import MissingError, UsageError
from patcher.bench.machine.environment import engine_environment
from patcher.bench.machine.installed import find_tool, version_of
from patcher.bench.sandbox import KEPT_BYTES, run

PLACES = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/target-linux-x64/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/usr/local/cuda*/bin/nsys",
    # Nsight Compute carries a whole nsys
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
)
_EXPORT_S = 3600
_AGAIN = "profile again"


def find_nsys() -> Path | None:
    """Find nsys: `$PATCHER_NSYS`, PATH, the usual folders, then Nsight Compute's own copy.

    Returns:
        The newest nsys of the first place that has one; None if there is none.
    """
    return find_tool("nsys", PLACES)


def nsys_environment() -> dict[str, str]:
    """The environment variables for nsys.

    Returns:
        The engine's environment without keys, since nsys stores it in its reports.
        `$PATCHER_NSYS_LIBS` is prepended to the library path.
    """
    environment = engine_environment()
    if libraries := os.environ.get("PATCHER_NSYS_LIBS"):
        old = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{libraries}:{old}" if old else libraries
    return environment


def export_sqlite(report: Path, target: Path) -> Path:
    """Export a report to SQLite with the installed nsys.

    Raises:
        MissingError: nsys is not installed or lacks a library.
        UsageError: nsys cannot read the report.
    """
    nsys = find_nsys()
    if nsys is None:
        raise MissingError(
            f"reading {report.name} needs nsys, which is not installed",
            "on a machine with nsys, run: nsys export --type sqlite "
            f"{shlex.quote(report.name)}; then pass the .sqlite file to --from",
        )
    if missing := missing_libraries(nsys):
        raise MissingError(f"nsys lacks {', '.join(missing)}", _library_fix(missing))
    command = [str(nsys), "export", "--type", "sqlite", "--force-overwrite", "true"]
    command += ["-o", str(target), str(report)]
    try:
        code, out, err = run(command, _EXPORT_S, nsys_environment(), KEPT_BYTES)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"nsys cannot export {report.name} in {_EXPORT_S} s", _AGAIN) from error
    if code != 0 or not target.is_file():
        last = str(err if bytes(err) else out).strip().splitlines()
        reason = f": {last[-1][:300]}" if last else ""
        raise UsageError(f"nsys cannot export {report.name}{reason}", _AGAIN)
    return target


def missing_libraries(nsys: Path) -> list[str]:
    """Libraries that nsys or its importer needs and the loader cannot find, often `libdw.so.1`."""
    # the importer lies in `host-linux-x64` (Nsight Systems) or `linux-desktop-*` (Nsight Compute)
    importers = [nsys.resolve(), *nsys.resolve().parent.parent.glob("*/QdstrmImporter")]
    missing: list[str] = []
    for importer in importers:
        result = subprocess.run(
            ["ldd", str(importer)],
            capture_output=True,
            text=True,
            env=nsys_environment() | {"LC_ALL": "C"},
            check=False,
        )
        missing += re.findall(r"^\s*(\S+) => not found", result.stdout, re.MULTILINE)
    return sorted(set(missing))


def nsys_finding() -> tuple[Literal["ok", "warn", "fail"], str, str]:
    """Check the installed Nsight Systems for `patcher doctor`.

    Returns:
        (status, message, fix).
    """
    nsys = find_nsys()
    if nsys is None:
        fix = "install Nsight Systems, or set PATCHER_NSYS; torch.profiler is used until then"
        return "warn", "not found on PATH, in the usual folders, or in Nsight Compute", fix
    try:
        version = version_of(nsys)
    except OSError as error:
        return "fail", f"does not run: {error}", "reinstall Nsight Systems"
    if missing := missing_libraries(nsys):
        return "fail", f"lacks {', '.join(missing)}", _library_fix(missing)
    return "ok", version, ""


def _library_fix(missing: list[str]) -> str:
    package = "libdw1" if "libdw.so.1" in missing else "them"
    return (
        f"install {package} (Debian: apt-get install {package}), or set PATCHER_NSYS_LIBS to a "
        "folder that holds them"
    )
