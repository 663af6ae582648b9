"""Traffic to a server over HTTP: traces, their points, and what a client measured at one.

A trace is data (`served.toml`). Its requests are drawn by a seed, so that both arms get the same
ones, and no two runs of a process share a prompt that its prefix cache could hold.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.records import Record
from patcher.bench.stats.comparison import Arm

PERCENTILES = (50, 95, 99)
OPEN_S = 20.0
"""Seconds over which requests arrive in a run at a rate, at least."""
LENGTH_TOLERANCE = 0.05
"""Share by which the tokens of a run may differ from what was asked for."""
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TracePart(Record):
    """Requests of one kind; lengths are in tokens."""

    share: float = Field(default=1, gt=0)
    """How often it is drawn, relative to the other parts."""
    input_len: int = Field(ge=1)
    output_len: int = Field(ge=2)
    prefix_len: int = Field(default=0, ge=0)
    """Tokens that begin the prompt, shared with other requests."""
    prefixes: int = Field(default=1, ge=1)
    """How many such beginnings there are."""


class Slo(Record):
    """A request is good if it keeps both; see DistServe, arXiv 2401.09670."""

    ttft_ms: float = Field(gt=0)
    tpot_ms: float = Field(gt=0)


class ServingTrace(Record):
    """Requests that a client sends, and how many at a time."""

    summary: str
    concurrencies: tuple[int, ...] = Field(min_length=1)
    rounds: int = Field(ge=1)
    """Fewest requests of a run for each user."""
    least: int = Field(ge=2)
    """Fewest requests of a run, unless these are more than `most_rounds` for each user."""
    most_rounds: int = Field(ge=1)
    parts: tuple[TracePart, ...] = Field(min_length=1)
    slo: Slo

    def requests(self, concurrency: int, rate: float | None = None) -> int:
        """Requests of one run."""
        if rate is not None:
            return max(self.least, math.ceil(rate * OPEN_S))
        return max(self.rounds * concurrency, min(self.least, self.most_rounds * concurrency))

    @property
    def longest(self) -> int:
        """Most tokens of one sequence."""
        return max(part.input_len + part.output_len for part in self.parts)


class ServedPoint(Record):
    """A trace at one concurrency, or at a rate of requests."""

    trace: str
    concurrency: int = Field(ge=1)
    """Users, each of whom waits for an answer; at a rate, those that the server is set up for."""
    rate: float | None = Field(default=None, gt=0, le=1e4)
    """Requests that arrive a second, at random times and without waiting for answers."""

    @property
    def label(self) -> str:
        """The point as text: `fixed, 8 at a time`, `fixed, 2 requests/s`."""
        if self.rate is not None:
            return f"{self.trace}, {self.rate:g} requests/s"
        return f"{self.trace}, {self.concurrency} at a time"


class TraceRequest(NamedTuple):
    """One request of a trace."""

    prompt: list[int]
    """Token ids."""
    output_len: int


@cache
def traces() -> dict[str, ServingTrace]:
    """All traces of `served.toml`."""
    text = resources.files("patcher.bench.ab").joinpath("served.toml").read_text(encoding="utf-8")
    return {name: ServingTrace(**fields) for name, fields in tomllib.loads(text).items()}


def points_of(
    names: str, concurrencies: Sequence[int] | None = None, rates: Sequence[float] = ()
) -> tuple[ServedPoint, ...]:
    """The points of some traces.

    Args:
        names: names of traces, separated by commas.
        concurrencies: in place of the traces' own.
        rates: requests a second, a point of each trace besides.

    Raises:
        UsageError: there is no such trace, or a point is there twice.
    """
    points: list[ServedPoint] = []
    for name in names.split(","):
        if name not in traces():
            raise UsageError(f"unknown trace {name!r}", f"traces are: {', '.join(traces())}")
        many = tuple(concurrencies or traces()[name].concurrencies)
        points += [ServedPoint(trace=name, concurrency=users) for users in many]
        points += [ServedPoint(trace=name, concurrency=max(many), rate=rate) for rate in rates]
    if len(set(points)) < len(points):
        raise UsageError("a point is there twice", "name each trace, concurrency and rate once")
    return tuple(points)


def requests_of(
    trace: ServingTrace, count: int, vocabulary: Sequence[int], seed: int
) -> list[TraceRequest]:
    """Requests drawn from the trace.

    Shared prefixes are the same for all seeds below the same thousand, since a run's are also those
    of its warm-up: `seed // 1000` draws them.

    Args:
        vocabulary: token ids that prompts may contain.
    """
    rng = random.Random(seed)
    shared = random.Random(f"prefixes {seed // 1000}")
    prefixes = [
        [shared.choices(vocabulary, k=part.prefix_len) for _ in range(part.prefixes)]
        for part in trace.parts
    ]
    found = []
    for index in rng.choices(
        range(len(trace.parts)), [part.share for part in trace.parts], k=count
    ):
        part = trace.parts[index]
        own = rng.choices(vocabulary, k=max(part.input_len - part.prefix_len, 1))
        found.append(TraceRequest(rng.choice(prefixes[index]) + own, part.output_len))
    return found


class ServedRun(Record):
    """What a client measured in one run at one point."""

    point: ServedPoint
    requests: int = Field(ge=1)
    duration_s: _Positive
    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=1)
    output_tokens_per_s: _Positive
    total_tokens_per_s: _Positive
    """Tokens of prompts and outputs per second."""
    goodput_per_s: _Time | None = None
    """Requests per second that kept the trace's SLO; None if the client times no requests."""
    ttft_ms: dict[str, _Time] = Field(default_factory=dict)
    """Time to first token: `p50`, `p95`, `p99`; empty, as the next two, if it times no requests."""
    tpot_ms: dict[str, _Positive] = Field(default_factory=dict)
    """Time per output token of a request, after its first one."""
    itl_ms: dict[str, _Time] = Field(default_factory=dict)
    """Time between two tokens."""
    batch_ms: dict[str, _Time] = Field(default_factory=dict)
    """Time of a whole batch, as percentiles; empty if the client sends none."""
    longest_gap_ms: _Time | None = None
    """The longest wait for a token."""
    stalled: bool = False
    """Whether that is longer than the warm-up explains, in the last run that was tried, too."""
    sm_clock_mhz: int | None = None
    """Median of the samples in the run."""
    throttle_reasons: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        told = {f"p{each}" for each in PERCENTILES}
        times = (self.ttft_ms, self.tpot_ms, self.itl_ms)
        if any(table and set(table) != told for table in times):
            raise ValueError(f"times of requests are {', '.join(sorted(told))}")
        if self.point.rate is not None and not self.tpot_ms:
            raise ValueError("at a rate of requests they are timed")
        return self

    @property
    def user_tokens_per_s(self) -> float | None:
        """Tokens per second that one user sees, by the median time per output token."""
        return 1e3 / self.tpot_ms["p50"] if self.tpot_ms else None

    @property
    def compared(self) -> float:
        """What sides are compared by: output tokens per second; at a rate, where the server gives
        what is asked for, those that one user sees."""
        if self.point.rate is None:
            return self.output_tokens_per_s
        assert self.user_tokens_per_s is not None  # only a client that times requests has rates
        return self.user_tokens_per_s


