"""Run a candidate once under an NVIDIA tool (`runner/once.py`), in its own sandbox.

The tool runs inside the sandbox, since it communicates with the process through local sockets and
shared memory, which two namespaces would separate. The candidate could have written the tool's
output, so it is untrusted and read as text of bounded length.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patcher.bench.judge import cases as cases_
from patcher.bench.judge import zygote
from patcher.bench.judge.blob import Bytes, Layout
from patcher.bench.judge.cases import Case
from patcher.bench.judge.sets import packed
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import Op
from patcher.bench.records import parse_json
from patcher.bench.sandbox import (
    OverLimitError,
    communicate,
    demand_within,
    plain_file,
    strangers_folder,
)
from patcher.bench.sandbox import policy as sandbox
from patcher.bench.sandbox import process_tree as tree
from patcher.bench.toolchains import Built

LIMIT_S = 180.0
"""Time limit of a run in seconds; a memory checker slows a kernel down 10 to 100 times."""
_MOST_BYTES = 64 << 20
_FILE_BYTES = 1 << 30
_LOCAL = {
    # the sandbox allows no other sockets
    "NV_COMPUTE_SANITIZER_LOCAL_CONNECTION_OVERRIDE": "uds",
    "NV_COMPUTE_PROFILER_LOCAL_CONNECTION_OVERRIDE": "uds",
    # read sections and rules from the installation, not from the home folder
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
    """Arguments of one call."""

    plan: Layout
    """Layout of the tensors in `data`."""
    scalars: tuple[float, ...]
    data: Bytes
    """Inputs as packed bytes, uint8."""
    blank: tuple[str, ...]
    """Names of the tensors that the op only writes."""

    @classmethod
    def of(cls, op: Op, point: Point, seed: int) -> Call:
        """A call at a point of the op with seeded inputs."""
        scalars = op.served_scalars
        inputs = cases_.make_inputs(op, Case(point, "normal", seed, scalars), "cpu")
        plan = cases_.tensors_of(op, point, sparing=False)
        blank = tuple(tensor.name for tensor in op.contract.tensors if tensor.access == "write")
        return cls(plan, scalars, packed(op, plan, [inputs])[0], blank)


@dataclass(frozen=True)
class ToolJob:
    """What to run under the tool. Without `built` it only checks that the tool works."""

    device: str
    """`cpu` or `cuda`."""
    built: Built | None = None
    """Build of the candidate."""
    entry: str = ""
    """Name of the entry function."""
    calls: tuple[Call, ...] = ()
    """Calls to make."""
    warm: int = 0
    """Number of warm-up calls, which are not profiled."""
    repeat: int = 1
    """Number of times that each call is made."""


@dataclass(frozen=True)
class Ran:
    """Result of a run under a tool."""

    code: int | None
    """Exit code of the tool; None if it was stopped."""
    stopped: str
    """Why the run was stopped; empty if it was not."""
    log: str
    """Text of the tool's log file."""
    printed: str
    """Last part of what the tool and the candidate printed."""
    error: str
    """Error that the run reported; empty if it reported none."""
    silence: str
    """Message if the run reported no result: it crashed, exited, or never started."""

    @property
    def ok(self) -> bool:
        """Whether the run ended without an error."""
        return not (self.stopped or self.error or self.silence)

    def why(self) -> str:
        """What went wrong, in one line."""
        if self.stopped:
            return self.stopped
        error = re.search(r"^=+ ?(?:ERROR==|Error:) ?(.+)", self.log, re.MULTILINE)
        tool = error[1] if error else self.silence or f"exit code {self.code}"
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
    """Run a job under a tool that accepts `--log-file`.

    Args:
        tool: path of the tool.
        options: its command-line options.
        job: what to run.
        limit_s: time limit in seconds.
        memory_bytes: limit on host memory in bytes.
        environment: further environment variables.
    """
    with strangers_folder("patcher-once-") as top:
        top.chmod(0o755)
        kit, folder = top / "kit", top / "run"
        zygote.lay_out(kit)
        folder.mkdir()
        log, result = folder / "tool.log", folder / "told.json"
        policy = sandbox.runner_policy(
            folder,
            device=job.device,
            also=[kit, *installed_with(tool)],
            memory_bytes=memory_bytes,
            file_bytes=_FILE_BYTES,
            cpu_s=int(8 * limit_s),
            nested=True,
        )
        document = str(_write_job(job, folder, result))
        inner = [sys.executable, "-P", "-m", "patcher_kit.once", document]
        command = [str(tool), *options, "--log-file", str(log), *inner]
        with (top / "printed").open("wb") as printed:
            process_ = subprocess.Popen(
                sandbox.command(policy, *command),
                cwd=folder,
                env={
                    **zygote.environment(kit, job.device),
                    **zygote.caches(folder, trusted=False),
                    **_LOCAL,
                    **(environment or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                stopped = _wait(process_, limit_s, memory_bytes, folder)
            finally:
                tree.kill(process_.pid)
                process_.wait()
        answer = _answer(result)
        return Ran(
            code=None if stopped else process_.returncode,
            stopped=stopped,
            log=_text(log),
            printed=_text(top / "printed")[-4000:],
            error=str(answer.get("error", ""))[:2000],
            silence="" if "ok" in answer else "it ended without a word",
        )


def installed_with(tool: Path) -> list[Path]:
    """Folders of the installation that a tool needs to read, never the user's home."""
    home, folders = Path.home().resolve(), []
    for path in dict.fromkeys((tool.absolute(), tool.resolve())):
        roots = [path.parent.parent, path.parent] if path.parent.name == "bin" else [path.parent]
        fitting = (root for root in roots if not home.is_relative_to(root.resolve()))
        folders.append(next(fitting, path))
    return folders


def library_of(kernel: str) -> str | None:
    """The library that a kernel belongs to by its name, or None for a candidate's own kernel."""
    return next((name for name, pattern in _KNOWN if pattern.match(kernel)), None)


def without_paths(text: str) -> str:
    """Remove folders of this machine from a text; file names stay."""
    return re.sub(r"(?<![\w.])/(?:[^\s:'\"/]+/)+", "", text)


def _write_job(job: ToolJob, folder: Path, result: Path) -> Path:
    """Write inputs and job description for `runner/once.py`; return the description's path."""
    calls: list[dict[str, Any]] = []
    at, path = 0, None
    with (folder / "inputs").open("wb") as file:
        for call in job.calls:
            slots = [slot.model_dump() for slot in call.plan.slots]
            calls.append(
                {"slots": slots, "scalars": call.scalars, "blank": call.blank, "at": at},
            )
            file.write(call.data.numpy().data)
            at += call.data.nbytes
    if job.built is not None:
        path = zygote.placed(job.built, folder)
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
        "told": str(result),
    }
    place.write_text(json.dumps(document), encoding="utf-8")
    return place


def _wait(running: subprocess.Popen[bytes], limit_s: float, memory_bytes: int, folder: Path) -> str:
    """Wait for the end; return why the process must be stopped, or an empty string."""
    kin = tree.Kinship(running.pid)
    try:
        communicate(
            running,
            limit_s,
            watch=lambda: demand_within(memory_bytes, kin.descendants(), folder),
        )
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:g} s"
    except OverLimitError as error:
        return str(error)
    return ""


def _answer(result: Path) -> dict[str, Any]:
    try:
        answer = parse_json(_text(result))
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _text(path: Path) -> str:
    """Text of a file that the candidate could have written; empty if it is no plain file."""
    return (plain_file(path, _MOST_BYTES) or b"").decode("utf-8", "replace")
