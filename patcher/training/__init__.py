"""An environment for trainers of language models: verdicts as observations and rewards."""

from patcher.training.environment import EnvironmentOptions, KernelEnvironment, Turn
from patcher.training.shaping import Shaping, TurnReward

__all__ = ["EnvironmentOptions", "KernelEnvironment", "Shaping", "Turn", "TurnReward"]
