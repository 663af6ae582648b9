"""The agent loop on one op: two agents under the judge's feedback.

`loop.py` is the story; what to ask next is a strategy's (`patcher.strategies`).
"""

from patcher.agent.asking import MAX_TOKENS
from patcher.agent.loop import best_candidate, optimize
from patcher.agent.moving_on import MAX_FUNCTIONAL_FAILURES

__all__ = ["MAX_FUNCTIONAL_FAILURES", "MAX_TOKENS", "best_candidate", "optimize"]
