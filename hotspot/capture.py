"""Profile a workload: under nsys on a GPU, else with torch.profiler.

What ranks a recording needs numpy. It is imported when it is used, so that this package can be
imported without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patcher.bench import PatcherError, Workload, relayed
from patcher.bench.engines.architecture import must_fit_cpu
from patcher.bench.engines.child_errors import child_failed
from patcher.bench.machine.environment import engine_environment
from patcher.bench.sandbox import communicate
from patcher.bench.sandbox.die_with_parent import die_with_parent
from patcher.hotspot.nsys import export_sqlite, find_nsys, missing_libraries, nsys_environment
from patcher.hotspot.profile import Profile, ProfileWarning
from patcher.hotspot.roofline import Places, ServedModel

STEPS = 16
"""Decode steps in the capture range."""
TIMEOUT_S = 1800
"""Seconds after which the profiled program is killed."""
ERROR = "patcher-error: "
"""Prefix of the line in which the profiled program reports a `PatcherError`."""
NSYS_OPTIONS = (
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--force-overwrite=true",
)
"""Options of `nsys profile`. Without `--sample=none` a two-second program writes gigabytes.
Without node-level tracing, CUDA graphs hide the kernels of decode."""


def capture(
    workload: Workload,
    folder: Path,
    progress: Callable[[str], None] | None = None,
    steps: int = STEPS,
    variables: Mapping[str, str] | None = None,
    first: str = "",
    places: Places | None = None,
) -> Profile:
    """Profile steady decode of a workload in a separate process.

    nsys profiles a GPU if it is installed and complete; otherwise torch.profiler does.

    Args:
        workload: the model, engine, device and batch to profile.
        folder: where the profile's files stay (`decode.nsys-rep`, `decode.sqlite`).
        progress: called with the name of each stage.
        steps: decode steps to record.
        variables: extra environment variables for that process.
        first: a Python statement that the process runs first.
        places: asked where an op can be put in the model.

    Returns:
        The ranked profile.

    Raises:
        MissingError: the model fits no device of this machine.
        UsageError: the model cannot be loaded, or it needs more memory than there is.
        PatcherError: the profiled program failed; the hint names the log file.
    """
    say = progress or (lambda stage: None)
    require_room(workload)
    program = _Program(workload, steps, variables or {}, first, places)
    if workload.device == "cuda":
        nsys = find_nsys()
        missing = missing_libraries(nsys) if nsys else []
        if nsys is not None and not missing:
            return _under_nsys(nsys, program, folder, say)
        why = f"nsys lacks {', '.join(missing)}" if missing else "nsys was not found"
        message = f"{why}: kernels were traced with torch.profiler; see `patcher doctor`"
        warning = ProfileWarning(kind="fallback", message=message)
        return _with_torch(program, folder, say, (warning,))
    message = "no GPU: the rows are PyTorch operators on the CPU by self time, not kernels"
    warning = ProfileWarning(kind="cpu_operators", message=message)
    return _with_torch(program, folder, say, (warning,))


def require_room(workload: Workload) -> None:
    """Refuse a model that fits no device of this machine.

    Raises:
        MissingError: it would run on the CPU and is too large.
    """
    if workload.device == "cpu":
        must_fit_cpu(workload.model)


@dataclass(frozen=True)
class _Program:
    """The program to profile."""

    workload: Workload
    steps: int
    variables: Mapping[str, str]
    first: str
    places: Places | None

    def command(self, out: Path, mode: str) -> list[str]:
        then = "from patcher.hotspot.target import main; raise SystemExit(main())"
        begin = ["-c", f"{self.first}; {then}"] if self.first else ["-m", "patcher.hotspot.target"]
        arguments = [self.workload.model_dump_json(), str(out), str(self.steps), mode]
        return [sys.executable, "-P", *begin, *arguments]

    @property
    def served(self) -> ServedModel:
        return ServedModel.of(self.workload.model, self.workload.batch, self.places)


def _under_nsys(
    nsys: Path,
    program: _Program,
    folder: Path,
    say: Callable[[str], None],
) -> Profile:
    from patcher.hotspot.rank import build_profile
    from patcher.hotspot.readers.sqlite import read_sqlite

    say("profile under nsys")
    report = folder / "decode.nsys-rep"
    command = [str(nsys), "profile", *NSYS_OPTIONS, "-o", str(report)]
    command += program.command(folder / "unused.json", "nsys")
    _run(command, {**nsys_environment(), **program.variables})
    if not report.is_file():
        raise PatcherError(
            "nsys ran the program and wrote no report", "see `patcher doctor`: its importer fails"
        )
    say("export")
    recording = read_sqlite(export_sqlite(report, folder / "decode.sqlite"))
    return build_profile(recording, program.workload.model, served=program.served)


def _with_torch(
    program: _Program,
    folder: Path,
    say: Callable[[str], None],
    warnings: tuple[ProfileWarning, ...],
) -> Profile:
    from patcher.hotspot.rank import build_profile
    from patcher.hotspot.readers.kineto import read_kineto
    from patcher.hotspot.recording import Recording, SummaryRow

    say("profile with torch.profiler")
    out = folder / "torch.json"
    _run(program.command(out, "torch"), {**engine_environment(), **program.variables})
    workload, steps = program.workload, program.steps
    if workload.device == "cuda":
        traced = read_kineto(out)
        recording = replace(traced, warnings=(*traced.warnings, *warnings))
    else:
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
        summary = tuple(SummaryRow(**row) for row in rows)
        recording = Recording("torch.profiler", rows=summary, warnings=warnings)
    return build_profile(recording, workload.model, served=program.served, steps=steps)


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Run a command to its end; a timeout or an interrupt kills its whole process group."""
    process = subprocess.Popen(
        die_with_parent(*command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = communicate(process, TIMEOUT_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise PatcherError(
                f"profiling took over {TIMEOUT_S} s", "try a smaller batch"
            ) from None
        raise
    if (code := process.wait()) != 0:
        _raise_expected(str(output))
        raise child_failed("the profiled program", code, bytes(output))


def _raise_expected(output: str) -> None:
    """Raise the `PatcherError` that the program reported, if it reported one."""
    for line in reversed(output.splitlines()):
        if line.startswith(ERROR):
            raise relayed(json.loads(line.removeprefix(ERROR)))
