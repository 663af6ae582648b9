"""A double of nsys: it names reports as nsys 2025.3.1 was seen to on an H200, and exports a real
recording.

It does not run the program, and is told how many capture ranges that has. A report holds the number
of its range.
"""

from __future__ import annotations

import shlex
import shutil
import sqlite3
import stat
import sys
from pathlib import Path

EXPORT = Path(__file__).parents[1] / "data/nsys/decode.sqlite"
KERNEL = "triton_red_fused_fused_add_rms_norm_1"
"""The kernel that has the number of its range for a name in an export."""


def installed(folder: Path, ranges: int, script: str = __file__) -> Path:
    """The double as a program in this folder; it keeps its last command of `profile` beside it."""
    program = folder / "nsys"
    line = shlex.join([sys.executable, "-P", script, str(ranges)])
    program.write_text(f'#!/bin/sh\nexec {line} "$0" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def profile(arguments: list[str], ranges: int) -> None:
    """Write the reports. A number that is taken is skipped, even if files are to be overwritten;
    one range, or the only one that is asked for, has no number."""
    [end] = [each for each in arguments if each.startswith("--capture-range-end=")]
    kind, _, most = end.removeprefix("--capture-range-end=").partition(":")
    stem = arguments[arguments.index("-o") + 1].removesuffix(".nsys-rep")
    asked = int(most or 1)
    number = 0
    for taken in range(1, min(asked, ranges) + 1):
        report = Path(f"{stem}.nsys-rep")
        if kind == "repeat" and asked > 1:
            number += 1
            while (report := Path(f"{stem}.{number}.nsys-rep")).exists():
                number += 1
        report.write_text(str(taken))


def export(arguments: list[str]) -> None:
    """Write the recording with the range's number as the name of a kernel."""
    target, report = Path(arguments[arguments.index("-o") + 1]), Path(arguments[-1])
    shutil.copy(EXPORT, target)
    with sqlite3.connect(target) as database:
        name = f"kernel_of_range_{report.read_text()}"
        database.execute("UPDATE StringIds SET value = ? WHERE value = ?", (name, KERNEL))


if __name__ == "__main__":
    _, told, own, command, *rest = sys.argv
    if command == "profile":
        Path(f"{own}.command").write_text("\n".join(rest))
        profile(rest, int(told))
    elif command == "export":
        export(rest)
    else:
        raise SystemExit(f"nsys has no command {command}")
