"""Check finalists with compute-sanitizer: memory errors, shared-memory races, uninitialised reads.

These reports count against the candidate:

- memcheck: every report, in any kernel, since the candidate supplied the pointers.
- racecheck: reports at level error. Warnings are hazards that the programming model forbids but
  that people write on purpose.
- racecheck and initcheck: no reports in kernels of libraries, which have races and such reads
  themselves.
- racecheck, for a candidate with mbarriers: only if the installed tool understands them. Versions
  up to at least 2026.4 do not understand `__syncwarp` followed by one lane's arrival, which is how
  Hopper kernels hand a buffer over (measured: bench/results/racecheck). So a correct control kernel
  (handover.cu) is run under the same tool. If the tool reports the control too, the candidate's
  reports are set aside, and the verdict says so. Such a candidate needs a manual review.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path

import torch

from patcher.bench.judge import tools
from patcher.bench.judge.blob import Layout
from patcher.bench.judge.cases import Secrets
from patcher.bench.judge.evaluation import Outcome
from patcher.bench.judge.sanitizer_text import SanitizerFinding, SanitizerReport, parse
from patcher.bench.machine.installed import find_compute_sanitizer, version_of
from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import Point, Sweep
from patcher.bench.ops.op import Op
from patcher.bench.records import Record
from patcher.bench.toolchains import Built, build, toolchain

_FOUND_CODE = 99
_OPTIONS: dict[str, tuple[str, ...]] = {
    # padding reveals accesses that stray from one allocation into the next; API errors are off
    # since libraries probe, and the candidate's own API errors raise anyway
    "memcheck": ("--padding", "512", "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
}
_LOOKS_AT_PROXIES = (2026, 4)
"""From this version on, racecheck reports a bulk copy without a preceding proxy fence. It does so
even after mere reads, as in the ring of the CUDA programming guide. So this check is off."""
_HAS_MBARRIERS = re.compile(r"mbarrier|\bcuda::(?:barrier|pipeline|ptx)\b")
_CONTROL = "handover.cu"
_HIDDEN = 3
"""Number of hidden shapes to run besides the smallest and the largest sweep point."""
_UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Makes PyTorch allocate each tensor separately, at its exact size."""


class Sanitized(Record):
    """Combined result of all tools."""

    outcome: Outcome | None
    """The outcome if the candidate failed; None if nothing counts against it."""
    detail: str
    """What the tools found."""
    log: str = ""
    """Text of the first reports."""
    set_aside: bool = False
    """Whether reports were ignored, since the tool reports the correct control too."""


def sanitize(
    op: Op,
    candidate: Candidate,
    built: Built,
    sweep: Sweep,
    device: str,
    draw: Secrets,
    limit_s: float = tools.LIMIT_S,
    memory_bytes: int = 16 << 30,
) -> Sanitized:
    """Run the candidate at a few shapes under each tool; the first finding decides.

    If a tool fails with the candidate but works without one, the candidate failed. If it fails
    without a candidate too, the tool does not work on this machine and nothing is concluded.

    Args:
        op: the op.
        candidate: the source.
        built: its build.
        sweep: sweep that the shapes come from.
        device: `cuda`.
        draw: source of secret seeds.
        limit_s: time limit in seconds of each run.
        memory_bytes: limit on host memory in bytes.
    """
    tool = find_compute_sanitizer()
    if tool is None:
        return Sanitized(outcome=None, detail="not here: compute-sanitizer is not installed")
    try:
        version = version_of(tool)
    except OSError as error:
        detail = f"not here: compute-sanitizer does not run: {error}"
        return Sanitized(outcome=None, detail=tools.without_paths(detail))
    calls = tuple(tools.Call.of(op, point, draw.seed()) for point in _points(op, sweep))
    job = tools.ToolJob(device, built, op.name, calls)
    left_out, aside = 0, list[SanitizerFinding]()
    run = partial(_run, tool, version=version, limit_s=limit_s, memory_bytes=memory_bytes)
    for name in _OPTIONS:
        ran = run(name, job)
        report = parse(ran.log, name)
        if own := _own(report):
            mbarriers = name == "racecheck" and _HAS_MBARRIERS.search(candidate.source)
            if mbarriers and _own(_of_control(run, name, _control(op, device))):
                aside = own
                continue
            more = f"; {report.errors} reports" if (report.errors or 0) > 1 else ""
            return Sanitized(
                outcome=Outcome.GUARD_VIOLATION,
                detail=own[0].summary() + more,
                log="\n\n".join(finding.text for finding in own[:3]),
            )
        left_out += len(report.findings)
        if not _completed(ran, report):
            without = run(name, tools.ToolJob(device))
            if not _completed(without, parse(without.log, name)):
                detail = f"not here: compute-sanitizer's {name} does not work: {without.why()}"
                return Sanitized(outcome=None, detail=detail)
            detail = f"{name}: the candidate fails below it: {ran.why()}"
            return Sanitized(outcome=Outcome.RUNTIME_ERROR, detail=detail, log=_last(ran))
    silent = [name for name in _OPTIONS if not (aside and name == "racecheck")]
    detail = f"{', '.join(silent)} found nothing in {len(calls)} calls"
    if aside:
        detail += f"; {len(aside)} reports of racecheck set aside, since it also reports a correct "
        detail += "hand-over by mbarriers"
    if left_out:
        detail += f" (left out: {left_out} warnings or reports of libraries' kernels)"
    return Sanitized(
        outcome=None,
        detail=f"{detail}; compute-sanitizer {version}",
        log="\n\n".join(finding.text for finding in aside[:3]),
        set_aside=bool(aside),
    )


