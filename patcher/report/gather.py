"""Build a run's report from its journal and artefacts, complete or not."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TypeVar

from patcher.ab.decision import Decision
from patcher.ab.measurement import Measurement
from patcher.ab.verdict import explain
from patcher.agent import recorded_stop
from patcher.attempts import Attempt, Stopped
from patcher.bench import Evaluation, Record, UsageError
from patcher.hotspot import Profile
from patcher.integrate import Patch
from patcher.models.ceilings import account
from patcher.plan import DEMO, RunPlan
from patcher.reconciling.proof import seen_per_step
from patcher.reconciling.reconcile import Reconciliation
from patcher.report import FORMATS, Report, write
from patcher.report.judged import receipt_of
from patcher.runs.patch import RunPatch
from patcher.runs.run import Run
from patcher.status import attempts, best_of, status
from patcher.verdicts.review import run_words

RecordT = TypeVar("RecordT", bound=Record)


def write_report(run: Run, formats: tuple[str, ...], after: Profile | None = None) -> list[Path]:
    """Write the report of a run into its folder, even if the run has not ended.

    Args:
        after: a profile of the patched engine, to compare with the run's.

    Raises:
        UsageError: the format is unknown.
    """
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise UsageError(
            f"unknown report format {', '.join(unknown)}", f"formats are: {', '.join(FORMATS)}"
        )
    # the process that works on the run may be writing its own report now
    beside = f".{os.getpid()}" if run.read_only else ""
    return write(gather(run, after), run.path, formats, beside)


def gather(run: Run, after: Profile | None = None) -> Report:
    """Everything that the run has so far; missing parts are None.

    Args:
        after: a profile of the patched engine.
    """
    plan = RunPlan.model_validate(run.config.settings.get("plan", {}))
    workload = run.config.workload
    profile = _stored(run, "profile", Profile)
    measured = _stored(run, "measure", Measurement)
    made = _stored(run, "patch", RunPatch)
    decision = _stored(run, "decision", Decision)
    found = attempts(run)
    best = _best(found)
    evaluation = source = None
    if best is not None and best.file is not None:
        op_name = Path(best.file).parts[1]
        evaluation = run.load(f"{op_name}/{best.iteration}/evaluate", Evaluation)
        source = (run.path / best.file).read_text(encoding="utf-8")
    model = str(run.config.settings.get("model"))
    ledger = account(run.events).ledger
    recorded = any(attempt.reply_source == "recorded" for attempt in found)
    return Report(
        run_id=run.id,
        created=run.config.created,
        title=run.config.model or (plan.op or run.config.command),
        commands=(_command(run, plan), f"patcher report {run.id}"),
        model=run.config.model,
        workload=workload,
        stopped=_stopped(run, plan),
        recorded_conversation=recorded,
        recorded_note=_recorded_note(model) if recorded else None,
        profile=profile,
        profile_after=after,
        attempts=found,
        ledger=ledger if ledger.sentence() else None,
        loop_ended=_loop_ended(run, found),
        best=evaluation,
        candidate_source=source,
        candidate_language=str(evaluation.language) if evaluation else None,
        patch_id=made.id if made else None,
        throughput=measured.throughput if measured else None,
        quality=measured.quality if measured else None,
        receipt=receipt_of(measured.receipt) if measured else None,
        quality_receipt=receipt_of(measured.quality_receipt) if measured else None,
        reconciliation=_reconciled(run, measured, profile, after),
        elsewhere=measured.other_workloads if measured else None,
        decision=decision,
        words=run_words(run),
        reverted_identical=measured.reverted_identical if measured else None,
        environment=measured.throughput.environment if measured else None,
    )


def _stored(run: Run, step: str, record_type: type[RecordT]) -> RecordT | None:
    return run.load(step, record_type) if run.done(step) else None


def _loop_ended(run: Run, attempts: tuple[Attempt, ...]) -> Stopped | None:
    """Of the op that was worked on."""
    ops = {Path(one.file).parts[1] for one in attempts if one.file}
    return next((found for name in sorted(ops) if (found := recorded_stop(run, name))), None)


def _best(found: tuple[Attempt, ...]) -> Attempt | None:
    """The one that the loop keeps, or else what is right and slower."""
    right = [a for a in found if a.geomean_speedup is not None and a.duplicate_of is None]
    return best_of(found) or max(right, key=lambda attempt: attempt.worth, default=None)


def _reconciled(
    run: Run,
    measured: Measurement | None,
    before: Profile | None,
    after: Profile | None,
) -> Reconciliation | None:
    """The reconciliation that the run recorded, or a new one if there is a patched profile."""
    if after is None and run.done("reconcile"):
        return run.load("reconcile", Reconciliation)
    if measured is None:
        return None
    patch = Patch.load(run.path / run.load("patch", RunPatch).folder)
    seen = seen_per_step(patch, measured.receipt, after, before) if after else None
    return explain(measured, patch, before, after, seen)


def _stopped(run: Run, plan: RunPlan) -> str | None:
    """Why the report is incomplete, or None if it is complete."""
    now = status(run)
    if run.read_only and now.state == "running":
        where = f"in its step {now.step}" if now.step else "between two steps"
        return f"the run is going on, {where}; this is what it has so far"
    if "decision" in run.state.results:
        return None
    if now.step:
        return f"the run stopped in its step {now.step}; go on with: patcher resume {run.id}"
    if now.candidates and now.best_iteration is None:
        return "no candidate was correct and faster, so nothing was patched"
    if not plan.whole:
        return None
    return f"the run is not finished; go on with: patcher resume {run.id}"


def _recorded_note(model: str) -> str:
    which = "the recording that ships with patcher" if model == DEMO else model
    return f"the language model's replies come from {which}; everything else was done in this run"


def _command(run: Run, plan: RunPlan) -> str:
    """The command that began the run, from what it recorded."""
    config, settings = run.config, run.config.settings
    if config.command == "demo":
        return "patcher demo"
    words = ["patcher", config.command, config.model or plan.op or ""]
    options = {
        "--op": plan.op if plan.whole else None,
        "--from": plan.profile_file,
        "--language": plan.language,
        "--model": settings.get("model"),
        "--strategy": plan.search.strategy if plan.search.strategy != "refine" else None,
        "--width": plan.search.width,
        "--islands": plan.search.islands,
        "--seed": plan.search.seed if plan.search.strategy == "evolve" else None,
        "--iterations": settings.get("iterations"),
        "--sweep": plan.sweep,
        "--threads": plan.threads,
        "--pairs": plan.pairs if plan.whole else None,
        "--margin-pct": settings.get("margin_pct") if plan.whole else None,
    }
    if config.command == "optimize":
        advisers = {f"--{name}": settings.get(name) for name in ("analyst", "diagnoser")}
        options |= {**advisers, "--no-counters": None if plan.counters else ""}
    if (judge := settings.get("judge")) != "local":
        options["--judge"] = judge
    for name in ("usd", "tokens", "minutes", "gpu_minutes"):
        options[f"--budget-{name.replace('_', '-')}"] = settings.get(f"budget_{name}")
    for kernel in plan.search.known_kernels:
        words += ["--from-solution", kernel.name]
    if config.workload:
        load = config.workload
        options |= {
            "--engine": load.engine,
            "--device": load.device,
            "--batch": load.batch,
            "--input-len": load.input_len,
            "--output-len": load.output_len,
            "--weights": load.weights,
            "--dtype": load.dtype,
        }
    for name, value in options.items():
        if value is not None:
            words += [name, str(value)] if value != "" else [name]
    return shlex.join(words)
