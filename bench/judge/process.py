"""The judge's side of a runner: send commands, read replies, freeze it while others are timed, kill
it with everything that it started.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from patcher.bench.errors import MissingError
from patcher.bench.judge.blob import Bytes, Layout
from patcher.bench.judge.memory_file import memory_file, read_from_start, write_at_start
from patcher.bench.judge.zygote import RunnerFailure, Zygote
from patcher.bench.machine.environment import ROOT
from patcher.bench.ops.op import user_op_folders
from patcher.bench.sandbox import policy as sandbox
from patcher.bench.sandbox import process_tree as tree
from patcher.bench.toolchains import Built, cache_root

START_S = 300.0
_REPLY_LIMIT = 1 << 24
_LOG_LIMIT = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Of one runner."""

    reply_s: float = 30.0
    """The longest that a command may take which has no limit of its own."""
    memory_bytes: int = 16 << 30
    """Of all its processes together."""


@dataclass(frozen=True)
class Left:
    """What calls left behind."""

    blocks: Bytes
    """[sets, returned_bytes]."""
    key: int
    digests: object
    """By that key: for each set, of each tensor that is watched. The runner's word: anything."""


class Runner:
    """One runner process. A context manager: leaving kills the whole tree and removes its folder.

    A trusted runner (baselines, the canary) is not confined, has the project on its path, and
    keeps its compile caches between runs; a candidate's gets none of that.
    """

    def __init__(self, zygote: Zygote, limits: Limits, trusted: bool) -> None:
        self._zygote, self.limits = zygote, limits
        self.folder = Path(tempfile.mkdtemp(prefix="patcher-run-"))
        self.confinement = "none: trusted code"
        self.no_late_writer = ""
        """Why no kernel can be put in front of a call that writes late; told before foreign code
        is loaded."""
        self.reply_s = 0.0
        self.lent: object = None
        """The stock that it was given last."""
        self._buffer = b""
        self._status: int | None = None
        self._files = [memory_file("inputs"), memory_file("outputs")]
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        inputs = os.open(f"/proc/self/fd/{self._files[0]}", os.O_RDONLY)
        policy = None
        if not trusted:
            policy = asdict(
                sandbox.runner_policy(
                    self.folder,
                    device=zygote.device,
                    also=[zygote.kit],
                    memory_bytes=limits.memory_bytes,
                )
            )
        root = str(ROOT)
        job = {
            "folder": str(self.folder),
            "log": str(self.folder / "log"),
            "environment": caches(self.folder, trusted),
            "policy": policy,
            "paths": [root] if trusted else [],
        }
        try:
            self._pid = zygote.fork(job, [commands, replies, inputs, self._files[1]])
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            for descriptor in (commands, replies, inputs):
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._status is None

    def start(self, threads: int | None = None, cpus: list[int] | None = None) -> None:
        """Confine it, import torch, wake the device; before any foreign code.

        Raises:
            MissingError: that does not work here.
        """
        device = self._zygote.device
        try:
            reply = self.command("start", START_S, device=device, threads=threads, cpus=cpus)
        except RunnerFailure as failure:
            said = f"{failure.message} {self.log_tail(300)}".strip()
            raise MissingError(
                f"a process to judge in does not start on {device}: {said}", "see `patcher doctor`"
            ) from failure
        self.no_late_writer = str(reply.get("no_late_writer", ""))
        if "confinement" in reply:
            self.confinement = str(reply["confinement"])

    def command(self, do: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its reply; `reply_s` is how long that took.

        Raises:
            RunnerFailure: it raised, crashed, exited, or gave no reply in time (then it is killed).
        """
        nonce = secrets.token_hex(8)
        line = json.dumps({"do": do, "nonce": nonce, **arguments}).encode() + b"\n"
        begin = time.perf_counter()
        try:
            _write_all(self._commands, line)
        except BrokenPipeError:
            raise RunnerFailure(self._how_it_ended()) from None
        reply = self._read_reply(timeout_s or self.limits.reply_s)
        self.reply_s = time.perf_counter() - begin
        if reply.get("nonce") != nonce:
            self._kill()
            raise RunnerFailure("a reply to another command came: a forged one", kind="Protocol")
        if reply.get("ok") is True:
            return reply
        raise RunnerFailure(
            _text(reply.get("error", "no reason given")),
            trace=_text(reply.get("trace", "")),
            kind=_text(reply.get("kind", "")),
            fatal=False,
        )

    def send(self, data: Bytes) -> None:
        """Bytes that its next command reads."""
        write_at_start(self._files[0], data)

    def left(self, do: str, plan: Layout, sets: int) -> Left:
        """What its last calls left, by `hand` or `collect`: the bytes that it had when it replied.

        Raises:
            RunnerFailure: they are others.
        """
        key = secrets.randbits(62)  # drawn now: no call knew it
        reply = self.command(do, key=key)
        data = np.empty(sets * plan.returned_bytes, dtype=np.uint8)
        read_from_start(self._files[1], data)
        if zlib.crc32(data.data) != reply["crc"]:
            raise RunnerFailure("its outputs changed after it handed them back", kind="Protocol")
        return Left(data.reshape(sets, plan.returned_bytes), key, reply["digests"])

    def freeze(self, frozen: bool) -> None:
        """Stop all of it, or let it go on: nothing of it runs while another is timed."""
        tree.send(self._pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def _read_reply(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._replies], [], [], min(max(left, 0), 0.2))
            if ready:
                chunk = os.read(self._replies, 1 << 16)
                if not chunk:
                    raise RunnerFailure(self._how_it_ended())
                self._buffer += chunk
                if len(self._buffer) > _REPLY_LIMIT:
                    self._kill()
                    raise RunnerFailure("it floods the reply channel", kind="Protocol")
            elif left <= 0:
                self._kill()
                message = f"no answer after {timeout_s:g} s: it hangs (killed)"
                raise RunnerFailure(message, kind="Timeout")
            else:
                self._watch()
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            self._kill()
            raise RunnerFailure(
                "its reply is not JSON: something else wrote to the channel", kind="Protocol"
            )
        return reply

    def _watch(self) -> None:
        """Memory of the whole tree, which no limit of one process bounds."""
        used = tree.memory_bytes(self._pid)
        if used > self.limits.memory_bytes:
            self._kill()
            raise RunnerFailure(
                f"it took {used / 2**30:.1f} GiB of memory, "
                f"{self.limits.memory_bytes / 2**30:.1f} allowed (killed)",
                kind="Memory",
            )

    def _how_it_ended(self) -> str:
        self._status = self._zygote.reap(self._pid)
        if self._status is None:
            self._kill()
            return "it closed the reply channel (killed)"
        code = os.waitstatus_to_exitcode(self._status)
        if code < 0:
            return f"crashed with {signal.Signals(-code).name}"
        return f"exited with code {code} before it answered"

    def _kill(self) -> None:
        if self._status is not None:
            return
        tree.kill(self._pid)
        self._status = self._zygote.reap(self._pid)

    def log_tail(self, limit: int = 2000) -> str:
        """What it printed last."""
        try:
            with (self.folder / "log").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(file.tell() - _LOG_LIMIT, 0))
                return file.read().decode("utf-8", "replace")[-limit:]
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        self._kill()
        for descriptor in (self._commands, self._replies, *self._files):
            os.close(descriptor)
        shutil.rmtree(self.folder, ignore_errors=True)


def placed(built: Built, folder: Path) -> Path:
    """A copy of what was built, where a sandbox that sees the folder can read it."""
    assert built.path is not None
    target = folder / built.path.name
    shutil.copyfile(built.path, target)
    target.chmod(0o755)
    return target


def _text(said: object) -> str:
    """What the runner says, as text that can be written anywhere."""
    return str(said)[:4000].encode("utf-8", "replace").decode()


def caches(folder: Path, trusted: bool) -> dict[str, str]:
    """Home and caches of a runner: a folder of its own, or one that trusted runs share."""
    caches = cache_root() / "baselines" if trusted else folder / "cache"
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
        "TVM_FFI_CACHE_DIR": str(caches / "tvm-ffi"),
        "PATCHER_CACHE": str(caches),
        **({"PATCHER_OPS": user_op_folders()} if trusted else {}),
    }


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
