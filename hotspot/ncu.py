"""The installed Nsight Compute (ncu): find it, and export reports as text."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Literal

from patcher.bench import MissingError, UsageError
from patcher.bench.machine.installed import find_ncu, version_of
from patcher.bench.sandbox import run
from patcher.hotspot.names import printable

_RAW = ("--page", "raw", "--csv", "--print-units", "base")
_MOST_BYTES = 256 << 20
_SECONDS = 300
"""Timeout; ncu exports a report of a thousand kernels in well under a minute."""


def raw_page(report: Path) -> str:
    """Print the raw page of a report (`.ncu-rep`) in base units with the installed ncu.

    Raises:
        MissingError: ncu is not installed.
        UsageError: ncu cannot read the report.
    """
    if not report.is_file():
        raise UsageError(f"cannot read {report}: no such file", "give a report")
    ncu = find_ncu()
    if ncu is None:
        raise MissingError(
            f"reading {report.name} needs ncu, which is not installed",
            "on a machine with ncu, run: LC_ALL=C ncu --import "
            f"{shlex.join([report.name, *_RAW])} > counters.csv; then pass counters.csv; "
            "or set PATCHER_NCU",
        )
    fix = "read it with an ncu as new as the one that wrote it (PATCHER_NCU), or profile again"
    try:
        code, out, err = run(
            [str(ncu), "--import", str(report), *_RAW],
            _SECONDS,
            dict(os.environ) | {"LC_ALL": "C"},
            _MOST_BYTES,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"ncu cannot read {report.name}: {type(error).__name__}", fix) from error
    if code != 0:
        lines = str(err if bytes(err) else out).strip().splitlines()
        last = f": {printable(lines[-1])[:300]}" if lines else ""
        raise UsageError(f"ncu cannot read {report.name}{last}", fix)
    if out.left_out:
        raise UsageError(
            f"{report.name} has more than {_MOST_BYTES >> 20} MiB of counters", "profile less"
        )
    return str(out)


def ncu_finding() -> tuple[Literal["ok", "warn", "fail"], str, str]:
    """Check the installed Nsight Compute for `patcher doctor`.

    Returns:
        (status, message, fix).
    """
    ncu = find_ncu()
    if ncu is None:
        fix = "install Nsight Compute, or set PATCHER_NCU; only kernel counters need it"
        return "warn", "not found on PATH or in the usual folders", fix
    try:
        return "ok", version_of(ncu), ""
    except OSError as error:
        return "fail", f"does not run: {error}", "reinstall Nsight Compute"
