"""One thing that `patcher doctor` found out."""

from __future__ import annotations

from typing import Literal

from patcher.bench import Record

Status = Literal["ok", "warn", "fail"]


class Finding(Record):
    """One line of `patcher doctor`."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    likely: bool = True
    """Whether somebody on this machine is likely to want it; if not, a warning is for `--all`."""

    @property
    def shown(self) -> bool:  # without `--all`
        return self.likely or self.status != "warn"
