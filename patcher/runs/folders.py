"""Which folder is the run that a person means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patcher.bench import UsageError


def every(root: Path) -> Sequence[Path]:
    """Folders of every run under the root, oldest first."""
    found = [path.parent for path in root.glob("*/run.json")]
    # An id begins with its second; runs of the same second are told apart by their files.
    return sorted(found, key=lambda path: (path.name[:15], (path / "run.json").stat().st_mtime_ns))


def latest(root: Path) -> Path:
    """The folder of the newest run.

    Raises:
        UsageError: there is none.
    """
    found = every(root)
    if not found:
        raise UsageError(f"no runs in {root}", "start one: patcher demo")
    return found[-1]


def find(root: Path, text: str) -> Path:
    """The run that a person means by a folder, an id, the unique beginning of an id, or `latest`.

    Raises:
        UsageError: no run or several fit.
    """
    if text == "latest":
        return latest(root)
    if (Path(text) / "run.json").is_file():
        return Path(text)
    known = every(root)
    fitting = [path for path in known if path.name == text] or [
        path for path in known if path.name.startswith(text)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(f"several runs begin with {text!r}", "give more of the id")
    raise UsageError(f"no run {text!r} in {root}", "give a run's folder or id, or `latest`")
