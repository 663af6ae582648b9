"""The judge's side of a runner process: commands, replies, freezing and killing."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import signal
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from patcher.bench.errors import MissingError
from patcher.bench.judge.blob import Bytes, Layout
from patcher.bench.judge.gpu_sets import GpuSets
from patcher.bench.judge.memory_file import (
    CAPACITY,
    SETS_CAPACITY,
    Left,
    SharedSets,
    memory_file,
    read_from_start,
    write_at_start,
)
from patcher.bench.judge.zygote import (
    ForgedReplyError,
    Limits,
    RunnerFailure,
    Zygote,
    caches,
    how_it_ended,
    text_of,
)
from patcher.bench.machine.environment import ROOT
from patcher.bench.records import parse_json
from patcher.bench.sandbox import WATCH_S, OverLimitError, demand_within, remove_folder
from patcher.bench.sandbox import policy as sandbox
from patcher.bench.sandbox import process_tree as tree

START_S = 300.0
_REPLY_LIMIT = 1 << 24
_LOG_LIMIT = 1 << 16


@dataclass(frozen=True)
class Spent:
    """What one command took, from the moment that its process could run until it was stopped."""

    cpu_us: float
    """CPU time in microseconds of all threads, by the kernel's count."""
    wall_us: float
    """Microseconds by the judge's clock until the reply."""
    waited_us: float
    """Microseconds of these in which the main thread, or the judge, had to wait for a CPU."""
    lost: int = 0
    """Processes that were there before and ended, so that nobody knows what they used."""

    @property
    def idle_us(self) -> float:
        """Microseconds in which nobody worked and nobody had to wait for a CPU."""
        return self.wall_us - self.waited_us - self.cpu_us


