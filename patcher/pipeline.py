"""The whole path of one gain, as steps of a run.

profile -> hotspot -> agent loop -> patch bundle -> A/B and quality -> decision. Each step is done
once: resuming a run is calling `execute` again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from patcher.ab.compare import compare_patch
from patcher.ab.decision import Decision, decide
from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.ab.other_windows import shapes_of
from patcher.ab.timeline import Timeline
from patcher.ab.verdict import explain
from patcher.attempts import Optimisation
from patcher.attempts import Progress as LoopProgress
from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Evaluation,
    Language,
    Record,
    UsageError,
    Workload,
    comment_mark,
    header_hint,
    load_op,
)
from patcher.bench.judge import JudgeSettings
from patcher.bench.machine.environment import describe
from patcher.bench.machine.environment import facts as machine_facts
from patcher.bench.stats.compare import DEFAULT_PAIRS, DEFAULT_PROCESS_PAIRS
from patcher.bench.toolchains import build
from patcher.hotspot import Profile, capture
from patcher.integrate import Patch
from patcher.judges import LOCAL
from patcher.judges.languages import require_sense
from patcher.optimising.carried import kept_levers
from patcher.optimising.levers import load_levers
from patcher.optimising.searching import Search
from patcher.optimising.stage import DEMO as DEMO
from patcher.optimising.stage import optimise
from patcher.reconciling.reconcile import Reconciliation
from patcher.runs.machine import same_machine
from patcher.runs.run import Run
from patcher.settings import Settings

Report = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
Say = Callable[[str], None]
Told = Callable[[LoopProgress], None]


class RunPlan(Record):
    """What one run is to do; stored in `run.json`, so that resuming needs nothing else."""

    schema_version: int = SCHEMA_VERSION
    op: str | None = None
    """None: the first hotspot that an op of the library covers."""
    language: Language | None = None
    sweep: str | None = None
    whole: bool = True
    """False: the agent loop alone, without profile, patch and A/B."""
    pairs: int = DEFAULT_PAIRS
    """End-to-end pairs at most."""
    quality_steps: int = 32
    threads: int | None = None
    judge_pairs: int = 12
    search: Search = Search()
    counters: bool = True
    """Whether the analyst reads hardware counters, where ncu works."""

    def measured_on(self, workload: Workload | None) -> Literal["cpu", "cuda"]:
        """The kind of device whose figures the run is about."""
        if workload is not None:
            return workload.device
        return "cpu" if self.language in (None, Language.CPP) else "cuda"


class Made(Record):
    """A patch bundle in the run's folder."""

    folder: str
    id: str
    digest: str


class RunResult(Record):
    """How a run ended."""

    schema_version: int = SCHEMA_VERSION
    run: str
    op: str | None
    optimisation: Optimisation | None
    patch: Made | None
    decision: Decision | None
    reports: tuple[str, ...] = ()
    """File names in the run's folder, once written."""


def start(
    settings: Settings, command: str, model: str | None, workload: Workload | None, plan: RunPlan
) -> Run:
    """Make the run's folder; `execute` then does the work.

    Raises:
        UsageError: the plan asks for what its language cannot have, or a file that the settings
        name cannot be read.
    """
    require_sense(plan.language, whole=plan.whole, sweep=plan.sweep)
    load_levers(settings.for_run())  # before there is a run
    run = Run.create(
        settings.runs_dir,
        command=command,
        model=model,
        workload=workload,
        settings={**settings.for_run(), "plan": plan.model_dump(mode="json")},
        versions=describe("cpu").packages,
        machine=machine_facts(plan.measured_on(workload)),
    )
    kept_levers(run)
    return run


