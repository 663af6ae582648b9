"""NVIDIA's tools around one run of a candidate (`kit/once.py`), in a sandbox of its own.

The tool runs inside the sandbox too: it talks to what it watches through local sockets and shared
memory, which two namespaces would cut. So what it writes is no more to be trusted than what the
candidate could have written; it is read as text of bounded length.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patcher.bench.judge import cases as cases_
from patcher.bench.judge import process, zygote
from patcher.bench.judge.blob import Bytes, Layout
from patcher.bench.judge.cases import Case
from patcher.bench.judge.sets import packed
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import Op
from patcher.bench.sandbox import policy as sandbox
from patcher.bench.sandbox import process_tree as tree
from patcher.bench.toolchains import Built

LIMIT_S = 180.0
"""Of one run; a memory checker takes 10 to 100 times as long as the kernel alone."""
_MOST_BYTES = 64 << 20
_FILE_BYTES = 1 << 30
_LOCAL = {
    # the sandbox has no other sockets
    "NV_COMPUTE_SANITIZER_LOCAL_CONNECTION_OVERRIDE": "uds",
    "NV_COMPUTE_PROFILER_LOCAL_CONNECTION_OVERRIDE": "uds",
    # sections and rules come from the installation, not from a home
    "NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1",
}
_LIBRARIES = (
    ("PyTorch", r"at::|at_cuda_detail::"),
    ("cuBLAS", r"nvjet_|cublas|cutlass_\d+_|cutlass::Kernel2<cutlass_\d+_|gemmk1_kernel|gemv"),
    ("cuBLAS or cuDNN", r"(ampere|volta|turing|maxwell|hopper|sm\d\d+)_\w*(gemm|xmma|conv|cudnn)"),
    ("cuDNN", r"cudnn"),
    ("NCCL", r"ncclDevKernel|ncclKernel"),
    ("flashinfer", r"flashinfer::"),
    ("vLLM", r"vllm::"),
)
_KNOWN = tuple((name, re.compile(rf"(?:void )?(?:{start})")) for name, start in _LIBRARIES)


@dataclass(frozen=True)
class Call:
    """What one call is given; `blank`: tensors that are only written."""

    plan: Layout
    scalars: tuple[float, ...]
    data: Bytes
    blank: tuple[str, ...]

    @classmethod
    def of(cls, op: Op, point: Point, seed: int) -> Call:
        scalars = tuple(scalar.value for scalar in op.contract.scalars)
        inputs = cases_.make_inputs(op, Case(point, "normal", seed, scalars), "cpu")
        plan = cases_.tensors_of(op, point, sparing=False)
        blank = tuple(tensor.name for tensor in op.contract.tensors if tensor.access == "write")
        return cls(plan, scalars, packed(op, plan, [inputs])[0], blank)


@dataclass(frozen=True)
class ToolJob:
    """What is run below the tool. Without `built` no candidate: whether the tool works here."""

    device: str
    built: Built | None = None
    entry: str = ""
    calls: tuple[Call, ...] = ()
    warm: int = 0
    repeat: int = 1


@dataclass(frozen=True)
class Ran:
    code: int | None
    """Exit code of the tool; None: stopped, `stopped` says why."""
    stopped: str
    log: str
    """What the tool wrote to its log."""
    printed: str
    """What tool and candidate printed last."""
    error: str
    """What the run says went wrong; empty: nothing did, or it said nothing."""
    silence: str
    """That it said nothing, where it did not: it crashed, exited, or never began."""

    @property
    def ok(self) -> bool:
        """The run came to its end and nothing went wrong."""
        return not (self.stopped or self.error or self.silence)

    def why(self) -> str:
        """What went wrong, in one line."""
        if self.stopped:
            return self.stopped
        said = re.search(r"^=+ ?(?:ERROR==|Error:) ?(.+)", self.log, re.MULTILINE)
        tool = said[1] if said else self.silence or f"exit code {self.code}"
        return without_paths(self.error or tool)[:300]


def run(
    tool: Path,
    options: Sequence[str],
    job: ToolJob,
    *,
    limit_s: float = LIMIT_S,
    memory_bytes: int = 16 << 30,
    environment: Mapping[str, str] | None = None,
) -> Ran:
    """Run a job below a tool that takes `--log-file`."""
    with tempfile.TemporaryDirectory(prefix="patcher-once-", ignore_cleanup_errors=True) as name:
        top = Path(name)
        top.chmod(0o755)
        kit, folder = top / "kit", top / "run"
        zygote.lay_out(kit)
        folder.mkdir()
        log, told = folder / "tool.log", folder / "told.json"
        policy = sandbox.runner_policy(
            folder,
            device=job.device,
            also=[kit, *installed_with(tool)],
            memory_bytes=memory_bytes,
            file_bytes=_FILE_BYTES,
            cpu_s=int(8 * limit_s),
            nested=True,
        )
        inner = [sys.executable, "-P", "-m", "patcher_kit.once", str(_written(job, folder, told))]
        command = [str(tool), *options, "--log-file", str(log), *inner]
        with (top / "printed").open("wb") as printed:
            started = subprocess.Popen(
                sandbox.command(policy, *command),
                cwd=folder,
                env={
                    **zygote.environment(kit, job.device),
                    **process.caches(folder, trusted=False),
                    **_LOCAL,
                    **(environment or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                stopped = _wait(started, limit_s, memory_bytes)
            finally:
                tree.kill(started.pid)
                started.wait()
        answer = _answer(told)
        return Ran(
            code=None if stopped else started.returncode,
            stopped=stopped,
            log=_text(log),
            printed=_text(top / "printed")[-4000:],
            error=str(answer.get("error", ""))[:2000],
            silence="" if "ok" in answer else "it ended without a word",
        )


def installed_with(tool: Path) -> list[Path]:
    """What a tool needs to be seen of its installation, and never the user's home."""
    home, found = Path.home().resolve(), []
    for path in dict.fromkeys((tool.absolute(), tool.resolve())):
        roots = [path.parent.parent, path.parent] if path.parent.name == "bin" else [path.parent]
        fitting = (root for root in roots if not home.is_relative_to(root.resolve()))
        found.append(next(fitting, path))
    return found


