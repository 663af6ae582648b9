"""The zygote: a trusted process that has imported torch and forks runners; and what each finds."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from patcher.bench.errors import MissingError
from patcher.bench.machine.environment import python_path
from patcher.bench.ops.op import user_op_folders
from patcher.bench.sandbox.die_with_parent import die_with_parent
from patcher.bench.toolchains import Built, cache_root

_SEE = "see `patcher doctor`"
_WORKERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Inductor reads it when it is first imported."""
WORKER_BYTES = 512 << 20
"""Memory in bytes that one compile worker of Inductor may take, which has imported torch and
triton. Each counts in full, though they share pages."""
MOST_WORKERS = 32
"""Inductor itself starts no more."""


@dataclass(frozen=True)
class Limits:
    """Limits of one runner."""

    reply_s: float = 30.0
    """Time limit in seconds of a command, unless the command sets its own."""
    memory_bytes: int = 16 << 30
    """Memory limit in bytes of all its processes together."""

    def compilers(self, cpus: Collection[int] | None = None) -> dict[str, str]:
        """Environment variables that bound how many compile workers Inductor starts: as many as
        there are CPUs, within half of the memory limit. The other half is for the process itself.
        A number that the user set in `TORCHINDUCTOR_COMPILE_THREADS` counts as it is.

        Args:
            cpus: the CPUs to which the process is pinned; None: those of this process.
        """
        usable = len(os.sched_getaffinity(0) if cpus is None else cpus)
        room = self.memory_bytes // 2 // WORKER_BYTES
        fitting = str(max(min(usable, room, MOST_WORKERS), 1))
        return {_WORKERS: os.environ.get(_WORKERS) or fitting}


class RunnerFailure(Exception):
    """A runner crashed, hung or exited, or its kernel raised.

    Args:
        message: what happened.
        trace: traceback in the runner.
        kind: name of the exception in the runner, which chose it; or `Timeout` or `Memory`.
        fatal: whether the process has ended.
    """

    def __init__(self, message: str, trace: str = "", kind: str = "", fatal: bool = True) -> None:
        super().__init__(message)
        self.message = message
        self.trace = trace
        self.kind = kind
        self.fatal = fatal


class ForgedReplyError(RunnerFailure):
    """A reply that the runner's own code cannot have sent."""


class Zygote:
    """A trusted process that has imported torch and forks runners. A context manager.

    Args:
        device: `cpu` or `cuda`.
        modules: modules to import besides torch.
    """

    def __init__(self, device: str, modules: tuple[str, ...] = ()) -> None:
        self.device = device
        self.kit = Path(tempfile.mkdtemp(prefix="patcher-kit-"))
        self.kit.chmod(0o755)
        lay_out(self.kit)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        names = ",".join(("torch", *modules))
        command = [sys.executable, "-P", "-m", "patcher_kit.runner", str(theirs.fileno()), names]
        self._numbers = itertools.count()
        with theirs:
            self._process = subprocess.Popen(
                die_with_parent(*command),
                cwd=self.kit,
                env=environment(self.kit, device),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._socket = ours
        self._socket.settimeout(300)
        try:
            if not self._socket.recv(16):
                raise MissingError(
                    f"the process that forks runners does not start: {self._stderr()}", _SEE
                )
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        shutil.rmtree(self.kit, ignore_errors=True)

    def fork(self, job: dict[str, Any], descriptors: list[int]) -> int:
        """Fork a runner and return its process id.

        Args:
            job: what the runner is to do, as JSON.
            descriptors: file descriptors to pass to it.
        """
        return int(self._answer({"do": "fork", **job}, descriptors)["pid"])

    def reap(self, pid: int, timeout_s: float = 10.0) -> int | None:
        """Wait status of a runner, or None if it still runs after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self._answer({"do": "reap", "pid": pid})["status"]
            if status is not None:
                return int(status)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)

    def _answer(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """The reply to this message; replies to interrupted earlier messages are skipped."""
        number = next(self._numbers)
        text = json.dumps({"number": number, **message}).encode()
        socket.send_fds(self._socket, [text], descriptors)
        while data := self._socket.recv(1 << 12):
            reply: dict[str, Any] = json.loads(data)
            if reply["number"] == number:
                return reply
        raise MissingError(f"the process that forks runners has ended: {self._stderr()}", _SEE)

    def _stderr(self) -> str:
        assert self._process.stderr is not None
        self._process.kill()
        return self._process.stderr.read().decode("utf-8", "replace")[-1500:]


def lay_out(kit: Path) -> None:
    """Copy the runner's code into a folder that the sandbox can read."""
    shutil.copytree(
        Path(__file__).parents[1] / "runner",
        kit / "patcher_kit",
        ignore=shutil.ignore_patterns("__pycache__"),
    )


def environment(kit: Path, device: str) -> dict[str, str]:
    """Environment of the zygote: variables that Python and CUDA need, none that may be secret."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(kit),
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",  # its thread pool would not survive the fork
    }
    devices = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    inherited = ("LD_LIBRARY_PATH", "CUDA_HOME", "OMP_NUM_THREADS", *devices)
    environment |= {name: os.environ[name] for name in inherited if name in os.environ}
    environment["PYTHONPATH"] = python_path(kit)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def placed(built: Built, folder: Path) -> Path:
    """Copy a build into a folder that the sandbox can read, before any foreign code: that may leave
    a link there, which would be followed outside of the sandbox.

    Raises:
        FileExistsError: something has its name already.
    """
    assert built.path is not None
    target = folder / built.path.name
    with target.open("xb") as file:
        file.write(built.path.read_bytes())
        os.fchmod(file.fileno(), 0o755)
    return target


def caches(folder: Path, trusted: bool) -> dict[str, str]:
    """Environment variables for the home and the caches of a runner.

    Trusted runners share one cache folder; others have one in `folder`.
    """
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


def how_it_ended(status: int) -> str:
    """Why a runner ended, by its wait status, in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code} before it answered"
    names = {each.value: each.name for each in signal.Signals}
    # most real-time signals have no name
    return f"crashed with {names.get(-code, f'signal {-code}')}"


def text_of(value: object) -> str:
    """A runner's untrusted value as text of bounded length that can be encoded as UTF-8."""
    return str(value)[:4000].encode("utf-8", "replace").decode()