def _points(op: Op, sweep: Sweep) -> list[Point]:
    swept = sweep.points()
    hidden = [Point(axes=s.axes, dtypes=sweep.dtypes) for s in op.contract.hidden[:_HIDDEN]]
    return [swept[0], *swept[-1:], *hidden] if len(swept) > 1 else [*swept, *hidden]


def _own(report: SanitizerReport) -> list[SanitizerFinding]:
    return [finding for finding in report.findings if finding.counts]


def _of_control(
    run: Callable[[str, tools.ToolJob], tools.Ran], name: str, control: tools.ToolJob | None
) -> SanitizerReport:
    """The tool's report on the control; empty if the control could not be built or run."""
    if control is not None:
        ran = run(name, control)
        report = parse(ran.log, name)
        if _completed(ran, report):
            return report
    return SanitizerReport(findings=(), errors=None)


def _control(op: Op, device: str) -> tools.ToolJob | None:
    """A job for the control kernel, called without arguments; None if it cannot be built."""
    if toolchain(Language.CUDA).missing() is not None:
        return None
    source = resources.files("patcher.bench.judge").joinpath(_CONTROL).read_text("utf-8")
    source = source.replace("ENTRY", op.name)
    built = build(Candidate(op=op.name, language=Language.CUDA, source=source), op.contract)
    nothing = Layout(slots=(), set_bytes=0, sent_bytes=0, returned_bytes=0)
    call = tools.Call(nothing, (), torch.empty(0, dtype=torch.uint8), ())
    return tools.ToolJob(device, built, op.name, (call,)) if built.ok else None


def _options(name: str, version: str) -> tuple[str, ...]:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    proxies = name == "racecheck" and numbers >= _LOOKS_AT_PROXIES
    return (*_OPTIONS[name], *(("--racecheck-fence-proxy-async", "no") if proxies else ()))


def _run(
    tool: Path, name: str, job: tools.ToolJob, *, version: str, limit_s: float, memory_bytes: int
) -> tools.Ran:
    options = [
        "--tool",
        name,
        *_options(name, version),
        "--error-exitcode",
        str(_FOUND_CODE),
        "--target-processes",
        "application-only",
        "--show-backtrace",
        "no",
    ]
    return tools.run(
        tool, options, job, limit_s=limit_s, memory_bytes=memory_bytes, environment=_UNCACHED
    )


def _completed(ran: tools.Ran, report: SanitizerReport) -> bool:
    """Whether the run ended normally and its summary agrees with the parsed findings."""
    consistent = report.errors == 0 or bool(report.findings and report.errors)
    return ran.code in (0, _FOUND_CODE) and ran.ok and consistent


def _last(ran: tools.Ran) -> str:
    return tools.without_paths("\n".join(part[-1500:] for part in (ran.printed, ran.log) if part))
