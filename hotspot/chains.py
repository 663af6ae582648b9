"""Fusion chains: runs of small kernels between heavy ones that repeat in every layer.

A decode step is a fixed sequence, so launches at the same position of each step are averaged. A
run ends at a matmul or an attention kernel. Runs of the same operations between the same
neighbours form one chain, even where a compiler chose different kernels per layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from patcher.hotspot.classify import classify
from patcher.hotspot.coverage import does_chain
from patcher.hotspot.recording import Launches
from patcher.hotspot.rules import rules
from patcher.hotspot.steps import Steps, main_stream
from patcher.hotspot.timeline import Codes, Integers, exposed, gaps

LONGEST_WAIT_NS = 1_000_000
"""Idle time that ends a chain: the host did something else there."""
MOST_STEPS = 512
"""Steps that are sampled, evenly spaced."""


@dataclass(frozen=True)
class Place:
    """One launch of a step, averaged over the steps of the same sequence."""

    name: int
    """Index into the launches' texts."""
    start_ns: int
    """Start in the representative step, from the start of that step."""
    duration_ns: int
    """Duration in the representative step."""
    mean_ns: float
    exposed_ns: float
    gap_ns: float
    stream: int


@dataclass(frozen=True)
class Chain:
    """A sequence of small kernels that runs at least twice in a step."""

    name: str
    runs: tuple[tuple[int, int], ...]
    """For each run in a step: its first place and the place after its last."""
    as_one: str | None = None
    """The op of the library that computes the chain in one kernel."""

    @property
    def length(self) -> int:
        begin, end = self.runs[0]
        return end - begin

    def places(self) -> list[int]:
        return [place for begin, end in self.runs for place in range(begin, end)]


def usual_step(launches: Launches, steps: Steps) -> list[Place]:
    """The places of the most frequent sequence, timed in its step of median length."""
    main = main_stream(launches)
    name, start, end = launches.name[main], launches.start[main], launches.end[main]
    begins = np.searchsorted(start, steps.bounds[:, 0])
    ends = np.searchsorted(start, steps.bounds[:, 1])
    filled = np.flatnonzero(ends > begins)
    if not len(filled):
        return []
    sample = filled[np.unique(np.linspace(0, len(filled) - 1, MOST_STEPS).astype(int))]
    begins, ends, bounds = begins[sample], ends[sample], steps.bounds[sample]
    kind = _kinds([name[b:e] for b, e in zip(begins, ends, strict=True)])
    same = np.flatnonzero(kind == np.argmax(np.bincount(kind)))
    lengths = bounds[same, 1] - bounds[same, 0]
    drawn = int(begins[same[np.argsort(lengths, kind="stable")[len(same) // 2]]])
    size = int(ends[same[0]] - begins[same[0]])
    at = begins[same, None] + np.arange(size)
    spent = (end - start)[at].mean(axis=0)
    own, idle = exposed(start, end)[at].mean(axis=0), gaps(start, end)[at].mean(axis=0)
    streams = launches.stream[main]
    return [
        Place(
            name=int(name[drawn + i]),
            start_ns=int(start[drawn + i] - start[drawn]),
            duration_ns=int(end[drawn + i] - start[drawn + i]),
            mean_ns=float(spent[i]),
            exposed_ns=float(own[i]),
            gap_ns=float(idle[i]),
            stream=int(streams[drawn + i]),
        )
        for i in range(size)
    ]


def _kinds(sequences: Sequence[Codes]) -> Integers:
    """A number for each sequence; equal sequences share it."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(each.tobytes(), len(known)) for each in sequences])


def find_chains(places: Sequence[Place], texts: Sequence[str]) -> list[Chain]:
    """Chains that run at least twice in a step, in order of decreasing time."""
    kinds = [small_operation(place.mean_ns, texts[place.name]) for place in places]
    candidates: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    begin = 0
    for index in range(len(places) + 1):
        small = index < len(places) and kinds[index] is not None
        if small and not (index > begin and places[index].gap_ns > LONGEST_WAIT_NS):
            continue
        if _launches(places[begin:index]) > 1:
            inner = _without_repeats([kind or "" for kind in kinds[begin:index]])
            after = classify(texts[places[index].name])[1] if index < len(places) else "end"
            before = classify(texts[places[begin - 1].name])[1] if begin else "begin"
            candidates.setdefault((before, *inner, after), []).append((begin, index))
        begin = index if small else index + 1
    chains = []
    for (before, *_, after), runs in candidates.items():
        if len(runs) > 1:
            first = runs[0]
            members = [texts[place.name] for place in places[first[0] : first[1]]]
            name, as_one = _name(members, before, after)
            chains.append(Chain(name, tuple(runs), as_one))
    return sorted(with_unique_names(chains), key=lambda chain: -_time(places, chain))


def _launches(places: Sequence[Place]) -> int:
    """The number of launches; those of a module that forms one row count once."""
    return len(_without_repeats([str(place.name) for place in places]))


def _without_repeats(items: Sequence[str]) -> list[str]:
    return [item for i, item in enumerate(items) if i == 0 or items[i - 1] != item]


def small_operation(mean_ns: float, text: str) -> str | None:
    """The operation of a small kernel; None for one that ends a chain."""
    operation = classify(text)[1]
    limits = rules("advice")["chains"]
    if mean_ns > 1e3 * limits["small_us"]:
        return None
    if operation in limits["breaks"] and not re.search(limits["auxiliary"], text[:4000]):
        return None
    return operation


def _name(members: Sequence[str], before: str, after: str) -> tuple[str, str | None]:
    """The chain's name by the rules, and the op that computes it in one kernel, if any."""
    subjects = [f"{classify(member)[1]} {member[:4000]}" for member in members]
    for rule in rules("advice")["chain"]:
        beside = rule.get("before", before) == before and rule.get("after", after) == after
        has = rule.get("has", ())
        if beside and all(any(re.search(pattern, one) for one in subjects) for pattern in has):
            as_one = rule.get("as_one")
            does = as_one is not None and does_chain(as_one, members)
            return str(rule["name"]), as_one if does else None
    return " + ".join(dict.fromkeys(classify(member)[1] for member in members)), None


def with_unique_names(chains: list[Chain]) -> list[Chain]:
    """Chains with distinct names: equal names get their length, then a number."""
    by_length = [f"{chain.name} ({chain.length} launches)" for chain in chains]
    lengthened = _disambiguate([chain.name for chain in chains], by_length)
    numbered = [
        f"{name}, no. {lengthened[: i + 1].count(name)}" for i, name in enumerate(lengthened)
    ]
    names = _disambiguate(lengthened, numbered)
    return [replace(chain, name=name) for name, chain in zip(names, chains, strict=True)]


def _disambiguate(names: list[str], longer: list[str]) -> list[str]:
    """The longer name wherever the short one occurs more than once."""
    return [
        long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)
    ]


def _time(places: Sequence[Place], chain: Chain) -> float:
    return sum(places[i].exposed_ns for i in chain.places())
