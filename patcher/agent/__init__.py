"""The agent loop on one op: two agents under the judge's feedback.

One iteration is four files: `loop.py` decides what is asked for and keeps what came of it,
`generation.py` makes a source of a request, `agents.py` puts the questions, `evaluation.py` has the
sources judged. `stopping.py` says when the loop ends; what to ask for next is a strategy's
(`patcher.strategies`).
"""

from patcher.agent.agents import MAX_TOKENS, AdaptPrompt
from patcher.agent.evaluation import PrepareRound
from patcher.agent.generation import ExtraText
from patcher.agent.loop import run_loop
from patcher.agent.stopping import (
    MAX_FUNCTIONAL_FAILURES,
    StopRules,
    best_candidate,
    recorded_stop,
)

__all__ = [
    "MAX_FUNCTIONAL_FAILURES",
    "MAX_TOKENS",
    "AdaptPrompt",
    "ExtraText",
    "PrepareRound",
    "StopRules",
    "best_candidate",
    "recorded_stop",
    "run_loop",
]
