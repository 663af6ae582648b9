"""The process that runs a kernel. It knows no expected value, no seed and no key.

`python -P -m patcher_kit.runner SOCKET MODULES` is a trusted *zygote*. It imports torch once and
forks a runner for each job, which comes with descriptors: commands, replies, inputs, outputs and,
on CUDA, device memory. The runner confines itself, then reads commands as JSON lines and answers
each with its nonce. Tensors travel as bytes. Its reports of time or success are never trusted
alone: the judge has the bytes and its own clock. The kernel's output goes to a log. It imports
nothing of the project outside this folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

from . import confine
from .session import Session

_PDEATHSIG, _NO_NEW_PRIVILEGES, _SUBREAPER = 1, 38, 36


def zygote(control: socket.socket, modules: list[str]) -> None:
    """Fork runners until the judge closes the socket."""
    for name in modules:
        __import__(name)
    control.send(b"{}")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 5)
        if not message:
            return
        job = json.loads(message)
        if job["do"] == "reap":
            ended, status = os.waitpid(job["pid"], os.WNOHANG)
            answer = {"number": job["number"], "status": status if ended else None}
            control.send(json.dumps(answer).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            try:
                runner(job, descriptors)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(70)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps({"number": job["number"], "pid": pid}).encode())


def runner(job: dict[str, Any], descriptors: list[int]) -> None:
    """Run one job, from the fork to the last command."""
    os.setsid()
    libc = ctypes.CDLL(None)
    libc.prctl(_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_SUBREAPER, 1)  # daemons stay in its process tree
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.environ.update(job["environment"])
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(job["folder"])
    status: dict[str, Any] = {}
    if job["policy"] is not None:
        policy = confine.Policy(**job["policy"])
        confinement = confine.confine(policy, keep=(0, 1, 2, *descriptors))
        status = {"confinement": confinement.describe()}
    sys.path[:0] = job["paths"]
    commands, replies = os.fdopen(descriptors[0], "r"), descriptors[1]
    device = (descriptors[4], job["device_bytes"]) if job["device_bytes"] else None
    session = Session(descriptors[2], descriptors[3], device, status)
    for line in commands:
        command = json.loads(line)
        nonce = command.pop("nonce")
        try:
            answer = getattr(session, f"do_{command.pop('do')}")(**command)
            reply = {"nonce": nonce, "ok": True, **answer}
        except Exception as error:
            # the candidate's failure is an outcome: report it and continue
            reply = {
                "nonce": nonce,
                "ok": False,
                "kind": type(error).__name__,
                "error": f"{type(error).__name__}: {error}"[:4000],
                "trace": "".join(traceback.format_exception(error)[-4:])[-4000:],
            }
        os.write(replies, json.dumps(reply).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    zygote(socket.socket(fileno=int(sys.argv[1])), sys.argv[2].split(","))