def execute(
    run: Run,
    report: Report,
    say: Say,
    profile_file: Path | None = None,
    *,
    judge: str | None = None,
    machine_changed: bool = False,
    told: Told | None = None,
) -> RunResult:
    """Do what is left of the run.

    Args:
        judge: where candidates are judged from now on; None: where the run's settings say.
        told: hears of each candidate as it goes through the loop.
        machine_changed: on another machine, judge and measure all again instead of refusing.

    Raises:
        VerificationError: figures of this run come from another machine.
        PatcherError: an expected failure; the run can be resumed.
    """
    settings = run.config.settings
    plan = RunPlan.model_validate(settings["plan"])
    workload = run.config.workload
    where: str = judge or settings.get("judge", LOCAL)
    if plan.whole or where == LOCAL:  # else no figure is made here
        for change in same_machine(run, plan.measured_on(workload), machine_changed):
            say(f"judging and measuring again: {change}")
    op_name = plan.op
    profile: Profile | None = None
    if plan.whole:
        assert workload is not None
        profile = run.step(
            "profile", lambda: _profile(run, workload, report, profile_file), Profile
        )
        op_name = op_name or _first_covered(profile, workload.engine)
        spot = next((spot for spot in profile.hotspots if spot.op == op_name), None)
        share = f"{spot.share_pct:.1f} % of the profile" if spot else "not in the profile"
        say(f"profile: {len(profile.kernels)} kernels; op {op_name}: {share}")
    if op_name is None:
        raise UsageError("no op to work on", "name one, or run the whole path of a model")

    optimisation = _optimise(run, plan, op_name, profile, where, report, say, told)
    made = decision = None
    if optimisation.stopped == "compiled":
        say(f"it compiles; a {optimisation.language} kernel is neither run nor timed here")
    elif optimisation.best_iteration is None:
        say("no candidate is right and faster: nothing to patch")
    elif plan.whole:
        assert workload is not None
        made = run.step("patch", lambda: make_patch(run, optimisation, workload), Made)
        say(f"patch {made.id} in {made.folder}/")
        if hint := _header_hint(run, optimisation):
            say(hint)
        job = ABJob(
            workload=workload,
            margin_pct=settings["margin_pct"],
            max_pairs=plan.pairs,
            quality_steps=plan.quality_steps,
            # vLLM is patched when a process starts
            process_pairs=DEFAULT_PROCESS_PAIRS if workload.engine == "vllm" else 0,
            # on a CPU the other points would take longer than all the rest
            other_workloads=shapes_of(workload, None, None) if workload.device == "cuda" else (),
        )
        folder = run.path / made.folder
        measured = run.step(
            "measure", lambda: compare_patch(job, folder, Timeline(report)), Measurement
        )
        evaluation = run.load(f"{op_name}/{optimisation.best_iteration}/evaluate", Evaluation)
        reconciliation = run.step(
            "reconcile",
            lambda: explain(measured, Patch.load(folder), profile),
            Reconciliation,
        )
        decision = run.step(
            "decision", lambda: decide(measured, evaluation, reconciliation), Decision
        )
    return RunResult(
        run=run.id, op=op_name, optimisation=optimisation, patch=made, decision=decision
    )


def _profile(run: Run, workload: Workload, report: Report, profile_file: Path | None) -> Profile:
    if profile_file is not None:
        from patcher.hotspot import read

        return read(profile_file, workload.model)
    report("profile", 0, 1)
    # a report of nsys names the host and its folders: only what is ranked goes into the run
    with tempfile.TemporaryDirectory() as scratch:
        return capture(workload, Path(scratch))


def _first_covered(profile: Profile, engine: str) -> str:
    """The first hotspot's op that has somewhere to go in this engine."""
    for spot in profile.hotspots:
        if spot.op and any(point.startswith(f"{engine}: ") for point in spot.patch_points):
            return spot.op
    raise UsageError(
        f"no hotspot of this profile is covered by an op of the library that {engine} takes",
        "see `patcher ops`; CONTRIBUTING.md says how to add one",
    )


def _optimise(
    run: Run,
    plan: RunPlan,
    op_name: str,
    profile: Profile | None,
    where: str,
    report: Report,
    say: Say,
    told: Told | None,
) -> Optimisation:
    device = run.config.workload.device if run.config.workload else None
    return optimise(
        run,
        load_op(op_name),
        plan.language or (Language.CUDA if device == "cuda" else Language.CPP),
        plan.search,
        JudgeSettings(sweep=plan.sweep, threads=plan.threads, pairs=plan.judge_pairs),
        where,
        report,
        say,
        told,
        counters=plan.counters,
        profile=profile,
    )


def _header_hint(run: Run, optimisation: Optimisation) -> str | None:
    assert optimisation.best_file is not None
    source = (run.path / optimisation.best_file).read_text(encoding="utf-8")
    return header_hint(source, comment_mark(optimisation.language.in_python))


def make_patch(run: Run, optimisation: Optimisation, workload: Workload) -> Made:
    """Bundle the best candidate of the loop."""
    op = load_op(optimisation.op)
    assert optimisation.best_file is not None
    source = (run.path / optimisation.best_file).read_text(encoding="utf-8")
    candidate = Candidate(op=op.name, language=optimisation.language, source=source)
    step = f"{op.name}/{optimisation.best_iteration}/evaluate"
    evaluation = run.load(step, Evaluation)
    if candidate.digest != evaluation.digest:
        raise UsageError("the best candidate's file was changed", "start a new run")
    attempt = optimisation.iterations[optimisation.best_iteration or 0]
    for rest in run.path.glob(".patch-*"):  # of a bundle that a kill left unfinished
        shutil.rmtree(rest)
    patch = Patch.create(
        run.path / "patch",
        op,
        candidate,
        evaluation,
        engine=workload.engine,
        made_by="patcher",
        model=attempt.model,
        run=run.id,
        built=build(candidate, op.contract),
    )
    return Made(folder="patch", id=patch.manifest.id, digest=patch.digest)
