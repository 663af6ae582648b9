"""A folder for any coding agent: it edits one file, and the judge alone says what that is worth."""

from patcher.workspace.layout import (
    OpenWorkspace,
    Workspace,
    lay_out,
    open_workspace,
    starting_point,
)
from patcher.workspace.ledger import RESULTS, Line, Stage, parse
from patcher.workspace.stages import WorkspaceTry, attempt

__all__ = [
    "RESULTS",
    "Line",
    "OpenWorkspace",
    "Stage",
    "Workspace",
    "WorkspaceTry",
    "attempt",
    "lay_out",
    "open_workspace",
    "parse",
    "starting_point",
]
