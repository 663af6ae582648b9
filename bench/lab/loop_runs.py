"""What runs of the agent loop came to, a row a run: for tables over many of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from patcher.agent import recorded_stop
from patcher.attempts import Attempt
from patcher.bench import Evaluation, Outcome, Record, UsageError
from patcher.bench.judge.evaluation import Timing, geomean
from patcher.bench.stats.intervals import half_width
from patcher.bench.stats.shares import wilson
from patcher.models import ModelCall
from patcher.models.ceilings import account
from patcher.plan import RunPlan
from patcher.runs.run import Run
from patcher.status import attempts

STARTED = "optimize"
"""The command whose runs count."""
UNJUDGED = {"generation_failure", "compilation_failure", "compiled"}
"""Outcomes of candidates that no check can run."""
RIGHT = {Outcome.CORRECT.value, Outcome.TOO_SLOW.value}
RESAMPLES = 10_000
FEWEST_RESAMPLED = 5
"""With fewer values a bootstrap's interval is far too narrow."""


class LoopRow(Record):
    """One run of the loop on one op."""

    run: str
    op: str
    language: str
    strategy: str
    seed: int
    models: tuple[str, ...]
    """Those that wrote sources, as they name themselves."""
    ended: str | None
    """Why the loop ended; None: the run is partial, and counts as such."""
    iterations: int
    """Candidates so far, also what held no source."""
    first_right: int | None
    """Iterations until something was right, from 1."""
    outcomes: tuple[str, ...]
    """By iteration."""
    speedup: float | None
    """Of the best right candidate, over the faster of its baselines; None: none is right."""
    low: float | None
    high: float | None
    """Geometric means over the points of the ends of their 95 % intervals: wider than the interval
    of the mean, as if all points erred together."""
    baseline: str | None
    baseline_us: float | None
    candidate_us: float | None
    """Geometric means over the points."""
    missing_baselines: tuple[str, ...] = ()
    """Those that did not run there: the faster one may be among them."""
    points: tuple[str, ...] = ()
    device: str | None = None
    tokens: int | None
    """The most that they can have been; of a recording, what it says; None: nobody counted."""
    usd: float
    judge_s: float
    gpu_s: float
    best_by: tuple[float | None, ...] = ()
    """By iteration: `speedup` of the best right candidate until then."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    """As providers count; None: they did not count each reply."""
    input_characters: int = 0
    output_characters: int = 0
    """Of all questions and of the text of their answers."""

    @property
    def gain(self) -> float:
        """Of what a user would apply: the baseline stays where nothing is right and faster."""
        return max(self.speedup or 1.0, 1.0)

    @property
    def judged(self) -> int:
        """Candidates that the judge could run."""
        return sum(each not in UNJUDGED for each in self.outcomes)

    @property
    def refused(self) -> int:
        """Candidates that the judge ran and found wrong."""
        return self.judged - sum(each in RIGHT for each in self.outcomes)

    def best_until(self, iteration: int) -> float | None:
        """`best_by` of an iteration from 1, also after the loop ended."""
        known = self.best_by[:iteration]
        return known[-1] if known else None


class Estimated(Record):
    """A figure with the ends of its 95 % interval; None where there are too few values for one."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3g}"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def loop_row(run: Run) -> LoopRow | None:
    """The row of one run; None where no candidate was asked for yet, or it is no search of an op.

    Raises:
        VerificationError: the run was changed.
    """
    plan = RunPlan.model_validate(run.config.settings.get("plan") or {})
    if run.config.command != STARTED or plan.op is None:
        return None
    found = attempts(run)
    stopped = recorded_stop(run, plan.op)
    judged = {
        one.iteration: run.load(f"{plan.op}/{one.iteration}/evaluate", Evaluation)
        for one in found
        if one.file is not None and one.duplicate_of is None
    }
    right = [one for one in judged.values() if one.right and one.geomean_speedup is not None]
    best = max(right, key=lambda one: one.geomean_speedup or 0.0, default=None)
    first = next((one.iteration for one in found if one.geomean_speedup is not None), None)
    timings = best.timings if best else ()
    used = account(run.events)
    spent = used.committed
    speedups = {place: one.geomean_speedup or 0.0 for place, one in judged.items() if one.right}
    bests = [
        max((each for at, each in speedups.items() if at <= one.iteration), default=None)
        for one in found
    ]
    asked = [
        run.load(name, ModelCall)
        for name in run.state.results
        if name.startswith(f"{plan.op}/") and "/ask-" in name
    ]
    return LoopRow(
        run=run.id,
        op=plan.op,
        language=str(plan.language or "cpp"),
        strategy=plan.search.strategy,
        seed=plan.search.seed,
        models=tuple(dict.fromkeys(one.model for one in found)),
        ended=stopped.reason if stopped else None,
        iterations=len(found),
        first_right=None if first is None else first + 1,
        outcomes=tuple(one.outcome.value for one in found),
        speedup=best.geomean_speedup if best else None,
        low=geomean([each.speedup_low for each in timings]) if best else None,
        high=geomean([each.speedup_high for each in timings]) if best else None,
        baseline=best.baseline if best else None,
        baseline_us=geomean([each.baseline_us for each in timings]) if best else None,
        candidate_us=geomean([each.candidate_us for each in timings]) if best else None,
        missing_baselines=best.missing_baselines if best else (),
        points=points_of(timings),
        device=best.environment.device if best and best.environment else None,
        tokens=spent.tokens or _said(found),
        usd=spent.usd,
        judge_s=sum(one.total_s or 0.0 for one in judged.values()),
        gpu_s=spent.gpu_s,
        best_by=tuple(bests),
        input_tokens=_total(each.reply.usage.input_tokens for each in asked),
        output_tokens=_total(each.reply.usage.output_tokens for each in asked),
        input_characters=sum(len(one.request.system) + len(one.request.prompt) for one in asked),
        output_characters=sum(len(each.reply.text) for each in asked),
    )