class StalledRun(Record):
    """A run that was taken again, since a wait in it was longer than the warm-up explains."""

    point: ServedPoint
    longest_gap_ms: float
    limit_ms: float


def refuse_other_traffic(run: ServedRun, asked: Sequence[TraceRequest]) -> None:
    """Check that the client measured what it was asked for: fewer requests or shorter answers are
    another load, at which tokens come faster.

    Raises:
        PatcherError: it did not.
    """
    tokens = sum(request.output_len for request in asked)
    if run.requests != len(asked) or abs(run.output_tokens - tokens) > LENGTH_TOLERANCE * tokens:
        raise PatcherError(
            f"{run.requests:,} requests got {run.output_tokens:,} tokens at {run.point.label}, "
            f"where {len(asked):,} with {tokens:,} were asked for"
        )


def run_of(point: ServedPoint, trace: ServingTrace, found: Mapping[str, Any]) -> ServedRun:
    """One run from a client's times of each request.

    Args:
        found: `duration` in seconds, and by request `input_lens`, `output_lens`, `ttfts` in
            seconds and `itls`, a list of seconds; `ttfts` of failed requests are 0.

    Raises:
        KeyError, TypeError, ValueError, ArithmeticError: it is no such result.
        PatcherError: requests failed, or answers came whole.
    """
    rows = [
        (int(asked), int(given), _seconds(first), [_seconds(gap) for gap in gaps])
        for asked, given, first, gaps in zip(
            found["input_lens"], found["output_lens"], found["ttfts"], found["itls"], strict=True
        )
    ]
    good = [row for row in rows if row[1] > 0 and row[2] > 0]
    if len(good) < len(rows) or not rows:
        errors = list(filter(None, (str(error).strip() for error in found.get("errors", ()))))
        last = f": {errors[0].splitlines()[-1][:300]}" if errors else ""
        raise PatcherError(
            f"{len(rows) - len(good)} of {len(rows)} requests failed at {point.label}{last}"
        )
    seconds = float(found["duration"])
    ttfts = [1e3 * first for _, _, first, _ in rows]
    # several tokens may arrive at once, so a request's time is divided by its tokens
    tpots = [1e3 * sum(gaps) / max(tokens - 1, 1) for _, tokens, _, gaps in rows]
    between = [1e3 * gap for *_, gaps in rows for gap in gaps]
    if not np.median(tpots) > 0:
        raise PatcherError(f"answers came whole, so that no token was timed, at {point.label}")
    kept = sum(
        first <= trace.slo.ttft_ms and each <= trace.slo.tpot_ms
        for first, each in zip(ttfts, tpots, strict=True)
    )
    tokens_in, tokens_out = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return ServedRun(
        point=point,
        requests=len(rows),
        duration_s=seconds,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        output_tokens_per_s=tokens_out / seconds,
        total_tokens_per_s=(tokens_in + tokens_out) / seconds,
        goodput_per_s=kept / seconds,
        ttft_ms=_percentiles(ttfts),
        tpot_ms=_percentiles(tpots),
        itl_ms=_percentiles(between),
        longest_gap_ms=max([*ttfts, *between]),
    )


def _seconds(value: Any) -> float:
    found = float(value)
    if not 0 <= found < math.inf:
        raise ValueError(f"{found} is no time in seconds")
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES)
    return {f"p{each}": float(value) for each, value in zip(PERCENTILES, found, strict=True)}


def arm_orders(pairs: int) -> Iterator[tuple[int, Arm]]:
    """The processes of some pairs in ABBA order: each pair's number, and the arm."""
    for number in range(pairs):
        both: tuple[Arm, Arm] = ("baseline", "patched")
        for arm in both if number % 2 == 0 else both[::-1]:
            yield number, arm
