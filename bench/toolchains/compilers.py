"""Run a compiler in a sandbox, and cache its result by content."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from patcher.bench.machine.environment import cpu_instructions
from patcher.bench.ops.candidate import Candidate
from patcher.bench.records import Record
from patcher.bench.sandbox import (
    Excerpt,
    OverLimitError,
    communicate,
    demand_within,
    plain_file,
    strangers_folder,
)
from patcher.bench.sandbox.process_tree import Kinship
from patcher.bench.toolchains import Built, cache_root

BUILD_TIMEOUT_S = 120.0
"""Time limit in seconds of one candidate's build, unless `$PATCHER_BUILD_TIMEOUT_S` is set."""
LOG_LIMIT = 20_000
"""Most bytes of a build's messages that are kept: their head and their tail."""
MEMORY_BYTES = 16 << 30
"""Memory limit in bytes of a compiler with its children and its folder."""


class CompileJob(Record):
    """One command that builds one file of a candidate, in a folder that holds only `files`."""

    files: dict[str, str]
    """Text by file name, besides the candidate's own."""
    command: tuple[str, ...]
    product: str
    """The file that a successful command writes."""
    binding: str
    shown: str
    """The command as shown to people, without paths of this machine."""
    version: str
    """Version of the compiler, as far as the result depends on it."""
    built_for: tuple[str, ...] = ()
    """What else the result depends on and the command does not show, as versions of packages whose
    headers it includes: an upgrade keeps their paths."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the compiler, besides its search path."""


def compiled(candidate: Candidate, job: CompileJob, folder: Path) -> Built:
    """Run the job, or use its earlier result in `folder`."""
    told = sorted(job.files.items()), sorted(job.environment.items())
    parts = [candidate.digest, repr(told), job.version, cpu_instructions(), *job.command]
    parts.append(repr(job.built_for))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    done = folder / key
    if (done / job.product).is_file():
        return Built(
            language=candidate.language,
            path=done / job.product,
            binding=job.binding,
            command=job.shown,
            log=(done / "build.log").read_text(encoding="utf-8"),
            seconds=0.0,
            cached=True,
        )
    begin = time.monotonic()
    with strangers_folder(f"{key}.", folder) as work:
        for name, text in {**job.files, candidate.file_name: candidate.source}.items():
            (work / name).write_text(text, encoding="utf-8")
        code, log = run_compiler([*job.command], work, environment=job.environment)
        log = str(Excerpt(_without_paths(log, work).encode(), LOG_LIMIT))
        path = None
        product = plain_file(work / job.product) if code == 0 else None
        if product is not None:
            path = done / job.product
            if not done.exists():
                source = candidate.source.encode()  # not what a build left in its place
                made = {job.product: product, "build.log": log.encode()}
                _keep(done, {**made, candidate.file_name: source})
    return Built(
        language=candidate.language,
        path=path,
        binding=job.binding,
        command=job.shown,
        log=log if path else log or f"{job.command[0]} exited with {code} and no message",
        seconds=time.monotonic() - begin,
        cached=False,
    )


def _keep(done: Path, files: Mapping[str, bytes]) -> None:
    staged = Path(tempfile.mkdtemp(prefix="done.", dir=done.parent))
    for name, content in files.items():
        (staged / name).write_bytes(content)
    try:
        staged.rename(done)
    except OSError:  # another process finished the same build first
        shutil.rmtree(staged)


def run_compiler(
    command: list[str],
    folder: Path,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    device: str = "cpu",
) -> tuple[int, str]:
    """Run a compiler that can access only a folder of its own: no network, no GPU, no user files,
    no inherited environment. It is killed with its children.

    Args:
        command: the compiler with its arguments.
        folder: its folder.
        timeout_s: time limit in seconds; None: that of a build.
        environment: further environment variables.
        device: `cuda` lets it use the GPU, for a program that runs a stranger's kernel.

    Returns:
        Its exit code, and head and tail of what it printed.
    """
    # imported late: the sandbox hides the project, and so knows its packages
    from patcher.bench.sandbox import policy as sandbox

    if timeout_s is None:
        timeout_s = float(os.environ.get("PATCHER_BUILD_TIMEOUT_S", BUILD_TIMEOUT_S))
    also = [cache_root() / "pch", *(_prefix(name) for name in (command[0], "g++"))]
    also = [path for path in also if path.is_dir()]
    policy = sandbox.build_policy(folder, also=also)
    if device != "cpu":
        policy = sandbox.runner_policy(folder, device=device, also=also)
    process = subprocess.Popen(
        sandbox.command(policy, *command),
        cwd=folder,
        env={
            "PATH": search_path(),
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "LC_ALL": "C.UTF-8",
            **(environment or {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    kin = Kinship(process.pid)
    try:
        output, _ = communicate(
            process,
            timeout_s,
            watch=lambda: demand_within(MEMORY_BYTES, kin.descendants(), folder),
        )
    except subprocess.TimeoutExpired:
        return 124, f"the compiler was stopped after {timeout_s:g} s"
    except OverLimitError as error:
        return 124, f"the compiler was stopped: {error}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with what it left
        code = process.wait()
    return code, str(output)


def _prefix(compiler: str) -> Path:
    """Where a compiler is installed, and what it needs besides."""
    found = find(compiler)
    return Path(os.path.realpath(found)).parent.parent if found else Path()


def find(compiler: str) -> str | None:
    """Its path, if it is installed."""
    return shutil.which(compiler, path=search_path())


def search_path() -> str:
    """`PATH`, then the folders where CUDA and ROCm install their compilers."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", os.environ.get("ROCM_PATH")]
    path = os.environ.get("PATH", os.defpath)
    return os.pathsep.join([path, *(f"{home}/bin" for home in [*homes, "/opt/rocm"] if home)])


def version(compiler: str) -> str:
    """The output of `--version`."""
    result = subprocess.run(
        [compiler, "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": search_path()},
    )
    return result.stdout


def _without_paths(log: str, work: Path) -> str:
    """Compiler messages as feedback, without folders of this machine; file names stay."""
    return re.sub(r"(?:/[^\s:'\"]+)+/", "", log.replace(f"{work}/", ""))