def library_of(kernel: str) -> str | None:
    """The library whose kernel it is by its name, or None: the candidate's own."""
    return next((name for name, pattern in _KNOWN if pattern.match(kernel)), None)


def without_paths(text: str) -> str:
    """File names stay, folders of this machine go."""
    return re.sub(r"(?<![\w.])/(?:[^\s:'\"/]+/)+", "", text)


def _written(job: ToolJob, folder: Path, told: Path) -> Path:
    calls: list[dict[str, Any]] = []
    at, path = 0, None
    with (folder / "inputs").open("wb") as file:
        for call in job.calls:
            slots = [slot.model_dump() for slot in call.plan.slots]
            calls.append(
                {"slots": slots, "scalars": call.scalars, "blank": call.blank, "at": at},
            )
            file.write(call.data.tobytes())
            at += call.data.nbytes
    if job.built is not None:
        path = process.placed(job.built, folder)
    place = folder / "job.json"
    document = {
        "path": str(path) if path else None,
        "binding": job.built.binding if job.built else "",
        "entry": job.entry,
        "device": job.device,
        "data": str(folder / "inputs"),
        "calls": calls,
        "warm": job.warm,
        "repeat": job.repeat,
        "told": str(told),
    }
    place.write_text(json.dumps(document), encoding="utf-8")
    return place


def _wait(started: subprocess.Popen[bytes], limit_s: float, memory_bytes: int) -> str:
    """Why it had to be stopped, or nothing."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            started.wait(timeout=0.2)
            return ""
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                return f"not done after {limit_s:g} s"
        used = tree.memory_bytes(started.pid)
        if used > memory_bytes:
            return f"it took {used / 2**30:.1f} GiB of memory"


def _answer(told: Path) -> dict[str, Any]:
    try:
        answer = json.loads(_text(told))
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _text(path: Path) -> str:
    """A file that the candidate could have written: no link and no pipe is followed."""
    try:
        place = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""  # not there, or none that may be read
    with os.fdopen(place, "rb") as file:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return ""
        return file.read(_MOST_BYTES).decode("utf-8", "replace")
