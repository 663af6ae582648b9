"""The whole path of one gain, as steps of a run.

profile -> hotspot -> agent loop -> patch bundle -> A/B and quality -> decision. Each step is done
once: resuming a run is calling `execute` again.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from bench import (
    SCHEMA_VERSION,
    Evaluation,
    Language,
    Record,
    UsageError,
    Workload,
    load_op,
    preset,
    presets,
)
from bench.environment import describe
from bench.judge import JudgeSettings, Policy, open_judge
from bench.stats import DEFAULT_PAIRS, MIN_PROCESS_PAIRS
from bench.toolchains import build
from hotspot import Profile, capture
from integrate import Patch
from patcher.agent import optimize
from patcher.attempts import Optimisation
from patcher.attempts import Progress as LoopProgress
from patcher.decide import Decision
from patcher.measure import decide_on, explain_measured, measure_in_child
from patcher.measured import Job, Measured
from patcher.models import Model, open_model
from patcher.other_traffic import shapes_of
from patcher.reconcile import Reconciliation
from patcher.run import Run
from patcher.settings import Settings

DEMO = "replay:demo"
"""The recorded conversation that ships with patcher."""

Report = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
Say = Callable[[str], None]


class Plan(Record):
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


class Made(Record):
    """A patch bundle in the run's folder."""

    folder: str
    id: str
    digest: str


class Result(Record):
    """How a run ended."""

    schema_version: int = SCHEMA_VERSION
    run: str
    op: str | None
    optimisation: Optimisation | None
    patch: Made | None
    decision: Decision | None
    reports: tuple[str, ...] = ()
    """File names in the run's folder, once written."""


def workload_for(
    model: str,
    device: Literal["cpu", "cuda"],
    *,
    batch: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    engine: Literal["transformers", "vllm"] = "transformers",
    weights: Literal["random", "hub", "local"] = "random",
    threads: int | None = None,
) -> Workload:
    """The preset's traffic with what was asked for instead.

    Raises:
        UsageError: unknown preset (a folder or hub id needs --weights hub or local).
    """
    if model in presets() or weights == "random":
        known = preset(model)
        defaults: dict[str, Any] = {
            "dtype": known.dtype,
            "batch": known.batch,
            "input_len": known.input_len,
            "output_len": known.output_len,
        }
    else:
        dtype = "bfloat16" if device == "cuda" else "float32"
        defaults = {"dtype": dtype, "batch": 8, "input_len": 128, "output_len": 64}
    asked = {"batch": batch, "input_len": input_len, "output_len": output_len}
    chosen = {**defaults, **{name: size for name, size in asked.items() if size is not None}}
    return Workload(
        model=model, engine=engine, device=device, weights=weights, threads=threads, **chosen
    )


def start(
    settings: Settings, command: str, model: str | None, workload: Workload | None, plan: Plan
) -> Run:
    """Make the run's folder; `execute` then does the work."""
    return Run.create(
        settings.runs_dir,
        command=command,
        model=model,
        workload=workload,
        settings={**settings.for_run(), "plan": plan.model_dump(mode="json")},
        versions=describe("cpu").packages,
    )


def execute(run: Run, report: Report, say: Say, profile_file: Path | None = None) -> Result:
    """Do what is left of the run.

    Raises:
        PatcherError: an expected failure; the run can be resumed.
    """
    settings = run.config.settings
    plan = Plan.model_validate(settings["plan"])
    workload = run.config.workload
    op_name = plan.op
    profile: Profile | None = None
    if plan.whole:
        assert workload is not None
        profile = run.step(
            "profile", lambda: _profile(run, workload, report, profile_file), Profile
        )
        op_name = op_name or _first_covered(profile)
        spot = next((spot for spot in profile.hotspots if spot.op == op_name), None)
        share = f"{spot.share_pct:.1f} % of the profile" if spot else "not in the profile"
        say(f"profile: {len(profile.kernels)} kernels; op {op_name}: {share}")
    if op_name is None:
        raise UsageError("no op to work on", "name one, or run the whole path of a model")

    optimisation = _optimise(run, plan, op_name, report, say)
    made = decision = None
    if optimisation.best_iteration is None:
        say("no candidate is right and faster: nothing to patch")
    elif plan.whole:
        assert workload is not None
        made = run.step("patch", lambda: make_patch(run, optimisation, workload), Made)
        say(f"patch {made.id} in {made.folder}/")
        job = Job(
            workload=workload,
            margin_pct=settings["margin_pct"],
            max_pairs=plan.pairs,
            quality_steps=plan.quality_steps,
            # vLLM is patched when a process starts
            process_pairs=MIN_PROCESS_PAIRS if workload.engine == "vllm" else 0,
            # on a CPU the other points would take longer than all the rest
            elsewhere=shapes_of(workload, None, None) if workload.device == "cuda" else (),
        )
        folder = run.path / made.folder
        measured = run.step("measure", lambda: measure_in_child(job, folder, report), Measured)
        evaluation = run.load(f"{op_name}/{optimisation.best_iteration}/evaluate", Evaluation)
        contract = load_op(op_name).contract
        reconciliation = run.step(
            "reconcile",
            lambda: explain_measured(measured, evaluation, contract, profile),
            Reconciliation,
        )
        decision = run.step(
            "decision", lambda: decide_on(measured, evaluation, reconciliation), Decision
        )
    return Result(run=run.id, op=op_name, optimisation=optimisation, patch=made, decision=decision)


