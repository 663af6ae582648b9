"""Tasks for `verifiers` (0.4, its v1 API): prompts, the judge's reward, and shares as metrics.

A module of yours on the path, `kernels_by_patcher.py`, makes the taskset known by that id:

    from patcher.training.verifiers import KernelTaskset

    __all__ = ["KernelTaskset"]

A reply is judged as the only one of an episode; the harness `null` asks for it without tools.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

from patcher.bench import Language
from patcher.tasks.records import Split
from patcher.training.choice import choose_ops
from patcher.training.environment import OPTIONS, EnvironmentOptions, KernelEnvironment
from patcher.training.replies import JudgedReply
from patcher.training.reply_judges import AskedReply, ReplyJudges
from patcher.training.shaping import Scale, Shaping


class KernelTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """What is asked for, and how replies are judged."""

    tasks: Path | None = None
    """A folder of `patcher tasks create`."""
    ops: tuple[str, ...] = ()
    """Instead: ops of the library."""
    split: Split = "train"
    language: Language = Language.TRITON
    scale: Scale = "milestones"
    judge: str = "local"
    judges: int = 4
    """Processes that judge, in all tasks together."""
    against: tuple[str, ...] = ("eager",)
    threads: int | None = None
    pairs: int = 6

    def environment(self) -> EnvironmentOptions:
        """The options of the environment."""
        return EnvironmentOptions(
            language=self.language,
            turns=1,
            shaping=Shaping(scale=self.scale),
            judge=self.judge,
            against=self.against,
            threads=self.threads,
            pairs=self.pairs,
        )


class KernelData(vf.TaskData):  # type: ignore[misc]
    """One op."""

    op: str
    environment: dict[str, Any]
    """`EnvironmentOptions` as JSON."""
    judges: int


class KernelTask(vf.Task[KernelData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """One op to write a kernel for."""

    @property
    def key(self) -> str:
        return f"{self.data.environment['language']}/{self.data.op}"

    @vf.reward  # type: ignore[untyped-decorator]
    async def judged(self, trace: vf.Trace) -> float:
        """The reward of the last reply."""
        return (await self._judged(trace)).reward.value

    @vf.metric  # type: ignore[untyped-decorator]
    async def shares(self, trace: vf.Trace) -> dict[str, float]:
        """Whether it compiled, is right, is faster than the first baseline, and was caught."""
        found = await self._judged(trace)
        return {name: float(flag) for name, flag in found.flags().items()}

    async def _judged(self, trace: vf.Trace) -> JudgedReply:
        judges = _judges(json.dumps(self.data.environment), self.data.judges)
        asked = [AskedReply(self.data.op, trace.last_reply)]
        return (await asyncio.to_thread(judges.judge, asked))[0]


class KernelTaskset(vf.Taskset[KernelTask, KernelTasksetConfig]):  # type: ignore[misc]
    """The tasks of a folder, or ops of the library."""

    def load(self) -> Iterator[KernelTask]:
        """Raises:
        UsageError: there are none, or an op has no sweep for the judge's device.
        """
        config: KernelTasksetConfig = self.config
        options = config.environment()
        asked = KernelEnvironment(options)
        for op in choose_ops(config.tasks, config.ops, config.split):
            data = KernelData(
                name=op,
                prompt=asked.reset(op),
                op=op,
                environment=OPTIONS.dump_python(options, mode="json"),
                judges=config.judges,
            )
            yield KernelTask(data, config.task)


@functools.cache
def _judges(environment: str, workers: int) -> ReplyJudges:
    """One pool a process, which ends with it: tasks are copied, judges cannot be."""
    return ReplyJudges(OPTIONS.validate_json(environment), workers)


__all__ = ["KernelTaskset"]
