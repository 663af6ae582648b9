"""The agent loop as a stage of a run: its models, its judge and its ceilings by the run's
settings."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from patcher.agent import StopRules, run_loop
from patcher.attempts import LoopResult, Progress
from patcher.bench import Language, Op, Record, UsageError, VerificationError
from patcher.bench.judge import JudgeSettings
from patcher.hotspot import Profile
from patcher.judges import LOCAL, open_judges
from patcher.judges.languages import judge_device_kind, judge_hardware, require_here
from patcher.judges.remote import NOT_TOLD
from patcher.judges.same_device import require_same_device
from patcher.kernel_search.context import RunContext
from patcher.models import PROMPT_TOKENS, Model, Role, open_model, sees_images
from patcher.plan import DEMO
from patcher.report.attempts_page import AttemptsPage
from patcher.report.picture import plot
from patcher.report.raster import to_png
from patcher.runs.machine import judging_id
from patcher.runs.run import Run
from patcher.settings import OFF, Settings, resolve
from patcher.strategies.search import Search

ADVISERS: dict[str, Role] = {"analyst": "analyse", "diagnoser": "diagnose"}
"""By the setting that names the model."""


def unadvised(settings: Mapping[str, Any]) -> set[Role]:
    """Roles that a run's settings switch off."""
    return {role for name, role in ADVISERS.items() if settings.get(name) == OFF}


def analyst_of(settings: Settings, language: Language) -> str | None:
    """The model that analyses, as the settings name it; None is the one that generates.

    On a CPU nobody is asked unless named: there are no counters to read, and the loop gained
    nothing by it for a third more tokens (`bench/results/loop`). A recording answers as it did.
    """
    recorded = settings.model.startswith("replay:")
    on_cpu = language.traits.device == "cpu" and not recorded
    return settings.analyst or (OFF if on_cpu else None)


class ProfilePicture(Record):
    """A picture of the profile, for an analyst that sees; a file of the run, or why there is
    none."""

    file: str | None = None
    why: str = ""


class Hardware(Record):
    """What the agents are told of the hardware: settled once, so that a prompt stays the same."""

    words: str


class JudgedContract(Record):
    """What the verdicts of a run are about: contract, reference, inputs and baselines."""

    digest: str
    """`Op.digest`."""


def require_same_op(run: Run, op: Op) -> None:
    """Hold the op against the one that the run began with.

    Raises:
        VerificationError: it was edited, or came with another patcher: verdicts on the two are not
            comparable.
    """
    begun = run.step(
        f"{op.name}/contract", lambda: JudgedContract(digest=op.digest), JudgedContract
    )
    if begun.digest != op.digest:
        raise VerificationError(
            f"{op.name} is not the op that run {run.id} began with: its contract, reference, "
            "inputs or baselines were changed",
            "start a new run, or take the change back and resume this one",
        )


