"""Profile a workload: under nsys on a GPU, else with torch.profiler.

What ranks a recording needs numpy. It is imported when it is used, so that this package can be
imported without it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from patcher.bench import PatcherError, Workload, relayed
from patcher.bench.engines.architecture import must_fit_cpu
from patcher.bench.engines.child_errors import child_failed
from patcher.bench.machine.environment import engine_environment
from patcher.bench.sandbox import communicate
from patcher.bench.sandbox.die_with_parent import die_with_parent
from patcher.hotspot.nsys import export_sqlite, find_nsys, missing_libraries, nsys_environment
from patcher.hotspot.profile import Profile, ProfileWarning
from patcher.hotspot.roofline import Places, ServedModel

if TYPE_CHECKING:
    from patcher.hotspot.recording import Recording

STEPS = 16
"""Decode steps in the capture range."""
TIMEOUT_S = 1800
"""Seconds after which the profiled program is killed."""
ERROR = "patcher-error: "
"""Prefix of the line in which the profiled program reports a `PatcherError`."""
_RANGE_END = "--capture-range-end="
NSYS_OPTIONS = (
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",
    "--capture-range=cudaProfilerApi",
    f"{_RANGE_END}stop",
    "--force-overwrite=true",
)
"""Options of `nsys profile`. Without `--sample=none` a two-second program writes gigabytes.
Without node-level tracing, CUDA graphs hide the kernels of decode."""
_REPORT = re.compile(r"decode(?:\.(\d+))?\.nsys-rep")
"""What nsys calls a report: with the number of its capture range, if it is to record several."""


def capture(
    workload: Workload,
    folder: Path,
    progress: Callable[[str], None] | None = None,
    steps: int = STEPS,
    variables: Mapping[str, str] | None = None,
    first: str = "",
    places: Places | None = None,
) -> Profile:
    """Profile steady decode of a workload in a separate process: `capture_batches` of one."""
    [profile] = capture_batches([workload], folder, progress, steps, variables, first, places)
    return profile


def capture_batches(
    workloads: Sequence[Workload],
    folder: Path,
    progress: Callable[[str], None] | None = None,
    steps: int = STEPS,
    variables: Mapping[str, str] | None = None,
    first: str = "",
    places: Places | None = None,
) -> tuple[Profile, ...]:
    """Profile steady decode at one batch or several, in one process with one engine.

    nsys profiles a GPU if it is installed and complete; otherwise torch.profiler does. The engine
    is started for the largest batch, so that a step of a smaller one is profiled in an engine with
    room for the largest, such as vLLM's `max_num_seqs` and the CUDA graphs that follow from it.

    Args:
        workloads: the model, engine, device and batch to profile; they differ in batch alone.
        folder: where the profiles' files stay: `decode.nsys-rep` and `decode.sqlite`, or
            `torch.json`; of several batches `decode.batch8.nsys-rep` and so on.
        progress: called with the name of each stage.
        steps: decode steps to record of each batch.
        variables: extra environment variables for that process.
        first: a Python statement that the process runs first.
        places: asked where an op can be put in the model.

    Returns:
        The ranked profile of each workload, in their order.

    Raises:
        MissingError: the model fits no device of this machine.
        UsageError: the model cannot be loaded, or it needs more memory than there is.
        PatcherError: the profiled program failed; the hint names the log file.
    """
    say = progress or (lambda stage: None)
    require_room(workloads[0])
    program = _Program(workloads, folder, steps, variables or {}, first, places)
    if workloads[0].device == "cuda":
        nsys = find_nsys()
        missing = missing_libraries(nsys) if nsys else []
        if nsys is not None and not missing:
            return _under_nsys(nsys, program, say)
        why = f"nsys lacks {', '.join(missing)}" if missing else "nsys was not found"
        message = f"{why}: kernels were traced with torch.profiler; see `patcher doctor`"
        warning = ProfileWarning(kind="fallback", message=message)
        return _with_torch(program, say, (warning,))
    message = "no GPU: the rows are PyTorch operators on the CPU by self time, not kernels"
    warning = ProfileWarning(kind="cpu_operators", message=message)
    return _with_torch(program, say, (warning,))


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

    workloads: Sequence[Workload]
    folder: Path
    steps: int
    variables: Mapping[str, str]
    first: str
    places: Places | None

    def command(self, mode: str, outs: Sequence[Path] = ()) -> list[str]:
        then = "from patcher.hotspot.target import main; raise SystemExit(main())"
        begin = ["-c", f"{self.first}; {then}"] if self.first else ["-m", "patcher.hotspot.target"]
        workloads = json.dumps([workload.model_dump() for workload in self.workloads])
        return [sys.executable, "-P", *begin, workloads, str(self.steps), mode, *map(str, outs)]

    def file(self, stem: str, workload: Workload, suffix: str) -> Path:
        """A file of one batch, which names it if there are several."""
        batch = f".batch{workload.batch}" if len(self.workloads) > 1 else ""
        return self.folder / f"{stem}{batch}{suffix}"

    def stage(self, what: str, workload: Workload) -> str:
        """A stage of one batch, in words."""
        return f"{what}, batch {workload.batch}" if len(self.workloads) > 1 else what

    def served(self, workload: Workload) -> ServedModel:
        served = ServedModel.of(workload.model, workload.batch, self.places)
        return replace(served, dtype=workload.dtype)


def _under_nsys(nsys: Path, program: _Program, say: Callable[[str], None]) -> tuple[Profile, ...]:
    from patcher.hotspot.rank import build_profile
    from patcher.hotspot.readers.sqlite import read_sqlite

    say("profile under nsys")
    for old in _reports(program.folder):  # nsys 2025.3 skips a number that is taken
        old.unlink()
    options, ranges = list(NSYS_OPTIONS), len(program.workloads)
    if ranges > 1:
        options = [each for each in options if not each.startswith(_RANGE_END)]
        options.append(f"{_RANGE_END}repeat:{ranges}")
    command = [str(nsys), "profile", *options, "-o", str(program.folder / "decode.nsys-rep")]
    _run([*command, *program.command("nsys")], {**nsys_environment(), **program.variables})
    reports = _reports(program.folder)
    if not reports:
        raise PatcherError(
            "nsys ran the program and wrote no report", "see `patcher doctor`: its importer fails"
        )
    if len(reports) != ranges:
        raise PatcherError(
            f"nsys was to write a report of each of {ranges} batches and wrote {len(reports)}: "
            f"{', '.join(report.name for report in reports)}",
            "profile one batch at a time",
        )
    profiles = []
    for workload, report in zip(program.workloads, reports, strict=True):
        say(program.stage("export", workload))
        named = report.rename(program.file("decode", workload, ".nsys-rep"))
        target = program.file("decode", workload, ".sqlite")
        recording = read_sqlite(export_sqlite(named, target))
        served = program.served(workload)
        profiles.append(build_profile(recording, workload.model, served=served))
    return tuple(profiles)


def _reports(folder: Path) -> list[Path]:
    """The reports as nsys names them, in the order of their capture ranges."""
    found = {path: _REPORT.fullmatch(path.name) for path in folder.iterdir()}
    numbers = {path: int(match[1] or 0) for path, match in found.items() if match}
    return sorted(numbers, key=lambda path: numbers[path])


def _with_torch(
    program: _Program, say: Callable[[str], None], warnings: tuple[ProfileWarning, ...]
) -> tuple[Profile, ...]:
    from patcher.hotspot.rank import build_profile

    say("profile with torch.profiler")
    outs = [program.file("torch", workload, ".json") for workload in program.workloads]
    _run(program.command("torch", outs), {**engine_environment(), **program.variables})
    profiles = []
    for workload, out in zip(program.workloads, outs, strict=True):
        recording, served = _torch_recording(workload, out, warnings), program.served(workload)
        steps = program.steps
        profiles.append(build_profile(recording, workload.model, served=served, steps=steps))
    return tuple(profiles)


def _torch_recording(
    workload: Workload, out: Path, warnings: tuple[ProfileWarning, ...]
) -> Recording:
    from patcher.hotspot.readers.kineto import read_kineto
    from patcher.hotspot.recording import Recording, SummaryRow

    if workload.device == "cuda":
        traced = read_kineto(out)
        return replace(traced, warnings=(*traced.warnings, *warnings))
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    summary = tuple(SummaryRow(**row) for row in rows)
    return Recording("torch.profiler", rows=summary, warnings=warnings)


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
