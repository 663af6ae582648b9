"""The agent loop as a stage of a run: its models, its judge and its ceilings by the run's
settings."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

from bench import Candidate, Evaluation, Language, Op, Record
from bench.judge import JudgeSettings
from patcher.agent import Rules, optimize
from patcher.attempts import Optimisation, Progress
from patcher.index import AttemptsPage
from patcher.judges import LOCAL, facts, judged_on, open_judges
from patcher.judges.one_device import hold
from patcher.languages import require_here
from patcher.models import Model, open_model
from patcher.models.budget import Budget
from patcher.prompt_room import PROMPT_TOKENS
from patcher.run import Run
from patcher.searching import Search
from patcher.settings import resolve

DEMO = "replay:demo"
"""The recorded conversation that ships with patcher."""


class Hardware(Record):
    """What the agents are told of the hardware: settled once, so that a prompt stays the same."""

    words: str


def optimise(
    run: Run,
    op: Op,
    language: Language,
    search: Search,
    judge_settings: JudgeSettings,
    where: str,
    report: Callable[[str, int, int], None],
    say: Callable[[str], None],
    told: Callable[[Progress], None] | None = None,
    *,
    counters: bool = True,
    share_pct: float | None = None,
) -> Optimisation:
    """What is left of the loop on one op.

    Args:
        where: where candidates are judged: `local` or `exchange:DIR`.
        report: called with (stage, done, total).
        told: hears of each iteration's stages.
        counters: whether right candidates are profiled for the analyst, where ncu works.
        share_pct: the op's share of the served model's time, where it is known.
    """
    settings = run.config.settings
    if where == LOCAL:
        require_here(language)
    kind = judged_on(where, language)
    models = {
        role: resolve_model(settings[role], run) if settings.get(role) else None
        for role in ("analyst", "diagnoser")
    }
    rules = {name: settings[name] for name in ("light_pct", "reverts") if name in settings}
    page = AttemptsPage(run, op.name)

    def heard(progress: Progress) -> None:
        report(f"{op.name}: {progress.stage}", progress.iteration, progress.iterations)
        page.hear(progress)
        if told:
            told(progress)

    hardware = run.step("hardware", lambda: Hardware(words=facts(where, language)), Hardware)
    # one for all: what it trusts is started once
    with open_judges(where, judge_settings, run.id, report, counters=counters, say=say) as judges:

        def judge(candidate: Candidate) -> Evaluation:
            return hold(run, judges.evaluate([candidate])[0])

        found = optimize(
            run,
            op,
            language,
            resolve_model(settings["model"], run),
            judge,
            settings["iterations"],
            hardware.words,
            analyst=models["analyst"],
            diagnoser=models["diagnoser"],
            strategy=search.open(),
            rules=Rules(**rules, margin_pct=settings["margin_pct"], share_pct=share_pct),
            sweep=op.sweep(kind, judge_settings.sweep),
            prompt_tokens=settings.get("prompt_tokens", PROMPT_TOKENS),
            elsewhere=search.elsewhere,
            prepare=judges.prepare,
            budget=Budget(run, judge_on_gpu=kind != "cpu", say=say),
            on_event=heard,
        )
    say(f"the loop ended ({found.stopped}): {found.stopped_detail}")
    return found


def resolve_model(spec: str, run: Run) -> Model:
    """`open_model`, with `replay:demo` for the recording that ships."""
    if spec == DEMO:
        file = resources.files("patcher").joinpath("recordings", "demo.jsonl")
        with resources.as_file(file) as path:
            return open_model(f"replay:{path}", run.path)
    # where servers are is this machine's business, so it is looked up now, not kept in the run
    return open_model(spec, run.path, resolve().models)
