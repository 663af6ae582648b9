"""`python -m patcher.bench.lab statistics`: what the verdict does on synthetic noise.

Every row simulates whole sittings: warm-up pair, looks, alpha spending, interval, sign test, in the
numbers of `patcher throughput`. The noise is that of a pair's log-ratio, with a standard deviation
of 0.5 % over the sitting whatever its kind; which arm begins a pair is drawn as there.
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
"""A/A, a gain of just the margin (which an accept must exceed), the two planted ones."""
POWER_PAIRS = (12, 18, 24, 30, 36, 48, 60, 66, 90)
PROCESS_SD_PCT = 0.1
"""What two identical vLLM processes on one H200 differed by as long as they lived."""
PROCESS_COUNTS = (1, 3, 4, 5, 6)
PAIRS_A_PROCESS = 12


class Row(Record):
    """Verdicts on one kind of noise."""

    table: Literal["verdicts", "power", "pairs_needed", "processes"]
    noise: str
    truth_pct: float
    margin_pct: float = 0.5
    pair_sd_pct: float = PAIR_SD_PCT
    max_pairs: int
    looks: int = LOOKS
    process_pairs: int = 0
    process_aware: bool = False
    """Whether the verdict was told which process each pair ran in."""
    runs: int
    accept: int
    reject: int
    mean_pairs: float
    """Usable pairs taken until a look decided."""


def _scaled_ar1(draw: np.random.Generator, count: int, rho: float) -> Floats:
    found = draw.standard_normal(count)
    for index in range(1, count):
        found[index] = rho * found[index - 1] + math.sqrt(1 - rho * rho) * found[index]
    return found


def _half_drift(draw: np.random.Generator, drift: Floats) -> Floats:
    """Half of the variance drifts, half is independent."""
    return math.sqrt(0.5) * (drift + draw.standard_normal(len(drift)))


def _linear(draw: np.random.Generator, count: int) -> Floats:
    import numpy as np

    line = np.linspace(-math.sqrt(3), math.sqrt(3), count) * draw.choice([-1.0, 1.0])
    return _half_drift(draw, line)


def _walk(draw: np.random.Generator, count: int, centred: bool) -> Floats:
    """A random walk; centred on the sitting's mean, or off from zero, where the sitting's mean is
    itself off by 0.3 % or so.
    """
    import numpy as np

    steps = np.cumsum(draw.standard_normal(count))
    if centred:
        return _half_drift(draw, (steps - steps.mean()) / math.sqrt(count / 6))
    return _half_drift(draw, steps / math.sqrt(count / 2))


def _two_states(draw: np.random.Generator, count: int) -> Floats:
    """Two clocks, five pairs in each on average, which one arm feels more than the other."""
    import numpy as np

    state = np.cumsum(draw.random(count) < 0.2) % 2 * 2.0 - 1.0
    return _half_drift(draw, state * draw.choice([-1.0, 1.0]))


def _stalls(draw: np.random.Generator, count: int) -> Floats:
    """One pair in fifty is 15 to 50 times as far off as the others: the machine stood still in one
    of its windows."""
    import numpy as np

    size = draw.uniform(15, 50, count) * draw.choice([-1.0, 1.0], count)
    found = draw.standard_normal(count) + np.where(draw.random(count) < 0.02, size, 0.0)
    return found / math.sqrt(1 + 0.02 * (50**3 - 15**3) / (3 * (50 - 15)))


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
"""Noise of unit variance for so many pairs, by name."""
ORDER_EFFECT_SD = {"order effect": 2.0}
"""By how many standard deviations the arm that begins is the slower one, beside the noise, in rows
of that name."""


def sitting(
    ratios: Floats,
    patched_first: NDArray[np.bool_],
    max_pairs: int,
    margin_pct: float = 0.5,
    looks: int = LOOKS,
) -> tuple[Verdict, int]:
    """Verdict and usable pairs of one sitting whose pairs would give these log-ratios."""

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

    found = first_decided(schedule(max_pairs, looks), at)
    assert found is not None
    return found.verdict, used


def sittings(
    noise: str,
    truth_pct: float,
    runs: int,
    max_pairs: int = DEFAULT_PAIRS,
    table: Literal["verdicts", "power", "pairs_needed"] = "verdicts",
    pair_sd_pct: float = PAIR_SD_PCT,
    margin_pct: float = 0.5,
) -> Row:
    """So many sittings of one kind; the seed follows from what they are, so a row is repeatable."""
    draw, order = (
        _generator(list(NOISE).index(noise) + apart, truth_pct, max_pairs) for apart in (0, 200)
    )
    count = schedule(max_pairs, LOOKS)[-1].taken
    said: list[Verdict] = []
    pairs = 0
    for _ in range(runs):
        first = _abba(order, count)
        spread = NOISE[noise](draw, count) - ORDER_EFFECT_SD.get(noise, 0.0) * (2 * first - 1)
        ratios = spread * pair_sd_pct / 100 + math.log1p(truth_pct / 100)
        verdict, used = sitting(ratios, first, max_pairs, margin_pct)
        said.append(verdict)
        pairs += used
    return Row(
        table=table,
        noise=noise,
        truth_pct=truth_pct,
        margin_pct=margin_pct,
        pair_sd_pct=pair_sd_pct,
        max_pairs=max_pairs,
        runs=runs,
        accept=said.count("accept"),
        reject=said.count("reject"),
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
    """Comparisons over `count` process pairs, each with a bias of its own; one look at all."""
    import numpy as np

    draw, order = (
        _generator(count + apart, truth_pct, round(1000 * pair_sd_pct)) for apart in (100, 300)
    )
    owner = np.repeat(np.arange(count), PAIRS_A_PROCESS)
    said: list[Verdict] = []
    for _ in range(runs):
        bias = draw.standard_normal(count) * PROCESS_SD_PCT / 100
        noise = draw.standard_normal(len(owner)) * pair_sd_pct / 100
        ratios = bias[owner] + noise + math.log1p(truth_pct / 100)
        processes = owner.tolist() if aware else None
        first = _abba(order, len(owner)).tolist()
        said.append(
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
        accept=said.count("accept"),
        reject=said.count("reject"),
        mean_pairs=len(owner),
    )


def _abba(order: np.random.Generator, count: int) -> NDArray[np.bool_]:
    """Which pairs the patched arm begins: of each two neighbours one, drawn."""
    import numpy as np

    drawn = order.random(-(-count // 2)) < 0.5
    return np.stack([drawn, ~drawn], axis=1).ravel()[:count]


def _generator(kind: int, truth_pct: float, size: int) -> np.random.Generator:
    import numpy as np

    return np.random.default_rng([kind, round(1000 * (truth_pct + 100)), size])


def rows(runs: int = RUNS, power_runs: int = POWER_RUNS) -> Iterator[Row]:
    """Every row of the tables."""
    for noise in NOISE:
        for truth in TRUTHS_PCT:
            yield sittings(noise, truth, runs)
        for pairs in POWER_PAIRS:
            yield sittings(noise, 1.0, power_runs, pairs, "power")
    for noise, rho in (("independent", 0.0), ("AR(1), rho 0.3", 0.3), ("AR(1), rho 0.6", 0.6)):
        for sd, gain in ((0.5, 2.0), (0.5, 1.0), (0.5, 0.8), (0.25, 1.0), (0.1, 0.6)):
            needed = pairs_needed(sd, gain, rho=rho)
            assert needed is not None
            yield sittings(noise, gain, power_runs, needed, "pairs_needed", sd)
    for count in PROCESS_COUNTS:
        for aware in (False, True):
            for sd in (0.05, PAIR_SD_PCT):
                yield process_pairs(count, 0.0, 0.0, sd, runs, aware)
                yield process_pairs(count, 1.0, 0.5, sd, runs, aware)


def statistics_table() -> None:
    """A line a row on stdout; what was done so far on stderr."""
    for row in rows():
        print(json.dumps(row.model_dump(mode="json")), flush=True)
        print(f"{row.table}: {row.noise}, {row.truth_pct:+g} %", file=sys.stderr, flush=True)