class Runner:
    """One runner process. A context manager: leaving it kills the process tree and removes its
    folder.

    A trusted runner (baselines, the canary) is not confined, has the project on its path, and keeps
    its compile caches between runs. The runner of a candidate has none of these.
    """

    def __init__(self, zygote: Zygote, limits: Limits, trusted: bool) -> None:
        self._zygote, self.limits = zygote, limits
        self.folder = Path(tempfile.mkdtemp(prefix="patcher-run-"))
        self.confinement = "none: trusted code"
        self.no_late_writer = ""
        """Why no late-writing kernel can precede a call; reported before foreign code is loaded."""
        self.cpus: list[int] | None = None
        """The CPUs to which the process was pinned; None: no pinning."""
        self.reply_s = 0.0
        """Seconds that the last reply took."""
        self.main = 0
        """Process id of the runner inside what confines it."""
        self._watched = 0.0
        self._stopped: set[int] = set()
        """Ids of its processes while they are stopped."""
        self.lent: object = None
        """Random pool that the runner was given last."""
        self._buffer = b""
        self._status: int | None = None
        # on a CPU the second one holds the sets, and nothing is sent by the first
        room = (mmap.PAGESIZE, SETS_CAPACITY) if zygote.device == "cpu" else (CAPACITY, CAPACITY)
        inputs, outputs = memory_file("inputs", room[0]), memory_file("outputs", room[1])
        self._files = [inputs, outputs]
        # opened before any foreign code, which can put another file, a link or a pipe in its place
        made = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._log = os.open(self.folder / "log", made, 0o600)
        self.gpu_sets = GpuSets(inputs, outputs, zygote.device == "cuda")
        """On CUDA: the buffer sets of commands."""
        self.sets = SharedSets(outputs)
        """On a CPU: the buffer sets."""
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        readable = os.open(f"/proc/self/fd/{inputs}", os.O_RDONLY)
        policy, most = None, limits.memory_bytes
        if not trusted:
            policy = sandbox.runner_policy(
                self.folder, device=zygote.device, also=[zygote.kit], memory_bytes=most
            )
        job = {
            "device_bytes": self.gpu_sets.shared_bytes,
            "folder": str(self.folder),
            "log": str(self.folder / "log"),
            "environment": caches(self.folder, trusted),
            "policy": policy and asdict(policy),
            "paths": [str(ROOT)] if trusted else [],
        }
        try:
            given = [commands, replies, readable, outputs, *self.gpu_sets.descriptors]
            self._pid = zygote.fork(job, given)
        except BaseException:
            self._give_back()
            raise
        finally:
            for descriptor in (commands, replies, readable):
                os.close(descriptor)
        self._kin = tree.Kinship(self._pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._status is None

    def start(
        self, threads: int | None = None, cpus: list[int] | None = None, portable: bool = False
    ) -> None:
        """Confine the process, import torch and initialise the device, before any foreign code.

        Args:
            threads: CPU threads of torch; None: its default.
            cpus: CPUs to pin the process to; None: no pinning.
            portable: CUDA: whether captured calls are to be handed over.

        Raises:
            MissingError: this machine cannot do that.
        """
        device = self._zygote.device
        told: dict[str, Any] = {"device": device, "threads": threads, "portable": portable}
        try:
            told["environment"] = self.limits.compilers(cpus)
            reply = self.command("start", START_S, **told)
        except RunnerFailure as failure:
            reason = f"{failure.message} {self.log_tail(300)}".strip()
            raise MissingError(
                f"the runner process does not start on {device}: {reason}", "see `patcher doctor`"
            ) from failure
        self.cpus, self.main = cpus, tree.innermost(self._pid)
        if cpus is not None:
            tree.pin(tree.descendants(self._pid), cpus)  # the processes that confine it, too
        if "unshared" in reply:
            self.gpu_sets.unshare(str(reply["unshared"]))
        self.no_late_writer = str(reply.get("no_late_writer", ""))
        if "confinement" in reply:
            self.confinement = str(reply["confinement"])

    def command(self, do: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its reply. `reply_s` then holds the elapsed seconds.

        Args:
            do: name of the command.
            timeout_s: time limit in seconds; None: `Limits.reply_s`.
            arguments: arguments of the command, as JSON.

        Raises:
            RunnerFailure: the command raised, or the process crashed, exited or did not reply in
                time (then it is killed).
        """
        if not self._stopped:
            self._watch(WATCH_S)  # commands may be too short for a look at it
        nonce = secrets.token_hex(8)
        line = json.dumps({"do": do, "nonce": nonce, **arguments}).encode() + b"\n"
        begin = time.perf_counter()
        try:
            _write_all(self._commands, line)
        except BrokenPipeError:
            raise RunnerFailure(self._exit_reason()) from None
        tree.signal_all(self._stopped, signal.SIGCONT)
        self._stopped = set()
        reply = self._read_reply(timeout_s or self.limits.reply_s)
        self.reply_s = time.perf_counter() - begin
        if reply.get("nonce") != nonce:
            self.kill()
            raise ForgedReplyError("a reply to another command came: a forged one")
        if reply.get("ok") is True:
            return reply
        raise RunnerFailure(
            text_of(reply.get("error", "no reason given")),
            trace=text_of(reply.get("trace", "")),
            kind=text_of(reply.get("kind", "")),
            fatal=False,
        )

    def send(self, data: Bytes) -> None:
        """Write the bytes that the next command reads from the file."""
        write_at_start(self._files[0], data)

    def handed(self, size: int) -> Bytes:
        """The first bytes of what the last command wrote to the file."""
        read_from_start(self._files[1], data := torch.empty(size, dtype=torch.uint8))
        return data

    def left(self, do: str, plan: Layout, sets: int) -> Left:
        """On CUDA: read the buffers after the last calls, as they were when the runner replied.

        Args:
            do: the command to send, `hand` or `collect`.
            plan: layout of a set.
            sets: number of sets.

        Raises:
            RunnerFailure: the bytes changed after the reply.
        """
        key = secrets.randbits(62)  # drawn now, so that no call could know it
        reply = self.command(do, key=key)
        data, found = self.gpu_sets.given(sets, plan.returned_bytes, key)
        if found != reply.get("sum"):
            raise ForgedReplyError("its outputs changed after it handed them back")
        return Left(data, key, reply.get("digests"))

    def stop(self) -> set[int]:
        """Stop all its processes until the next command; returns their ids."""
        if not self._stopped:
            try:
                self._stopped = tree.stop(self._pid)
            except TimeoutError as slow:
                self.kill()
                raise RunnerFailure(f"{slow} (killed)", kind="Timeout") from None
        return self._stopped

    def clocked(
        self, do: str, timeout_s: float | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], Spent]:
        """Send one command to the stopped process, stop it at the reply, and read its clocks.

        Raises:
            RunnerFailure: as for `command`.
        """
        before = tree.CpuTime.of(self.stop(), self.main)
        own = tree.waited_s(threading.get_native_id())
        reply = self.command(do, timeout_s, **arguments)
        own = tree.waited_s(threading.get_native_id()) - own
        now = tree.CpuTime.of(self.stop(), self.main)
        self._watch(WATCH_S)  # not while its clock runs
        (used, waited), lost = now.since(before), len(now.lost(before))
        return reply, Spent(used * 1e6, self.reply_s * 1e6, (waited + own) * 1e6, lost)

    def strayed_cpus(self) -> list[int]:
        """CPUs on which a thread may run, besides those it was pinned to; it must be stopped."""
        return [] if self.cpus is None else sorted(tree.cpus_allowed(self._stopped) - {*self.cpus})

    def _read_reply(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0:  # also of who sends a byte now and then
                self.kill()
                message = f"no answer after {timeout_s:g} s: it hangs (killed)"
                raise RunnerFailure(message, kind="Timeout")
            if select.select([self._replies], [], [], min(remaining, WATCH_S))[0]:
                chunk = os.read(self._replies, 1 << 16)
                if not chunk:
                    raise RunnerFailure(self._exit_reason())
                self._buffer += chunk
                if len(self._buffer) > _REPLY_LIMIT:
                    self.kill()
                    raise ForgedReplyError("it floods the reply channel")
            if b"\n" not in self._buffer:
                self._watch(WATCH_S)
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            reply = parse_json(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            self.kill()
            raise ForgedReplyError("its reply is not JSON: something else wrote to the channel")
        return reply

    def _watch(self, every_s: float = 0.0) -> None:
        """Enforce the memory limit over the whole process tree, if that is due."""
        if not self.alive or time.monotonic() - self._watched < every_s:
            return
        self._watched = time.monotonic()
        try:
            pids = self._kin.descendants()
            demand_within(self.limits.memory_bytes, pids, self.folder, self._files)
        except OverLimitError as error:
            self.kill()
            raise RunnerFailure(f"{error} (killed)", kind="Memory") from None

    def _exit_reason(self) -> str:
        self._status = self._zygote.reap(self._pid)
        if self._status is None:
            self.kill()
            return "it closed the reply channel (killed)"
        return how_it_ended(self._status)

    def kill(self) -> None:
        """End all its processes."""
        if self._status is not None:
            return
        tree.kill(self._pid)
        self._status = self._zygote.reap(self._pid)

    def log_tail(self, limit: int = 2000) -> str:
        """The last characters that the process printed."""
        begin = max(os.fstat(self._log).st_size - _LOG_LIMIT, 0)
        return os.pread(self._log, _LOG_LIMIT, begin).decode("utf-8", "replace")[-limit:]

    def close(self) -> None:
        """Kill the process tree and remove the folder."""
        try:
            self.kill()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self.gpu_sets.close()
        for descriptor in (self._commands, self._replies, self._log, *self._files):
            os.close(descriptor)
        remove_folder(self.folder)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
