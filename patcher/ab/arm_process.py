"""The measuring side of an arm's process: start it, send commands, time it, end it.

Time is measured and tokens are counted here, since the process of a patched kernel must not time
itself.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from patcher.ab import arm_protocol as say
from patcher.ab.receipt_counts import called_between
from patcher.bench import PatcherError, Record, Shape, relayed
from patcher.bench.ab.processes import ProcessMemory, TooLateError
from patcher.bench.ab.windows import Taken
from patcher.bench.engines.child_errors import ended, last_error
from patcher.bench.machine.environment import engine_environment
from patcher.bench.sandbox import Excerpt
from patcher.integrate import Patch, Receipt, patch_environment
from patcher.runs.stopping import GROUPS

LOAD_S = 900.0
REPLY_S = 600.0
CLOSE_S = 10.0
"""Time limit in seconds to close; the process is then killed, since its results are known."""
_LOG_LIMIT = 4 << 20
"""Bytes of its output that are kept where it ends by itself."""
_REPLY_LIMIT = 1 << 26

ReplyRecord = TypeVar("ReplyRecord", bound=Record)


def arm_environment(folder: Path, patches: tuple[Patch, ...]) -> dict[str, str]:
    """The environment variables that enable only these patches, in a separate store, without API
    keys.

    Raises:
        VerificationError: a bundle was changed, or does not match this environment.
        UsageError: two patches have the same patch point.
    """
    return engine_environment() | patch_environment(patches, folder / "home", folder / "receipts")


class ArmProcess:
    """One arm; see `patcher.bench.ab.processes.EngineProcess`."""

    def __init__(
        self,
        name: str,
        load: say.Load,
        patches: tuple[Patch, ...] = (),
        load_s: float = LOAD_S,
    ) -> None:
        """Start the process and wait until it is loaded, at most the given number of seconds.

        Raises:
            PatcherError: it does not load, or its patches are not those that were requested.
        """
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="patcher-arm-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        self._buffer = b""
        self._warm: tuple[Receipt, ...] = ()
        self.last_words, self._output = "", b""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "patcher.ab.arm"],
                env=arm_environment(folder, patches),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                bufsize=0,
            )
        GROUPS.add(self._process.pid)
        try:
            loaded = self.ask(load, say.Loaded, load_s)
            wanted = {patch.manifest.id: patch.digest for patch in patches}
            if loaded.patches != wanted:
                raise PatcherError(
                    f"the {name} process has {sorted(loaded.patches) or 'no patch'} installed, "
                    f"{sorted(wanted) or 'none'} was requested"
                )
        except BaseException:
            self.kill()
            raise
        self.vocab_size = loaded.vocab_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id, which is also its process group."""
        return self._process.pid

    def side(self, shape: Shape | None = None) -> PipeSide:
        return PipeSide(self, shape)

    def warm_up(self, seed: int, steps: int) -> None:
        self.ask(say.Generate(seed=seed, steps=steps), say.Generated)
        self._warm = self.receipts()

    def in_steps(self, seed: int) -> list[float]:
        return self.ask(say.InSteps(seed=seed), say.StepSeconds).seconds

    def memory(self) -> ProcessMemory:
        found = self.ask(say.AskMemory(), say.MemoryUse)
        return ProcessMemory(found.held, found.peak, found.free)

    def delay(self, seconds: float) -> None:
        """Delay each of its decode steps by this time from now on."""
        self.ask(say.PlantDelay(seconds=seconds), say.Done)

    def receipts(self) -> tuple[Receipt, ...]:
        return self.ask(say.AskReceipts(), say.Receipts).receipts

    def called_since_warm(self) -> dict[str, Receipt]:
        """Receipts by patch id. A starting engine calls kernels at shapes that it never serves: it
        tries the largest batch, and captures a graph for each size.
        """
        return called_between(self._warm, self.receipts())

    def ask(
        self, command: Record, kind: type[ReplyRecord], timeout_s: float = REPLY_S
    ) -> ReplyRecord:
        """Send a command and wait for its reply.

        Raises:
            PatcherError: the process reported an error, or it died, hung, or sent an invalid reply;
                then it is killed.
        """
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            raise PatcherError(f"the {self.name} process has ended: {self.last_words}")
        try:
            data = command.model_dump_json().encode() + b"\n"
            while data:
                data = data[stdin.write(data) or 0 :]
        except BrokenPipeError:
            raise self._died() from None
        try:
            line = self._line(time.monotonic() + timeout_s)
        except KeyboardInterrupt:
            self.kill()  # whatever it is doing
            raise
        try:
            reply = say.REPLY.validate_json(line)
        except ValidationError as error:
            self.kill()
            raise PatcherError(
                f"the {self.name} process gave no valid reply: {str(error).splitlines()[0]}"
            ) from error
        if isinstance(reply, say.Failed):
            raise relayed(reply.error)
        if not isinstance(reply, kind):
            self.kill()
            raise PatcherError(f"the {self.name} process sent an unexpected reply: {reply.kind!r}")
        return reply

    def close(self) -> None:
        """Close the process and kill its process group; idempotent."""
        if self._process.returncode is None:
            # its results are known, so it is killed if it does not close
            with suppress(PatcherError):
                self.ask(say.Close(), say.Done, CLOSE_S)
            self.kill(CLOSE_S)

    def kill(self, patience_s: float = 0.0) -> None:
        """Kill its process group, with any children left; it may end by itself first."""
        if self._process.returncode is not None:
            return
        # its process id is not reused until someone waits for it
        deadline = time.monotonic() + patience_s
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self._process.pid, ended) is None:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        with suppress(ProcessLookupError):  # the group has no process left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        GROUPS.discard(self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._output = bytes(Excerpt.of_file(self._log, _LOG_LIMIT))
        self.last_words = last_error(self._output)
        self._folder.cleanup()

    def _line(self, deadline: float) -> bytes:
        stdout: Any = self._process.stdout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or len(self._buffer) > _REPLY_LIMIT:
                self.kill()
                said = f"the {self.name} process does not answer: {self.last_words}"
                raise TooLateError(said) if left <= 0 else PatcherError(said)
            ready, _, _ = select.select([stdout], [], [], left)
            if ready:
                chunk = os.read(stdout.fileno(), 1 << 16)
                if not chunk:
                    raise self._died()
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _died(self) -> PatcherError:
        self.kill(CLOSE_S)
        code = self._process.returncode
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return ended(f"the {self.name} process ended ({how})", self._output)


class PipeSide:
    """A side whose engine has a separate process; see `patcher.bench.ab.windows.Side`."""

    def __init__(self, process: ArmProcess, shape: Shape | None = None) -> None:
        self._process, self._shape = process, shape
        self._prefill_s = 0.0
        self._turns: list[float] = []

    def prefill(self, seed: int) -> None:
        self._turns = []
        self._prefill_s = self._timed(say.Prefill(seed=seed, shape=self._shape))

    def turn(self, steps: int) -> None:
        self._timed(say.Decode(steps=1))
        self._turns.append(self._timed(say.Decode(steps=steps - 1)))
        # an engine that runs ahead of its client must not run during the other side's turn
        self._timed(say.Settle())

    def end(self) -> Taken:
        ended = self._process.ask(say.End(), say.Ended)
        turns = tuple(self._turns)
        return Taken(ended.tokens, sum(turns), self._prefill_s, ended.kernel_calls, turns)

    def _timed(self, command: Record) -> float:
        begin = time.perf_counter()
        self._process.ask(command, say.Done)
        return time.perf_counter() - begin
