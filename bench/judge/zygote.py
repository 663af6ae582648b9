"""The trusted process that has imported torch and forks runners."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from patcher.bench.errors import MissingError
from patcher.bench.machine.environment import python_path
from patcher.bench.sandbox.die_with_parent import die_with_parent

_SEE = "see `patcher doctor`"


class RunnerFailure(Exception):
    """The runner crashed, hung, exited, or its kernel raised. `fatal` when the process is gone.

    `kind` is the exception's name in the runner, or `Timeout`, `Memory`, or `Protocol` where what
    came back cannot be what the runner's own code sent.
    """

    def __init__(self, message: str, trace: str = "", kind: str = "", fatal: bool = True) -> None:
        super().__init__(message)
        self.message = message
        self.trace = trace
        self.kind = kind
        self.fatal = fatal


class Zygote:
    """The trusted process that has imported torch and forks runners. A context manager."""

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
                    f"the process that starts runners does not start: {self._said()}", _SEE
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
        """A new runner's process id."""
        return int(self._answer({"do": "fork", **job}, descriptors)["pid"])

    def reap(self, pid: int, timeout_s: float = 10.0) -> int | None:
        """Wait status of a runner that ended, or None where it still runs."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self._answer({"do": "reap", "pid": pid})["status"]
            if status is not None:
                return int(status)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)

    def _answer(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """To this message: whoever was interrupted before has left his answer unread."""
        number = next(self._numbers)
        text = json.dumps({"number": number, **message}).encode()
        socket.send_fds(self._socket, [text], descriptors)
        while answer := self._socket.recv(1 << 12):
            found: dict[str, Any] = json.loads(answer)
            if found["number"] == number:
                return found
        raise MissingError(f"the process that starts runners is gone: {self._said()}", _SEE)

    def _said(self) -> str:
        assert self._process.stderr is not None
        self._process.kill()
        return self._process.stderr.read().decode("utf-8", "replace")[-1500:]


def lay_out(kit: Path) -> None:
    """The runner's own code, in a folder that a sandbox can see."""
    shutil.copytree(
        Path(__file__).parents[1] / "runner",
        kit / "patcher_kit",
        ignore=shutil.ignore_patterns("__pycache__"),
    )


def environment(kit: Path, device: str) -> dict[str, str]:
    """An allow-list: what Python and CUDA need, nothing that may hold a secret."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(kit),
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",  # its pool of threads would not survive the fork
    }
    kept = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    environment |= {name: os.environ[name] for name in kept if name in os.environ}
    environment["PYTHONPATH"] = python_path(kit)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
