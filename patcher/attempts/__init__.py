"""What became of the candidates: the records (`record.py`), where all of them leave the loop
(`history.py`), and how a kernel is built apart from its text (`structure.py`)."""

from patcher.attempts.record import (
    Attempt,
    Diagnosis,
    KnownKernel,
    LoopResult,
    Phase,
    Progress,
    Recommendation,
    ReplyFailure,
    Stage,
    Stop,
    Stopped,
)

__all__ = [
    "Attempt",
    "Diagnosis",
    "KnownKernel",
    "LoopResult",
    "Phase",
    "Progress",
    "Recommendation",
    "ReplyFailure",
    "Stage",
    "Stop",
    "Stopped",
]