def search_kernel(
    run: Run,
    op: Op,
    language: Language,
    search: Search,
    judge_settings: JudgeSettings,
    where: str,
    report: Callable[[str, int, int], None],
    say: Callable[[str], None],
    on_progress: Callable[[Progress], None] | None = None,
    *,
    counters: bool = True,
    profile: Profile | None = None,
) -> LoopResult:
    """Do what is left of the agent loop on one op, with the models, the judge and the memory that
    the run's settings name.

    Args:
        where: where candidates are judged, as `--judge` names it.
        report: called with (stage, done, total).
        on_progress: hears of each iteration's stages.
        counters: whether right candidates are profiled for the analyst, where ncu works.
        profile: of the served model: the op's share of it bounds what is worth doing, and a
            picture of it goes to an analyst that sees.
    """
    settings = run.config.settings
    if where == LOCAL:
        require_here(language)
    require_same_op(run, op)
    kind = judge_device_kind(where, language)
    carried = RunContext(run, op, language, kind if where == LOCAL else None)
    judge_settings = replace(judge_settings, policy=carried.policy)
    named = _named(settings, tuple(ADVISERS))
    models = {
        role: resolve_model(named[role], run.path) if role in named else None for role in ADVISERS
    }
    without = unadvised(settings)
    rules = {name: settings[name] for name in ("sol_pct", "patience") if name in settings}
    model = resolve_model(settings["model"], run.path)
    pictures: tuple[str, ...] = ()
    seen = "analyse" not in without and sees_images(models["analyst"] or model)
    if profile is not None and seen:
        drawn = run.step("picture", lambda: _drawn(run, profile), ProfilePicture)
        pictures = (drawn.file,) if drawn.file else ()
        if not drawn.file:
            say(f"the analyst gets no picture of the profile: {drawn.why}")
    page = AttemptsPage(run, op.name)

    def heard(progress: Progress) -> None:
        report(f"{op.name}: {progress.stage}", progress.iteration, progress.iterations)
        page.hear(progress)
        if on_progress:
            on_progress(progress)

    hardware = run.step(
        "hardware",
        lambda: Hardware(words=judge_hardware(where, language, judge_settings.threads)),
        Hardware,
    )
    if hardware.words.endswith(NOT_TOLD):
        say(f"the agents are told of {hardware.words}: a worker that ran once before tells it")
    # one for all: what it trusts is started once
    asks = judging_id(run)
    with open_judges(where, judge_settings, asks, report, counters=counters, say=say) as judges:
        found = run_loop(
            run,
            op,
            language,
            model,
            lambda candidate: require_same_device(run, judges.evaluate([candidate])[0]),
            settings["iterations"],
            hardware.words,
            analyst=models["analyst"],
            diagnoser=models["diagnoser"],
            without=without,
            strategy=search.open(),
            rules=StopRules(
                **rules,
                margin_pct=settings["margin_pct"],
                share_pct=op_share_pct(profile, op.name) if profile else None,
            ),
            sweep=op.sweep(kind, judge_settings.sweep),
            prompt_tokens=settings.get("prompt_tokens", PROMPT_TOKENS),
            known_kernels=search.known_kernels,
            pictures=pictures,
            extra=carried.extra,
            adapt=carried.adapt,
            prepare=judges.prepare,
            score=carried.score,
            final=run.done("patch"),
            judge_on_gpu=kind != "cpu",
            on_event=heard,
            say=say,
        )
    say(f"the loop ended ({found.stopped}): {found.stopped_detail}")
    carried.learn(found, say)
    return found


def op_share_pct(profile: Profile, op: str) -> float | None:
    """The op's share of the profile in percent; None where no hotspot is of it."""
    shares = [spot.share_pct for spot in profile.hotspots if spot.op == op]
    return sum(shares) if shares else None


def _drawn(run: Run, profile: Profile) -> ProfilePicture:
    file = "profile.png"
    why = to_png(plot(profile), run.path / file)
    return ProfilePicture(why=why) if why else ProfilePicture(file=file)


def require_models(settings: Mapping[str, Any]) -> None:
    """Refuse models that cannot be asked, before anything is paid or measured for them.

    Raises:
        UsageError: no such provider, or an unreadable recording.
        MissingError: no API key.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for spec in _named(settings, ("model", *ADVISERS)).values():
            resolve_model(spec, Path(scratch))


def require_exchange_folders(run: Run, judge: str | None) -> None:
    """Refuse to put open questions into a folder of the same name elsewhere, where nobody answers
    them: a run keeps no path of its machine, so `exchange:DIR` is below the current folder.

    Args:
        judge: where candidates are judged, if the run's settings say it.

    Raises:
        UsageError: a folder that this run has used is not there.
    """
    steps = [event.step for event in run.events if event.kind == "intent"]
    roles = {step.partition("/ask-")[2].partition("/")[0] for step in steps}
    specs = _named(run.config.settings, ("model", *ADVISERS))
    used = [spec for name, spec in specs.items() if ADVISERS.get(name, "generate") in roles]
    if judge is not None and any(step.endswith("/evaluate") for step in steps):
        used.append(judge)
    for spec in used:
        kind, _, place = spec.partition(":")
        if kind == "exchange" and place and not Path(place).exists():
            raise UsageError(
                f"there is no {place} here, which run {run.id} exchanges files through",
                "resume it in the folder where it was begun: patcher resume "
                f"{shlex.quote(str(run.path.resolve()))}; "
                f"or, to ask anew what is open, create {place}",
            )


def _named(settings: Mapping[str, Any], roles: Sequence[str]) -> dict[str, str]:
    """The models that the settings name, by role; an adviser that is off has none."""
    return {
        role: settings[role]
        for role in roles
        if settings.get(role) and not (role in ADVISERS and settings[role] == OFF)
    }


def resolve_model(spec: str, run_dir: Path) -> Model:
    """`open_model`, with `replay:demo` for the recording that ships."""
    if spec == DEMO:
        file = resources.files("patcher.kernel_search").joinpath("demo.jsonl.xz")
        with resources.as_file(file) as path:
            return open_model(f"replay:{path}", run_dir)
    # where servers are is this machine's business, so it is looked up now, not kept in the run
    return open_model(spec, run_dir, resolve().models)
