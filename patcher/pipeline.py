"""The whole path of one gain, as steps of a run.

profile -> hotspot -> agent loop -> patch bundle -> A/B and quality -> decision. Each step is done
once: resuming a run is calling `execute` again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from patcher.ab.compare import compare_patch
from patcher.ab.decision import Decision, decide
from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.ab.other_windows import shapes_of
from patcher.ab.timeline import Timeline
from patcher.ab.verdict import explain
from patcher.agent import best_candidate
from patcher.attempts import LoopResult
from patcher.attempts import Progress as LoopProgress
from patcher.bench import (
    Evaluation,
    Language,
    MissingError,
    PatcherError,
    UsageError,
    VerificationError,
    Workload,
    comment_mark,
    header_hint,
    load_op,
)
from patcher.bench.engines import in_process
from patcher.bench.judge import JudgeSettings
from patcher.bench.judge.planning import require_fits
from patcher.bench.machine.environment import describe
from patcher.bench.machine.environment import facts as machine_facts
from patcher.bench.stats.compare import DEFAULT_PROCESS_PAIRS
from patcher.bench.toolchains import build
from patcher.extras import missing_package
from patcher.hotspot import Profile, capture, read
from patcher.hotspot.capture import require_room
from patcher.integrate import Patch, engine_version, must_fit_model
from patcher.judges import LOCAL, remote_judge
from patcher.judges.languages import judge_device_kind, require_here, require_sense
from patcher.kernel_search.context import MACHINE_INDEPENDENT, run_levers
from patcher.kernel_search.stage import (
    analyst_of,
    require_exchange_folders,
    require_models,
    search_kernel,
)
from patcher.ledgers import with_ledger_if_known
from patcher.levers.load import load_levers
from patcher.places import config_of, places_in, require_some_place
from patcher.plan import DEMO as DEMO
from patcher.plan import ProfileFromFile, RunResult
from patcher.plan import RunPlan as RunPlan
from patcher.reconciling.reconcile import Reconciliation
from patcher.runs.machine import judge_anew, same_machine
from patcher.runs.patch import RunPatch
from patcher.runs.run import Run
from patcher.settings import Settings
from patcher.sweeps import place_of, served_sweep

Report = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
Say = Callable[[str], None]
OnProgress = Callable[[LoopProgress], None]


def start(
    settings: Settings,
    command: str,
    model: str | None,
    workload: Workload | None,
    plan: RunPlan,
    profile_file: Path | None = None,
) -> Run:
    """Check every input, then make the run's folder; `execute` does the work.

    Args:
        profile_file: the profile to start from. The run keeps what was read.

    Raises:
        UsageError: the plan asks for what its language, op or engine cannot have, or a file that
            the settings name cannot be read.
        MissingError: a key, a compiler, a device or the engine is not here.
    """
    require_sense(plan.language, whole=plan.whole, sweep=plan.sweep)
    load_levers(settings.for_run())
    require_models(settings.model_dump())
    profile: Profile | None = None
    if profile_file is not None and workload is not None:
        places = places_in(workload.model, workload.engine)
        profile = read(profile_file, workload.model, places=places)
        profile = with_ledger_if_known(profile, workload)
        plan = plan.model_copy(update={"profile_file": profile_file.name})
    _require_start(plan, workload, settings.judge, profile)
    run = Run.create(
        settings.runs_dir,
        command=command,
        model=model,
        workload=workload,
        settings={
            **settings.for_run(),
            "analyst": analyst_of(settings, _language(plan, workload)),
            "plan": plan.model_dump(mode="json"),
        },
        versions=describe("cpu").packages,
        machine=machine_facts(plan.measured_on(workload)),
    )
    run_levers(run)
    if profile is not None:
        given = ProfileFromFile.model_validate(profile.model_dump())
        run.step("profile", lambda: given, ProfileFromFile)
    return run


def _require_start(
    plan: RunPlan, workload: Workload | None, where: str, profile: Profile | None
) -> None:
    """Refuse what no step could begin with on this machine."""
    op_name, language = plan.op, _language(plan, workload)
    if workload is not None:
        try:
            engine_version(workload.engine)
        except MissingError:
            raise missing_package(ModuleNotFoundError(name=workload.engine), "run") from None
        if profile is None:
            require_room(workload)
        elif op_name is None:
            op_name = _first_covered(profile, workload)
    if remote_judge(where) is None:
        require_here(language)
    kind = judge_device_kind(where, language)
    op = None if op_name is None else load_op(op_name)
    if op is not None:
        sweep = op.sweep(kind, served_sweep(op, kind, plan.sweep, workload))
        if not language.compile_only:
            # of another machine's memory nothing is known here
            require_fits(op, sweep, kind if remote_judge(where) is None else "cpu")
    if workload is not None:
        if op is not None:
            must_fit_model(op, workload.engine, _config_of(workload))
        else:
            require_some_place(workload)


def _config_of(workload: Workload) -> Callable[[], Mapping[str, Any]]:
    return partial(config_of(workload.model), workload.engine)


def _language(plan: RunPlan, workload: Workload | None) -> Language:
    on_gpu = workload is not None and workload.device == "cuda"
    return plan.language or (Language.CUDA if on_gpu else Language.CPP)


def execute(
    run: Run,
    report: Report,
    say: Say,
    *,
    judge: str | None = None,
    machine_changed: bool = False,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """Do what is left of the run.

    Args:
        judge: where candidates are judged from now on; None: where the run's settings say.
        on_progress: hears of each candidate as it goes through the loop.
        machine_changed: on another machine, judge and measure all again instead of refusing.

    Raises:
        VerificationError: figures of this run come from another machine.
        PatcherError: an expected failure; the run can be resumed.
    """
    settings = run.config.settings
    plan = RunPlan.model_validate(settings["plan"])
    workload = run.config.workload
    where: str = judge or settings.get("judge", LOCAL)
    try:
        require_models(settings)
    except MissingError as error:
        hint = f"put that right, then: patcher resume {run.id}"
        raise MissingError(error.message, hint) from None
    require_exchange_folders(run, None if judge else where)
    changed: list[str] = []
    if plan.whole or where == LOCAL:  # else no figure is made here
        changed = same_machine(
            run, plan.measured_on(workload), MACHINE_INDEPENDENT, machine_changed
        )
    if machine_changed and not changed and where != LOCAL and judge_anew(run, MACHINE_INDEPENDENT):
        changed = [f"the machine behind {where}"]
    for change in changed:
        say(f"judging and measuring again: {change}")
    op_name = plan.op
    profile: Profile | None = None
    if plan.whole:
        assert workload is not None
        profile = run.step("profile", lambda: _profile(run, plan, workload, report), Profile)
        op_name = op_name or _first_covered(profile, workload)
        spot = next((spot for spot in profile.hotspots if spot.op == op_name), None)
        share = "not in the profile"
        if spot is not None:
            share = f"{spot.share_pct:.1f} % of the profile, ceiling {spot.ceiling_pct:+.1f} %"
        say(f"profile: {len(profile.kernels)} kernels; op {op_name}: {share}")
    if op_name is None:
        raise UsageError("no op was named", "name one, or run the whole path of a model")

    op, language = load_op(op_name), _language(plan, workload)
    kind = judge_device_kind(where, language)
    sweep = plan.sweep
    if plan.whole:
        assert workload is not None
        place = place_of(op, kind, sweep, workload)
        say(place.said)  # before a model is asked
        sweep = place.sweep
    search = search_kernel(
        run,
        op,
        language,
        plan.search,
        JudgeSettings(sweep=sweep, threads=plan.threads, pairs=plan.judge_pairs),
        where,
        report,
        say,
        on_progress,
        counters=plan.counters,
        profile=profile,
    )
    made = decision = None
    if search.stopped == "compiled":
        say(f"it compiles; a {search.language} kernel is neither run nor timed here")
    elif search.best_iteration is None:
        say("no candidate is right and faster: nothing to patch")
    elif plan.whole:
        assert workload is not None
        made = run.step("patch", lambda: make_patch(run, search, workload), RunPatch)
        say(f"patch {made.id} in {made.folder}/")
        job = ABJob(
            workload=workload,
            margin_pct=settings["margin_pct"],
            max_pairs=plan.pairs,
            quality_steps=plan.quality_steps,
            process_pairs=0 if in_process(workload.engine) else DEFAULT_PROCESS_PAIRS,
            # on a CPU the other points would take longer than all the rest
            other_workloads=shapes_of(workload, None, None) if workload.device == "cuda" else (),
        )
        folder = run.path / made.folder
        measured = run.step(
            "measure",
            lambda: compare_patch(job, folder, Timeline(report), run.path),
            Measurement,
        )
        evaluation = run.load(f"{op_name}/{search.best_iteration}/evaluate", Evaluation)
        reconciliation = run.step(
            "reconcile",
            lambda: explain(measured, Patch.load(folder), profile),
            Reconciliation,
        )
        decision = run.step(
            "decision", lambda: decide(measured, evaluation, reconciliation), Decision
        )
    elif (missing := _header_hint(run, search)) is not None:
        say(missing)
    return RunResult(run=run.id, op=op_name, optimisation=search, patch=made, decision=decision)


def _profile(run: Run, plan: RunPlan, workload: Workload, report: Report) -> Profile:
    if plan.profile_file is not None:  # killed before the run had its copy
        raise UsageError(
            f"run {run.id} has no copy of the profile {plan.profile_file} that it starts from",
            "start a new run with --from",
        )
    report("profile", 0, 1)
    # a report of nsys names the host and its folders: only what is ranked goes into the run
    with tempfile.TemporaryDirectory() as scratch:
        places = places_in(workload.model, workload.engine)
        profile = capture(workload, Path(scratch), places=places)
    return with_ledger_if_known(profile, workload)


def _first_covered(profile: Profile, workload: Workload) -> str:
    """The first hotspot's op that has somewhere to go in this model on its engine.

    Raises:
        UsageError: no hotspot has one; the message says why each does not.
    """
    refused: list[PatcherError] = []
    config = _config_of(workload)
    for name in dict.fromkeys(spot.op for spot in profile.hotspots if spot.op):
        try:  # a profile of an earlier version was not asked
            must_fit_model(load_op(name), workload.engine, config)
        except (UsageError, VerificationError) as error:
            refused.append(error)
        else:
            return name
    told = [error.message for error in refused]
    told += [spot.refusal for spot in profile.hotspots if spot.refusal]
    why = "".join(f"; {reason}" for reason in dict.fromkeys(told))
    raise UsageError(
        f"no hotspot of {workload.model} is covered by an op that {workload.engine} takes{why}",
        refused[0].hint if refused else "see `patcher ops`; CONTRIBUTING.md says how to add one",
    )


def _header_hint(run: Run, search: LoopResult) -> str | None:
    assert search.best_file is not None
    source = (run.path / search.best_file).read_text(encoding="utf-8")
    return header_hint(source, comment_mark(search.language.in_python))


def make_patch(run: Run, search: LoopResult, workload: Workload) -> RunPatch:
    """Bundle the best candidate of the loop, for the op's first point that the model has.

    Raises:
        VerificationError: its file was changed.
    """
    op = load_op(search.op)
    candidate = best_candidate(run, search)
    assert candidate is not None
    evaluation = run.load(f"{op.name}/{search.best_iteration}/evaluate", Evaluation)
    attempt = search.iterations[search.best_iteration or 0]
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
        point_name=must_fit_model(op, workload.engine, _config_of(workload)),
    )
    return RunPatch(folder="patch", id=patch.manifest.id, digest=patch.digest)
