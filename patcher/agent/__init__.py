"""The agent loop on one op: two agents under the judge's feedback.

`loop.py` is the story; what to ask next is a strategy's (`patcher.strategies`).
"""

from patcher.agent.asking import MAX_TOKENS, Adapt
from patcher.agent.best import best_candidate
from patcher.agent.ended import ended
from patcher.agent.judging import Prepare
from patcher.agent.loop import optimize
from patcher.agent.moving_on import MAX_FUNCTIONAL_FAILURES, Rules
from patcher.agent.writing import Extra

__all__ = [
    "MAX_FUNCTIONAL_FAILURES",
    "MAX_TOKENS",
    "Adapt",
    "Extra",
    "Prepare",
    "Rules",
    "best_candidate",
    "ended",
    "optimize",
]
