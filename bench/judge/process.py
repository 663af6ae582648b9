"""The judge's side of a runner: start it confined, send commands, read replies, kill it as a
group.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from bench.toolchains import cache_root

SANDBOX = (
    "R0: own process, session and temporary home; scrubbed environment; "
    "limits on files, time and core dumps"
)
_REPLY_LIMIT = 1 << 24


class RunnerFailure(Exception):
    """The runner crashed, hung, exited, or its kernel raised. `fatal` when the process is gone."""

    def __init__(self, message: str, trace: str = "", kind: str = "", fatal: bool = True) -> None:
        super().__init__(message)
        self.message = message
        self.trace = trace
        self.kind = kind
        self.fatal = fatal


class Runner:
    """One runner process. A context manager: leaving kills the whole group and removes its
    folder.
    """

    def __init__(
        self, device: str, written: list[str], threads: int | None, trusted: bool, timeout_s: float
    ) -> None:
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="patcher-judge-", dir=shared))
        self.timeout_s = timeout_s
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bench.judge.runner", str(self.folder)],
            cwd=self.folder,
            env=_environment(self.folder, trusted, device),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit,
        )
        try:
            self.command("start", timeout_s=300, device=device, threads=threads, written=written)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def command(self, do: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its reply.

        Raises:
            RunnerFailure: it raised, crashed, exited, or gave no reply in time (then it is killed).
        """
        line = json.dumps({"do": do, **arguments}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RunnerFailure(self._how_it_ended()) from None
        reply = self._read_reply(timeout_s or self.timeout_s)
        if reply.get("ok") is True:
            return reply
        raise RunnerFailure(
            str(reply.get("error", "no reason given"))[:4000],
            trace=str(reply.get("trace", ""))[:4000],
            kind=str(reply.get("kind", "")),
            fatal=False,
        )

    def _read_reply(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([descriptor], [], [], max(left, 0))
            if not ready:
                self._kill()
                raise RunnerFailure(
                    f"no answer after {timeout_s:g} s: it hangs (killed)", kind="Timeout"
                )
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise RunnerFailure(self._how_it_ended())
            self._buffer += chunk
            if len(self._buffer) > _REPLY_LIMIT:
                self._kill()
                raise RunnerFailure("it floods the reply channel", kind="Protocol")
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            reply = json.loads(line)
        except ValueError:
            self._kill()
            raise RunnerFailure(
                "its reply is not JSON: something else wrote to the channel", kind="Protocol"
            ) from None
        if not isinstance(reply, dict):
            self._kill()
            raise RunnerFailure("its reply is not an object", kind="Protocol")
        return reply

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._kill()
            return "it closed the reply channel (killed)"
        if code < 0:
            return f"crashed with {signal.Signals(-code).name}"
        return f"exited with code {code} before it answered"

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def log_tail(self, limit: int = 2000) -> str:
        try:
            return (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-limit:]
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        shutil.rmtree(self.folder, ignore_errors=True)


def _environment(folder: Path, trusted: bool, device: str) -> dict[str, str]:
    """An allow-list: what Python and CUDA need, nothing that may hold a secret.

    A trusted runner (baselines) keeps its compile caches between runs; a candidate gets fresh ones.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    caches = cache_root() / "baselines" if trusted else folder / "cache"
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
        "PATCHER_CACHE": str(caches),
    }
    kept = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    environment |= {name: os.environ[name] for name in kept if name in os.environ}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, 4 << 30))