def points_of(timings: Iterable[Timing]) -> tuple[str, ...]:
    """The sizes of each point in words."""
    return tuple(",".join(f"{name}={size}" for name, size in each.axes.items()) for each in timings)


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum; None where one is not known, or there is none."""
    known = list(counts)
    return sum(each for each in known if each is not None) if known and None not in known else None


def _said(found: Sequence[Attempt]) -> int | None:
    counts = [(each.usage.input_tokens, each.usage.output_tokens) for each in found]
    known = [each for pair in counts for each in pair if each is not None]
    return sum(known) if known else None


def runs_below(folder: Path) -> Iterator[Run]:
    """Every run in a folder, at any depth, oldest first, opened to be read.

    Raises:
        UsageError: there is none.
    """
    found = sorted(folder.rglob("run.json"))
    if not found:
        raise UsageError(f"no runs in {folder}", "give the folder of runs (--runs-dir)")
    for path in found:
        yield Run.open(path.parent, read_only=True)


def geomean_of(values: Sequence[float], problems: Sequence[str] = ()) -> Estimated:
    """The geometric mean of ratios, with Student's interval.

    Args:
        values: at least one.
        problems: of each value the problem. With three problems and more the interval is over the
            problems' means, as values of one problem are no independent witnesses.
    """
    logs = [math.log(each) for each in values]
    names = tuple(dict.fromkeys(problems))
    if len(names) >= 3:
        logs = [
            statistics.fmean(log for log, of in zip(logs, problems, strict=True) if of == name)
            for name in names
        ]
    mean, half = statistics.fmean(logs), half_width(logs)
    known = math.isfinite(half)
    return Estimated(
        value=math.exp(mean),
        low=math.exp(mean - half) if known else None,
        high=math.exp(mean + half) if known else None,
    )


def bootstrap_geomean(values: Sequence[float]) -> Estimated:
    """The geometric mean of ratios, with the percentile bootstrap's interval over the values: each
    has to be of a problem of its own. Seeded, so that equal values give equal intervals."""
    logs = np.log(np.array(values))
    middle = math.exp(float(logs.mean()))
    if len(logs) < FEWEST_RESAMPLED:
        return Estimated(value=middle, low=None, high=None)
    drawn = np.random.default_rng(0).choice(logs, (RESAMPLES, len(logs))).mean(1)
    low, high = (math.exp(float(each)) for each in np.quantile(drawn, [0.025, 0.975]))
    return Estimated(value=middle, low=low, high=high)


def mean_of(values: Sequence[float]) -> Estimated:
    """The arithmetic mean, with Student's interval."""
    mean, half = statistics.fmean(values), half_width(values)
    known = math.isfinite(half)
    return Estimated(
        value=mean, low=mean - half if known else None, high=mean + half if known else None
    )


def mean_known(values: Iterable[float | None]) -> float | None:
    """The mean of what is known; None of nothing."""
    known = [each for each in values if each is not None]
    return statistics.fmean(known) if known else None


def median_of(values: Sequence[float]) -> Estimated:
    """The median, with the interval between order statistics that no distribution is assumed of."""
    ordered, count = sorted(values), len(values)
    below = [math.comb(count, each) / 2**count for each in range(count + 1)]
    rank = next(each for each in range(count + 1) if math.fsum(below[: each + 1]) > 0.025)
    known = 0 < rank <= count - rank + 1
    return Estimated(
        value=statistics.median(ordered),
        low=ordered[rank - 1] if known else None,
        high=ordered[count - rank] if known else None,
    )


def share_of(count: int, of: int) -> Estimated:
    """A share, with Wilson's interval."""
    low, high = wilson(count / of, of)
    return Estimated(value=count / of, low=low, high=high)
