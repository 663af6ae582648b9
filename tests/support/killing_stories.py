"""Runs that `killing.py` kills: real but for what costs time or money, which is scripted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from tried_sample import timed

import patcher.runs.run
from patcher.agent import loop as agent
from patcher.agent import run_loop
from patcher.attempts.history import CandidateRequest, IterationResult
from patcher.bench import Candidate, Check, Evaluation, Language, Outcome, load_op
from patcher.models import Reply, Request, Usage
from patcher.models.budget import Budget
from patcher.models.ceilings import SpendingLimits
from patcher.prompting.rendering import Prompts
from patcher.runs.run import Run
from patcher.strategies import Refine

Effect = Callable[[str], AbstractContextManager[None]]
"""Marks an effect by the name of its step, from its beginning until its reply is there."""
OP = "fused_add_rms_norm"
COST_USD = 0.25
WORST_USD = 1.0
VERDICTS: dict[str, float | Outcome] = {
    "0": Outcome.COMPILATION_FAILURE,
    "1": 1.2,
    "2": 2.0,
}


class ScriptedModel:
    """A double of a paid API. Each reply is another one, so a second would show."""

    name = "scripted"

    def __init__(self, effect: Effect) -> None:
        self._effect = effect

    def worst_cost_usd(self, request: Request) -> float | None:
        return WORST_USD

    def ask(self, request: Request) -> Reply:
        with self._effect(request.step):
            text = json.dumps({"bottleneck": "latency", "change": "x", "expected_speedup": 2.0})
            if request.role == "generate":
                iteration = request.step.split("/")[1]
                text = f"```cpp\nvoid {OP}() {{}} // {iteration}\n```\n"
            return Reply(
                text=text,
                model=self.name,
                usage=Usage(input_tokens=100, output_tokens=50, cost_usd=COST_USD),
                stop_reason="end_turn",
                source="api",
                prompt_digest=request.digest,
            )


class Pairs:
    """Two candidates in the first round, then refinement."""

    name = "pairs"

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        if not tried:
            return (CandidateRequest(kind="generate"), CandidateRequest(kind="generate"))
        return Refine().next(tried, left)


def loop(root: Path, effect: Effect) -> None:
    """The agent loop: a round of two, then one with an analysis."""
    with begun(root) as run:
        work(run, effect, 3)


def whole(root: Path, effect: Effect) -> None:
    """Profile, loop, patch, A/B, decision, report."""
    import patcher.integrate.manifest
    from patcher import pipeline
    from patcher.commands.workloads import workload_for
    from patcher.models.ceilings import Account
    from patcher.report import gather

    profile, measured, built = _canned()

    def done(step: str, record: Any) -> Any:
        with effect(step):
            return record

    patcher.integrate.manifest.datetime = _Stopped  # type: ignore[attr-defined]
    # it holds times, and what a kill leaves unknown; the killer holds the money against the calls
    gather.account = lambda _: Account()  # type: ignore[assignment]
    pipeline._profile = lambda *_: done("profile", profile)  # type: ignore[assignment]
    pipeline.compare_patch = lambda *_: done("measure", measured)  # type: ignore[assignment]
    pipeline.build = lambda *_: built  # type: ignore[attr-defined]
    pipeline.search_kernel = lambda run, *_, **__: work(run, effect, 2)  # type: ignore[assignment]
    plan = pipeline.RunPlan(op=OP, language=Language.CPP)
    asked = {
        "command": "run",
        "model": "gpt-oss-tiny",
        "workload": workload_for("gpt-oss-tiny", "cpu"),
        "settings": {
            "margin_pct": 0.5,
            "model": pipeline.DEMO,
            "plan": plan.model_dump(mode="json"),
        },
    }
    with begun(root, **asked) as run:
        pipeline.execute(run, lambda *_: None, lambda *_: None)
        gather.write_report(run, ("html", "md", "json"))


@cache
def _canned() -> tuple[Any, Any, Any]:
    """What was profiled, measured and built."""
    from report_sample import sample

    from patcher.ab.measurement import Measurement
    from patcher.bench.toolchains import Built
    from patcher.hotspot import read
    from patcher.integrate import Receipt

    report = sample()
    receipt = Receipt(patch_id="p", digest="d", pid=1, calls={f"{OP} tokens=8": 3})
    measured = Measurement(
        throughput=report.throughput,
        quality=report.quality,
        receipt=receipt,
        quality_receipt=receipt,
        reverted_identical=True,
    )
    built = Built(
        language=Language.CPP,
        path=None,
        binding="tvm-ffi",
        command="g++",
        log="",
        seconds=0,
        cached=True,
    )
    profile = read(Path(__file__).parents[1] / "data/nsys/decode.sqlite", "gpt-oss-20b")
    return profile, measured, built


STORIES: dict[str, Callable[[Path, Effect], None]] = {"loop": loop, "whole": whole}


def work(run: Run, effect: Effect, iterations: int) -> Any:
    def judge(candidate: Candidate) -> Evaluation:
        iteration = candidate.source.rsplit("// ", 1)[-1].strip()
        with effect(f"{OP}/{iteration}/evaluate"):
            return verdict(candidate, VERDICTS[iteration])

    agent.Prompts = _prompts  # type: ignore[attr-defined]
    return run_loop(
        run,
        load_op(OP),
        Language.CPP,
        ScriptedModel(effect),
        judge,
        iterations,
        "a CPU",
        strategy=Pairs(),
        budget=Budget(run, SpendingLimits(usd=100.0, tokens=10_000_000, minutes=60)),
    )


def begun(root: Path, **asked: Any) -> Run:
    """The run in the folder, or a new one; a clock that stands makes all runs the same."""
    patcher.runs.run.datetime = _Stopped  # type: ignore[attr-defined]
    patcher.runs.run.secrets = _NoSecrets  # type: ignore[attr-defined]
    if found := Run.list(root):
        return Run.open(found[0])
    if root.is_dir():
        for rest in root.iterdir():
            shutil.rmtree(rest)  # no run yet: whoever began it begins again
    return Run.create(root, **{"command": "optimize", **asked})


@cache
def _templates() -> list[Any]:
    return []


def _prompts(*arguments: Any, **named: Any) -> Any:
    """Made once: compiling the templates takes half of a life."""
    known = _templates()
    if not known:
        known.append(Prompts(*arguments, **named))
    return known[0]


class _Stopped(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> _Stopped:
        return cls(2026, 1, 1, tzinfo=UTC)


class _NoSecrets:
    @classmethod
    def token_hex(cls, count: int) -> str:
        return "0" * 2 * count


def verdict(candidate: Candidate, said: float | Outcome) -> Evaluation:
    common: dict[str, Any] = {
        "op": candidate.op,
        "language": candidate.language,
        "digest": candidate.digest,
    }
    if isinstance(said, Outcome):
        check = Check(name="build", passed=False, detail="an error")
        return Evaluation(**common, outcome=said, checks=(check,), log="unit.cpp:7: error")
    return Evaluation(
        **common,
        outcome=Outcome.CORRECT,
        checks=(Check(name="values", passed=True, detail="fine"),),
        baseline="eager",
        baselines={"eager": "10 us"},
        timings=(timed(said),),
        geomean_speedup=said,
    )
