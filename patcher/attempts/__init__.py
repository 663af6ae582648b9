"""What became of the candidates: each one's record (`record.py`), where all of them leave the loop
(`tried.py`), how a kernel is built apart from its text (`structure.py`), and what it is worth
(`reward.py`, `judged.py`)."""

from patcher.attempts.record import (
    Attempt,
    Diagnosis,
    Optimisation,
    Phase,
    Progress,
    Recommendation,
    Stage,
    Stop,
    Stopped,
)

__all__ = [
    "Attempt",
    "Diagnosis",
    "Optimisation",
    "Phase",
    "Progress",
    "Recommendation",
    "Stage",
    "Stop",
    "Stopped",
]
