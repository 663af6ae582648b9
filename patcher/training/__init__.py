"""Training language models on kernels: the agent loop as an environment, its rewards as data."""

from patcher.training.environment import KernelEnvironment, Message, Turn
from patcher.training.rewards import LOG_SPEEDUP, MILESTONES, SCHEMES, RewardScheme, reward_scheme
from patcher.training.trainers import RewardFunction, questions

__all__ = [
    "LOG_SPEEDUP",
    "MILESTONES",
    "SCHEMES",
    "KernelEnvironment",
    "Message",
    "RewardFunction",
    "RewardScheme",
    "Turn",
    "questions",
    "reward_scheme",
]
