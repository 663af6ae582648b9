"""`python -m patcher.bench.lab statistics`: verdicts on synthetic noise.

Each row simulates whole sessions with warm-up pair, looks, alpha spending, interval and sign test,
with the defaults of `patcher throughput`. The noise of a pair's log-ratio has a standard deviation
of 0.5 % over the session, for every kind of noise. The order of arms is drawn as in a session.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from patcher.bench.records import Record
from patcher.bench.stats.compare import Judgement, judge
from patcher.bench.stats.comparison import Verdict
from patcher.bench.stats.intervals import (
    DEFAULT_PAIRS,
    LOOKS,
    Look,
    first_decided,
    pairs_needed,
    schedule,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

PAIR_SD_PCT = 0.5
RUNS = 3000
POWER_RUNS = 1000
TRUTHS_PCT = (0.0, 0.5, 1.0, -1.0)
"""True gains: A/A, exactly the margin (which an accept must exceed), and two planted ones."""
POWER_PAIRS = (12, 18, 24, 30, 36, 48, 60, 66, 90)
PROCESS_SD_PCT = 0.1
"""SD between process pairs, as measured with identical vLLM processes on an H200."""
PROCESS_COUNTS = (1, 3, 4, 5, 6)
PAIRS_A_PROCESS = 12


class Row(Record):
    """Verdicts on one kind of noise: a row of a table."""

    table: Literal["verdicts", "power", "pairs_needed", "processes"]
    noise: str
    truth_pct: float
    margin_pct: float = 0.5
    pair_sd_pct: float = PAIR_SD_PCT
    max_pairs: int
    looks: int = LOOKS
    process_pairs: int = 0
    process_aware: bool = False
    """Whether the verdict used the process of each pair."""
    runs: int
    accept: int
    reject: int
    mean_pairs: float
    """Mean number of usable pairs until a look was conclusive."""


def _scaled_ar1(draw: np.random.Generator, count: int, rho: float) -> Floats:
    noise = draw.standard_normal(count)
    for index in range(1, count):
        noise[index] = rho * noise[index - 1] + math.sqrt(1 - rho * rho) * noise[index]
    return noise


def _half_drift(draw: np.random.Generator, drift: Floats) -> Floats:
    """Noise with half of its variance from a drift, and half independent."""
    return math.sqrt(0.5) * (drift + draw.standard_normal(len(drift)))


def _linear(draw: np.random.Generator, count: int) -> Floats:
    import numpy as np

    line = np.linspace(-math.sqrt(3), math.sqrt(3), count) * draw.choice([-1.0, 1.0])
    return _half_drift(draw, line)


def _walk(draw: np.random.Generator, count: int, centred: bool) -> Floats:
    """A random walk, centred on the session's mean, or from zero.

    If it starts at zero, the session's mean itself is off by about 0.3 %.
    """
    import numpy as np

    steps = np.cumsum(draw.standard_normal(count))
    if centred:
        return _half_drift(draw, (steps - steps.mean()) / math.sqrt(count / 6))
    return _half_drift(draw, steps / math.sqrt(count / 2))


def _two_states(draw: np.random.Generator, count: int) -> Floats:
    """Two clock states of five pairs on average, which affect one arm more than the other."""
    import numpy as np

    state = np.cumsum(draw.random(count) < 0.2) % 2 * 2.0 - 1.0
    return _half_drift(draw, state * draw.choice([-1.0, 1.0]))


def _stalls(draw: np.random.Generator, count: int) -> Floats:
    """One pair in fifty is off by 15 to 50 standard deviations, as after a stall of the machine."""
    import numpy as np

    size = draw.uniform(15, 50, count) * draw.choice([-1.0, 1.0], count)
    noise = draw.standard_normal(count) + np.where(draw.random(count) < 0.02, size, 0.0)
    return noise / math.sqrt(1 + 0.02 * (50**3 - 15**3) / (3 * (50 - 15)))


NOISE: dict[str, Callable[[Any, int], Any]] = {
    "independent": lambda draw, count: draw.standard_normal(count),
    "AR(1), rho 0.3": lambda draw, count: _scaled_ar1(draw, count, 0.3),
    "AR(1), rho 0.6": lambda draw, count: _scaled_ar1(draw, count, 0.6),
    "linear drift": _linear,
    "random walk": lambda draw, count: _walk(draw, count, centred=True),
    "random walk from zero": lambda draw, count: _walk(draw, count, centred=False),
    "heavy tails, t with 3 degrees": lambda draw, count: draw.standard_t(3, count) / math.sqrt(3),
    "two clock states": _two_states,
    "rare stalls": _stalls,
    "order effect": lambda draw, count: draw.standard_normal(count),
}
"""Generators of noise of unit variance for a number of pairs, by name."""
ORDER_EFFECT_SD = {"order effect": 2.0}
"""Standard deviations by which the arm that runs first is slower, for rows of that name."""


def session(
    ratios: Floats,
    patched_first: NDArray[np.bool_],
    max_pairs: int,
    margin_pct: float = 0.5,
    looks: int = LOOKS,
) -> tuple[Verdict, int]:
    """Simulate one session; return its verdict and the number of usable pairs.

    Args:
        ratios: log-ratios of the pairs.
        patched_first: for each pair, whether the patched arm ran first.
        max_pairs: most pairs after the warm-up.
        margin_pct: margin in percent.
        looks: number of looks.
    """

    used = 0

    def at(look: Look) -> Judgement:
        nonlocal used
        used = look.taken - 1
        usable = slice(1, look.taken)
        return judge(
            ratios[usable].tolist(),
            margin_pct,
            look.confidence_pct,
            patched_first=patched_first[usable].tolist(),
        )

    judgement = first_decided(schedule(max_pairs, looks), at)
    assert judgement is not None
    return judgement.verdict, used


def sessions(
    noise: str,
    truth_pct: float,
    runs: int,
    max_pairs: int = DEFAULT_PAIRS,
    table: Literal["verdicts", "power", "pairs_needed"] = "verdicts",
    pair_sd_pct: float = PAIR_SD_PCT,
    margin_pct: float = 0.5,
) -> Row:
    """Simulate sessions with one kind of noise. The seed follows from the arguments, so that a row
    is reproducible.
    """
    draw, order = (
        _generator(list(NOISE).index(noise) + apart, truth_pct, max_pairs) for apart in (0, 200)
    )
    count = schedule(max_pairs, LOOKS)[-1].taken
    verdicts: list[Verdict] = []
    pairs = 0
    for _ in range(runs):
        first = _abba(order, count)
        spread = NOISE[noise](draw, count) - ORDER_EFFECT_SD.get(noise, 0.0) * (2 * first - 1)
        ratios = spread * pair_sd_pct / 100 + math.log1p(truth_pct / 100)
        verdict, used = session(ratios, first, max_pairs, margin_pct)
        verdicts.append(verdict)
        pairs += used
    return Row(
        table=table,
        noise=noise,
        truth_pct=truth_pct,
        margin_pct=margin_pct,
        pair_sd_pct=pair_sd_pct,
        max_pairs=max_pairs,
        runs=runs,
        accept=verdicts.count("accept"),
        reject=verdicts.count("reject"),
        mean_pairs=round(pairs / runs, 1),
    )


def process_pairs(
    count: int,
    truth_pct: float,
    margin_pct: float,
    pair_sd_pct: float,
    runs: int,
    aware: bool,
) -> Row:
    """Simulate comparisons over `count` process pairs, each with its own bias, and one look."""
    import numpy as np

    draw, order = (
        _generator(count + apart, truth_pct, round(1000 * pair_sd_pct)) for apart in (100, 300)
    )
    owner = np.repeat(np.arange(count), PAIRS_A_PROCESS)
    verdicts: list[Verdict] = []
    for _ in range(runs):
        bias = draw.standard_normal(count) * PROCESS_SD_PCT / 100
        noise = draw.standard_normal(len(owner)) * pair_sd_pct / 100
        ratios = bias[owner] + noise + math.log1p(truth_pct / 100)
        processes = owner.tolist() if aware else None
        first = _abba(order, len(owner)).tolist()
        verdicts.append(
            judge(ratios.tolist(), margin_pct, processes=processes, patched_first=first).verdict
        )
    return Row(
        table="processes",
        noise=f"independent, and {PROCESS_SD_PCT:g} % between process pairs",
        truth_pct=truth_pct,
        margin_pct=margin_pct,
        pair_sd_pct=pair_sd_pct,
        max_pairs=len(owner),
        looks=1,
        process_pairs=count,
        process_aware=aware,
        runs=runs,
        accept=verdicts.count("accept"),
        reject=verdicts.count("reject"),
        mean_pairs=len(owner),
    )


def _abba(order: np.random.Generator, count: int) -> NDArray[np.bool_]:
    """For each pair, whether the patched arm runs first: drawn for one of two neighbours."""
    import numpy as np

    drawn = order.random(-(-count // 2)) < 0.5
    return np.stack([drawn, ~drawn], axis=1).ravel()[:count]


def _generator(kind: int, truth_pct: float, size: int) -> np.random.Generator:
    import numpy as np

    return np.random.default_rng([kind, round(1000 * (truth_pct + 100)), size])


def rows(runs: int = RUNS, power_runs: int = POWER_RUNS) -> Iterator[Row]:
    """Simulate all rows of the tables."""
    for noise in NOISE:
        for truth in TRUTHS_PCT:
            yield sessions(noise, truth, runs)
        for pairs in POWER_PAIRS:
            yield sessions(noise, 1.0, power_runs, pairs, "power")
    for noise, rho in (("independent", 0.0), ("AR(1), rho 0.3", 0.3), ("AR(1), rho 0.6", 0.6)):
        for sd, gain in ((0.5, 2.0), (0.5, 1.0), (0.5, 0.8), (0.25, 1.0), (0.1, 0.6)):
            needed = pairs_needed(sd, gain, rho=rho)
            assert needed is not None
            yield sessions(noise, gain, power_runs, needed, "pairs_needed", sd)
    for count in PROCESS_COUNTS:
        for aware in (False, True):
            for sd in (0.05, PAIR_SD_PCT):
                yield process_pairs(count, 0.0, 0.0, sd, runs, aware)
                yield process_pairs(count, 1.0, 0.5, sd, runs, aware)


def statistics_table() -> None:
    """Print one JSON line per row on stdout, and progress on stderr."""
    for row in rows():
        print(json.dumps(row.model_dump(mode="json")), flush=True)
        print(f"{row.table}: {row.noise}, {row.truth_pct:+g} %", file=sys.stderr, flush=True)
