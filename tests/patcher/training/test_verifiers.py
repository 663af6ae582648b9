"""The taskset in `verifiers` itself, which is too large for our own environment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from training_sample import OP, OPTIONS, RIGHT, WRONG, reply

vf: Any = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")


def trace_of(task: Any, text: str) -> Any:
    from verifiers.v1.types import AssistantMessage

    found = vf.Trace(
        task=vf.TraceTask(type="KernelTask", data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    message = AssistantMessage(role="assistant", content=text)
    found.nodes.append(vf.MessageNode(message=message, sampled=True))
    return found


def test_a_reply_is_rewarded_by_the_judge() -> None:
    from patcher.training.verifiers import KernelTaskset, KernelTasksetConfig

    config = KernelTasksetConfig(ops=(OP,), language=OPTIONS.language, judges=1, threads=1, pairs=2)
    [task] = KernelTaskset(config)
    assert task.data.idx == 0
    assert task.key == f"torch/{OP}"
    assert f"def {OP}(" in task.data.prompt_text
    for text, right in ((reply(RIGHT), True), (reply(WRONG), False), ("I cannot.", False)):
        trace = trace_of(task, text)
        asyncio.run(task.score(trace))
        value = trace.rewards["judged"].score
        assert (value >= 1) is right
        assert trace.metrics["right"] == float(right)
        assert trace.metrics["caught"] == 0.0