def _profile(run: Run, workload: Workload, report: Report, profile_file: Path | None) -> Profile:
    if profile_file is not None:
        from hotspot import read

        return read(profile_file, workload.model)
    report("profile", 0, 1)
    # a report of nsys names the host and its folders: only what is ranked goes into the run
    with tempfile.TemporaryDirectory() as scratch:
        return capture(workload, Path(scratch))


def _first_covered(profile: Profile) -> str:
    for spot in profile.hotspots:
        if spot.op is not None:
            return spot.op
    raise UsageError(
        "no hotspot of this profile is covered by an op of the library",
        "see `patcher ops`; CONTRIBUTING.md says how to add one",
    )


def _optimise(run: Run, plan: Plan, op_name: str, report: Report, say: Say) -> Optimisation:
    settings = run.config.settings
    op = load_op(op_name)
    device = run.config.workload.device if run.config.workload else None
    language = plan.language or (Language.CUDA if device == "cuda" else Language.CPP)
    kind = "cpu" if language is Language.CPP else "cuda"
    judge_settings = JudgeSettings(
        sweep=plan.sweep,
        threads=plan.threads,
        pairs=plan.judge_pairs,
        policy=Policy.model_validate(settings.get("tripwires", {})),
    )
    model = resolve_model(settings["model"], run)
    analyst = resolve_model(settings["analyst"], run) if settings["analyst"] else None

    def told(progress: LoopProgress) -> None:
        report(f"{op_name}: {progress.stage}", progress.iteration, progress.iterations)
        if progress.attempt:
            tried = progress.attempt
            say(f"  candidate {tried.iteration} ({tried.phase}): {tried.outcome}, {tried.detail}")

    with open_judge(judge_settings) as judge:  # one for all: what it trusts is started once
        return optimize(
            run,
            op,
            language,
            model,
            lambda candidate: judge.evaluate(candidate, report),
            settings["iterations"],
            device_facts(kind),
            analyst=analyst,
            sweep=op.sweep(kind, plan.sweep),
            budget_usd=settings["budget_usd"],
            on_event=told,
        )


def resolve_model(spec: str, run: Run) -> Model:
    """`open_model`, with `replay:demo` for the recording that ships."""
    if spec == DEMO:
        file = resources.files("patcher").joinpath("recordings", "demo.jsonl")
        with resources.as_file(file) as path:
            return open_model(f"replay:{path}", run.path)
    return open_model(spec, run.path)


def device_facts(kind: str) -> str:
    """What the agents should know of the hardware, in words."""
    if kind == "cpu":
        return (
            f"one thread of {describe('cpu').device} ({platform.machine()}); called from Python, "
            "so the fixed cost of a call counts. The same source must also compile and run on "
            "x86-64 without AVX-512 and on 64-bit Arm"
        )
    import torch

    device = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{device.name}: compute capability {major}.{minor}, {device.multi_processor_count} "
        f"multiprocessors, {device.total_memory / 2**30:.0f} GiB, L2 {device.L2_cache_size >> 20} "
        "MiB. Timed as one call per buffer set inside a CUDA graph: no allocation, no "
        "synchronisation and no default-stream launch in a call; the launch itself is microseconds"
    )


def make_patch(run: Run, optimisation: Optimisation, workload: Workload) -> Made:
    """Bundle the best candidate of the loop."""
    from bench import Candidate

    op = load_op(optimisation.op)
    assert optimisation.best_file is not None
    source = (run.path / optimisation.best_file).read_text(encoding="utf-8")
    candidate = Candidate(op=op.name, language=optimisation.language, source=source)
    step = f"{op.name}/{optimisation.best_iteration}/evaluate"
    evaluation = run.load(step, Evaluation)
    if candidate.digest != evaluation.digest:
        raise UsageError("the best candidate's file was changed", "start a new run")
    attempt = optimisation.iterations[optimisation.best_iteration or 0]
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
