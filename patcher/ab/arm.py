"""One arm of an A/B as a process: commands on stdin, replies on stdout.

It runs as `python -P -m patcher.ab.arm`. Environment variables enable its patches, as in serving.
`arm_protocol.py` defines the messages. The engine's own output goes to stderr. The process ends
when stdin is closed.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import ExitStack
from math import isfinite
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError

from patcher.ab import arm_protocol as say
from patcher.ab.receipt_counts import merged
from patcher.bench import PatcherError, Shape, UsageError, Workload
from patcher.bench.ab import cloze
from patcher.bench.ab.latency import in_steps
from patcher.bench.ab.logits import served_alone, served_logits
from patcher.bench.engines import (
    Decoding,
    Measurable,
    in_process,
    open_measurable,
    random_prompts,
)
from patcher.bench.engines.child_errors import memory_errors
from patcher.bench.machine.memory import free_host_bytes
from patcher.integrate import Receipt, activated, await_engine, worker_receipts

if TYPE_CHECKING:
    from patcher.bench.ab.planted import StepDelay
    from patcher.integrate import Activation


class ArmServer:
    """The engine, its patches and the current window."""

    def __init__(self, load: say.Load) -> None:
        """Load the engine and its patches.

        Raises:
            PatcherError: the engine does not load, or a patch cannot be installed.
        """
        self.workload: Workload = load.workload
        free = free_bytes(self.workload.device)
        await_engine(self.workload.engine)
        self.engine: Measurable = open_measurable(
            self.workload, load.arguments, load.memory_share, load.room
        )
        if in_process(self.workload.engine):
            self._try_model()
        self.active: Activation = activated(
            self.workload.engine, getattr(self.engine, "model", None)
        )
        self._free_before = free
        self._decoding: Decoding | None = None
        self._calls = 0
        self._delay = ExitStack()

    def _try_model(self) -> None:
        """A token before patches are installed, so that no patch is taken for a model that does not
        run, nor the other way round: what patches break is a verdict's to say.

        Raises:
            UsageError: the model does not run.
        """
        prompts = random_prompts(self.workload, self.engine.vocab_size, seed=0)[:1, :1]
        self.engine.decode(self.engine.prefill(prompts), 1)

    def answer(self, command: say.ArmCommand) -> say.ArmReply:
        """Execute a command and return its reply.

        Raises:
            PatcherError: the command cannot be executed in this state.
        """
        match command:
            case say.Load():
                raise UsageError("the engine is already loaded")
            case say.Prefill(seed=seed, shape=shape):
                return self._prefill(seed, shape)
            case say.Decode(steps=steps):
                self.engine.decode(self._window(), steps)
            case say.Settle():
                self.engine.synchronize()
            case say.End():
                return self._end()
            case say.PlantDelay(seconds=seconds):
                self._delay.close()
                if seconds:
                    self._delay.enter_context(delay_of(self.engine)(seconds))
            case say.InSteps(seed=seed):
                return say.StepSeconds(seconds=in_steps(self.engine, seed))
            case say.Generate(seed=seed, steps=steps):
                made = self.engine.generate(self._prompts(seed), steps)
                gc.collect()
                return say.Generated(tokens=made.tokens.tolist())
            case say.Logits():
                return self._logits(command)
            case say.Answer(questions=questions):
                return self._answers(questions)
            case say.AskRouting(seed=seed, steps=steps):
                prompts = self.engine.prompts(seed)
                return say.Entropy(percent=self.engine.routing_entropy_pct(prompts, steps))
            case say.AskMemory():
                return self._memory()
            case say.AskReceipts():
                return say.Receipts(receipts=tuple(self._receipts()))
            case say.Close():
                self._delay.close()
                self.active.close()
                self.engine.close()
        return say.Done()

    def loaded(self) -> say.Loaded:
        patches = {one.patch_id: one.digest for one in self._receipts()}
        return say.Loaded(vocab_size=self.engine.vocab_size, patches=patches)

    def _prefill(self, seed: int, shape: Shape | None) -> say.Done:
        if self._decoding is not None:
            raise UsageError("a window is already open")
        workload = self.workload if shape is None else shape.of(self.workload)
        prompts = random_prompts(workload, self.engine.vocab_size, seed)
        gc.disable()
        self._calls = self._total_calls()
        self._decoding = self.engine.prefill(prompts)
        return say.Done()

    def _end(self) -> say.Ended:
        decoding = self._window()
        self._decoding = None
        self.engine.release(decoding)
        gc.enable()
        gc.collect()  # between windows, and not while the client waits for one
        calls = self._total_calls() - self._calls
        return say.Ended(tokens=decoding.tokens().tolist(), kernel_calls=calls)

    def _window(self) -> Decoding:
        if self._decoding is None:
            raise UsageError("no window is open")
        return self._decoding

    def _total_calls(self) -> int:
        return sum(one.total_calls for one in self._receipts())

    def _receipts(self) -> list[Receipt]:
        """Of the patches here; of several ranks, the sum of those that are in each of them."""
        if not getattr(self.engine, "in_workers", False):
            return [Receipt.of(item.book) for item in self.active.installed]
        engine: Any = self.engine
        workers = engine.on_workers(worker_receipts, self.workload.engine)
        return [
            merged(ranks)
            for one in workers[0]
            if len(
                ranks := [each for own in workers for each in own if each.patch_id == one.patch_id]
            )
            == len(workers)
        ]

    def _logits(self, asked: say.Logits) -> say.Wrote:
        prompts = self._prompts(asked.seed)
        forced = torch.tensor(asked.forced)
        if asked.alone:
            values, how = served_alone(self._serve, prompts, forced), "as served, one at a time"
            assert values is not None, "a single sequence is asked for once"
        else:
            values, how = _logits_of(self.engine, prompts, forced, asked.reference)
        np.save(asked.path, values.flatten(0, 1).numpy(), allow_pickle=False)
        return say.Wrote(how=how)

    def _serve(self, prompts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        return _logits_of(self.engine, prompts, forced, reference=False)[0]

    def _prompts(self, seed: int) -> torch.Tensor:
        return cloze.quality_prompts(self.workload, self.engine.vocab_size, seed)

    def _answers(self, questions: list[cloze.Question]) -> say.Answered:
        found = cloze.answers(self._serve, questions, self.workload.batch).tolist()
        return say.Answered(
            likelihoods=[[one if isfinite(one) else None for one in each] for each in found]
        )

    def _memory(self) -> say.MemoryUse:
        free = free_bytes(self.workload.device)
        held = max(self._free_before - free, 0)
        if self.workload.device == "cpu":
            held = self.engine.peak_memory_bytes()
        return say.MemoryUse(held=held, peak=self.engine.peak_memory_bytes(), free=free)


def delay_of(engine: Any) -> StepDelay:
    """The function that delays each decode step of this engine."""
    from patcher.bench.ab.planted import model_delay, runner_delay

    return runner_delay(engine.runner) if hasattr(engine, "runner") else model_delay(engine.model)


def _logits_of(
    engine: Any, prompts: torch.Tensor, forced: torch.Tensor, reference: bool
) -> tuple[torch.Tensor, str]:
    """Logits [batch, steps + 1, vocabulary] over forced tokens, and how they were computed."""
    if hasattr(engine, "served_logits"):  # an engine whose model is not called as a module
        return engine.served_logits(prompts, forced), engine.how
    if not reference:
        return served_logits(engine, prompts, forced), "as served"
    tokens = torch.cat([prompts, forced], dim=1)
    wide, how = engine.reference_logits(tokens, forced.shape[1] + 1)
    return wide[:, :-1], how


def free_bytes(device: str) -> int:
    """Current memory use of the GPU, or of the host."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return free_host_bytes()


def serve(commands: IO[bytes], replies: IO[bytes]) -> int:
    """Answer commands until `Close`, or until stdin is closed."""
    arm: ArmServer | None = None
    for line in commands:
        closed = False
        try:
            command = say.COMMAND.validate_json(line)
            reply: say.ArmReply
            if arm is not None:
                with memory_errors(arm.workload):
                    reply = arm.answer(command)
                closed = isinstance(command, say.Close)
            elif isinstance(command, say.Load):
                with memory_errors(command.workload):
                    arm = ArmServer(command)
                    reply = arm.loaded()
            else:
                raise UsageError("the first command must be load")
        except ValidationError as error:
            reply = _failed(UsageError(f"invalid command: {str(error).splitlines()[0]}"))
        except PatcherError as error:
            reply = _failed(error)
        replies.write(reply.model_dump_json().encode() + b"\n")
        replies.flush()
        if closed:
            return 0
    return 1


def _failed(error: PatcherError) -> say.Failed:
    return say.Failed(error=error.as_dict())


def main() -> int:
    # the engine's children and its output must not use the pipe
    commands, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    with commands, replies:
        return serve(commands, replies)


if __name__ == "__main__":
    sys.exit(main())
