"""The decode step of a profile, for its picture: lanes, gaps, chains, a window."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from patcher.hotspot import Profile

MOST_LANES = 12
"""Most operations with their own lanes; the shorter ones share one."""
_ENOUGH = 3
"""Number of repeats from which a launch or a chain marks a layer."""
_WRAPPERS = re.compile(r"^(?:[Kk]ernel2?|device_kernel|(?:\w+_)?elementwise_kernel)$")
_NOISE = re.compile(r"^(?:void|int|float|double|bool) |(?:\(anonymous namespace\)|<unnamed>)::")
_CARRIERS = ("enable_", "gpu_kernel_impl")
_CALLED = re.compile(r"([A-Za-z_][\w:]*)(?=[<(])")

Span = tuple[float, float]


@dataclass(frozen=True)
class Launch:
    """One launch; times in microseconds from the start of the step."""

    name: str
    operation: str
    start_us: float
    duration_us: float
    chain: int | None
    """Number of its fusion chain among the profile's chains."""

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Lane:
    """All launches of one operation, in order of time."""

    operation: str
    launches: tuple[Launch, ...]

    @property
    def time_us(self) -> float:
        return sum(launch.duration_us for launch in self.launches)


@dataclass(frozen=True)
class StepWindow:
    """The part of the step to show at a larger scale."""

    start_us: float
    end_us: float
    words: str


@dataclass(frozen=True)
class Step:
    launches: tuple[Launch, ...]
    lanes: tuple[Lane, ...]
    """Lanes in descending order of time."""
    chains: dict[int, str]
    """Names of the fusion chains that run in it, by number."""
    runs: tuple[tuple[int, Span], ...]
    """Each run of a chain: its number, from its first launch to the end of its last."""
    gaps: tuple[Span, ...]
    """When no kernel runs."""
    wall_us: float
    copies: bool
    """Whether copies and fills, which are no launches, may run in the gaps."""
    layers: int | None

    @property
    def gap_us(self) -> float:
        return sum(end - start for start, end in self.gaps)


def chain_numbers(profile: Profile) -> dict[int, int]:
    """From a chain's index among the hotspots to its number among the chains."""
    chains = [index for index, spot in enumerate(profile.hotspots) if spot.kind == "chain"]
    return {index: number for number, index in enumerate(chains)}


def read_step(profile: Profile | None) -> Step | None:
    """The step; None if the profile has no launches to draw (see `why_not`)."""
    if profile is None or not profile.step:
        return None
    number = chain_numbers(profile)
    begin = min(row.start_ns for row in profile.step)
    launches = []
    for row in sorted(profile.step, key=lambda row: row.start_ns):
        there = 0 <= row.kernel < len(profile.kernels)
        kernel = profile.kernels[row.kernel] if there else None
        launches.append(
            Launch(
                name=kernel.name if kernel else "?",
                operation=kernel.operation if kernel else "unknown",
                start_us=(row.start_ns - begin) / 1e3,
                duration_us=row.duration_ns / 1e3,
                chain=None if row.chain is None else number.get(row.chain),
            )
        )
    named = {number: profile.hotspots[index].name for index, number in number.items()}
    seen = {launch.chain for launch in launches}
    return Step(
        launches=tuple(launches),
        lanes=_lanes(launches),
        chains={number: name for number, name in named.items() if number in seen},
        runs=tuple(_runs(launches)),
        gaps=tuple(_gaps(launches)),
        wall_us=max(0.001, *(launch.end_us for launch in launches)),
        copies=bool(profile.memory_ns),
        layers=profile.layers,
    )


def why_not(profile: Profile) -> str:
    """Why there is no step to draw, and the remedy."""
    if profile.busy_ns is None:
        return (
            "The source adds launches up and has no times of single ones, so no step is drawn: "
            "export the recording as SQLite."
        )
    if profile.steps is None:
        return "Decode steps cannot be told apart in this source, so none is drawn."
    return "The profile keeps no launches of a step, so none is drawn."


def window(step: Step, layers: int) -> StepWindow:
    """Some layers from the middle of the step, found by what repeats once per layer."""
    starts = _marks(step)
    if len(starts) > layers:
        first = (len(starts) - 1 - layers) // 2
        words = "one layer" if layers == 1 else f"{layers} layers"
        if step.layers is None or abs(len(starts) - step.layers) > 1:
            words = "one repeat" if layers == 1 else f"{layers} repeats"
        begin, end = starts[first], starts[first + layers]
        if end > begin:  # launches of a broken profile may all begin at once
            return StepWindow(begin, end, words)
    return StepWindow(0.0, step.wall_us / 10, "the first tenth")


def short(name: str) -> str:
    """Short name of a kernel: no arguments, templates or namespaces.

    A wrapper that runs its argument (`device_kernel<F>`) is named after the argument.
    """
    text = _NOISE.sub("", name.strip())
    called = _CALLED.findall(text[:400])
    base = _last(re.split(r"[<(]", text, maxsplit=1)[0])
    if called and _WRAPPERS.search(base):
        inner = [_last(other) for other in called[1:]]
        return next((other for other in inner if other and not other.startswith(_CARRIERS)), base)
    return base or name


def _last(name: str) -> str:
    return name.rstrip(":").rpartition("::")[2]


def _marks(step: Step) -> list[float]:
    """Starts of what runs once per layer: the most frequent chain, else a kernel."""
    often = Counter(number for number, _ in step.runs)  # the first to run comes first
    wanted = step.layers
    chain = min(often, key=lambda number: _off(often[number], wanted), default=None)
    if chain is not None and often[chain] >= _ENOUGH:
        return [start for number, (start, _) in step.runs if number == chain]
    counts = Counter(launch.name for launch in step.launches)
    once = [name for name, count in counts.items() if count == wanted and count >= _ENOUGH]
    if not once:
        return []
    return [launch.start_us for launch in step.launches if launch.name == once[0]]


def _off(count: int, layers: int | None) -> int:
    return -count if layers is None else abs(count - layers)


def _lanes(launches: Iterable[Launch]) -> tuple[Lane, ...]:
    groups: dict[str, list[Launch]] = {}
    for launch in launches:
        groups.setdefault(launch.operation, []).append(launch)
    lanes = [Lane(operation, tuple(found)) for operation, found in groups.items()]
    lanes.sort(key=lambda lane: (-lane.time_us, lane.operation))
    if len(lanes) <= MOST_LANES:
        return tuple(lanes)
    rest = [launch for lane in lanes[MOST_LANES - 1 :] for launch in lane.launches]
    rest.sort(key=lambda launch: launch.start_us)
    label = f"{len(lanes) - MOST_LANES + 1} others"
    return (*lanes[: MOST_LANES - 1], Lane(label, tuple(rest)))


def _runs(launches: Sequence[Launch]) -> list[tuple[int, Span]]:
    found: list[tuple[int, Span]] = []
    before: Launch | None = None
    for launch in launches:
        number = launch.chain
        if number is not None:
            joined = before is not None and before.chain == number
            start = found[-1][1][0] if joined else launch.start_us
            end = max(found[-1][1][1], launch.end_us) if joined else launch.end_us
            found[len(found) - joined :] = [(number, (start, end))]
        before = launch
    return found


def _gaps(launches: Sequence[Launch]) -> list[Span]:
    ends: list[float] = []
    for launch in launches:
        ends.append(max(launch.end_us, ends[-1] if ends else 0.0))
    return [
        (end, after.start_us)
        for end, (_, after) in zip(ends, pairwise(launches), strict=False)
        if after.start_us > end
    ]
