"""Rank a recording: one table for each device, and one for all of them added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from patcher.bench import UsageError
from patcher.hotspot.bound import Bound, bound_of
from patcher.hotspot.chains import Chain, Place, find_chains, usual_step
from patcher.hotspot.names import printable
from patcher.hotspot.profile import (
    Counters,
    DeviceProfile,
    Hotspot,
    KernelStat,
    Profile,
    ProfileWarning,
    StepLaunch,
    Variant,
)
from patcher.hotspot.recording import Launches, Recording
from patcher.hotspot.roofline import ServedModel, completed
from patcher.hotspot.rows import Ranking
from patcher.hotspot.stats import (
    EVERYTHING,
    Chosen,
    Spans,
    added,
    of_launches,
    of_rows,
    spans_of,
    steady,
    window_text,
)
from patcher.hotspot.timeline import Integers

MOST_DRAWN = 5000
"""Launches of the representative step that a profile holds at most."""
MOST_DEVICES = 1024
"""Devices that have a table each; merged traces of a large cluster have a few hundred."""


def build_profile(
    recording: Recording,
    model: str,
    *,
    served: ServedModel | None = None,
    steps: int | None = None,
    counters: Mapping[str, Counters] | None = None,
    window: str | None = None,
) -> Profile:
    """Rank a recording.

    Args:
        recording: the source's rows or launches.
        model: the model's name.
        served: layers and sizes of the model; by default those of the preset of that name.
        steps: steps in the recording, on each device; overrides what the recording shows.
        counters: Nsight Compute's counters, by kernel name as the recording spells it.
        window: `all` to include what lies outside the steady steps.

    Raises:
        UsageError: it names more devices than a machine has.
    """
    job = _Job(recording, model, served or ServedModel.of(model), steps, counters or {}, window)
    if recording.launches is None:
        return job.of_summary()
    devices = np.unique(recording.launches.device).tolist()
    if len(devices) > MOST_DEVICES:
        raise UsageError(
            f"{recording.source} has kernels on {len(devices):,} devices: it is damaged",
            f"give a profile of at most {MOST_DEVICES:,} devices",
        )
    parts = [job.part(device, len(devices) == 1) for device in devices]
    return job.of_one(parts[0]) if len(parts) == 1 else job.of_several(parts)


@dataclass(frozen=True)
class _Part:
    """One device's launches, ranked."""

    device: int
    chosen: Chosen
    spans: Spans
    kernels: tuple[KernelStat, ...]
    bound: Bound | None
    ranking: Ranking
    places: list[Place]
    chains: list[Chain]
    hotspots: tuple[Hotspot, ...]
    source_ns: int
    """Kernel time of the device in the whole source."""

    @property
    def inside_ns(self) -> int:
        return sum(kernel.total_ns for kernel in self.kernels)


@dataclass(frozen=True)
class _Job:
    recording: Recording
    model: str
    served: ServedModel
    told: int | None
    """Steps on each device, as the caller says."""
    counters: Mapping[str, Counters]
    window: str | None

    def of_summary(self) -> Profile:
        kernels = of_rows(self.recording.rows)
        ranking = Ranking(
            (), self.recording.gpu, kernels, None, self.served, self.counters, self.told, None
        )
        return Profile(
            model=self.model,
            source=self.recording.source,
            gpu=ranking.gpu,
            total_kernel_ns=sum(kernel.total_ns for kernel in kernels),
            busy_ns=None,
            steps=self.told,
            layers=self.served.layers,
            launch_floor_ns=ranking.floor_ns,
            ceiling_of="kernel time",
            warnings=self.recording.warnings,
            kernels=kernels,
            hotspots=ranking.rows(),
        )

    def part(self, device: int, only: bool) -> _Part:
        """Rank one device."""
        launches = self.recording.launches
        assert launches is not None
        mine: slice | Integers = slice(None) if only else np.flatnonzero(launches.device == device)
        own = launches if only else launches.chosen(mine)
        chosen = steady(self.recording, own, self.window, self.served.layers, self.told)
        inside = chosen.launches
        steps = None if self.window == EVERYTHING else chosen.steps
        spans = spans_of(self.recording, inside, steps)
        kernels = of_launches(inside, spans.exposed)
        bound = bound_of(spans, kernels)
        gpu = self.recording.gpus.get(device) or (self.recording.gpu if only else None)
        ranking = Ranking(
            launches.texts, gpu, kernels, spans, self.served, self.counters, chosen.count, bound
        )
        places: list[Place] = []
        if chosen.steps is not None:
            places = usual_step(inside, chosen.steps)
        chains = find_chains(places, launches.texts) if chosen.count else []
        return _Part(
            device=device,
            chosen=chosen,
            spans=spans,
            kernels=kernels,
            bound=bound,
            ranking=ranking,
            places=places,
            chains=chains,
            hotspots=ranking.rows(
                places, chains, cut=len(chosen.steps.bounds) if chosen.steps else 0
            ),
            source_ns=int((own.end - own.start).sum()),
        )

    def of_one(self, part: _Part) -> Profile:
        chosen = part.chosen
        return Profile(
            model=self.model,
            source=self.recording.source,
            gpu=part.ranking.gpu,
            window=window_text(chosen, self.window, part.source_ns, part.inside_ns),
            total_kernel_ns=part.inside_ns,
            busy_ns=part.spans.busy,
            memory_ns=part.spans.memory,
            wall_ns=part.spans.wall,
            steps=chosen.count,
            steps_source=chosen.source,
            phase=chosen.phase,
            layers=self.served.layers,
            launch_floor_ns=part.ranking.floor_ns,
            bound=part.bound.by if part.bound else None,
            bound_pct=part.bound.pct if part.bound else None,
            warnings=(*self.recording.warnings, *chosen.warnings),
            kernels=part.kernels,
            hotspots=part.hotspots,
            step=_drawn(part, part.hotspots, part.kernels),
        )

    def of_several(self, parts: Sequence[_Part]) -> Profile:
        """All devices added up, with a table for each."""
        launches = _joined([part.chosen.launches for part in parts])
        spans = added([part.spans for part in parts])
        kernels = of_launches(launches, spans.exposed)
        bound = bound_of(spans, kernels)
        counts = [part.chosen.count for part in parts]
        each = counts[0] if len(set(counts)) == 1 else None
        total = sum(count for count in counts if count) if all(counts) else None
        busiest = max(parts, key=lambda part: part.spans.busy)
        first = parts[0].ranking.gpu
        ranking = Ranking(
            launches.texts,
            first if all(part.ranking.gpu == first for part in parts) else None,
            kernels,
            spans,
            self.served,
            self.counters,
            total,
            bound,
        )
        hotspots = ranking.rows(merged=_merged_chains(parts))
        phase = parts[0].chosen.phase
        warnings = [warning for part in parts for warning in part.chosen.warnings]
        devices = tuple(self._device(part) for part in parts)
        return Profile(
            model=self.model,
            source=self.recording.source,
            gpu=ranking.gpu,
            window=self._of_devices(parts, each),
            total_kernel_ns=sum(kernel.total_ns for kernel in kernels),
            busy_ns=spans.busy,
            memory_ns=spans.memory,
            wall_ns=spans.wall,
            steps=each,
            steps_source=busiest.chosen.source,
            phase=phase if all(part.chosen.phase == phase for part in parts) else None,
            layers=self.served.layers,
            launch_floor_ns=ranking.floor_ns,
            bound=bound.by if bound else None,
            bound_pct=bound.pct if bound else None,
            warnings=(*self.recording.warnings, *dict.fromkeys(warnings), _sum_note(devices)),
            kernels=kernels,
            hotspots=hotspots,
            step=_drawn(busiest, hotspots, kernels),
            devices=devices,
        )

    def _of_devices(self, parts: Sequence[_Part], each: int | None) -> str:
        texts = {
            window_text(part.chosen, self.window, part.source_ns, part.inside_ns): part.device
            for part in parts
        }
        if len(texts) == 1 and each is not None:
            return f"{len(parts)} devices, on each {next(iter(texts))}"
        return "; ".join(f"device {device}: {text}" for text, device in texts.items())

    def _device(self, part: _Part) -> DeviceProfile:
        moved = [k for k in part.kernels if k.operation == "communication"]
        return DeviceProfile(
            device=part.device,
            label=self.recording.labels.get(part.device),
            gpu=completed(part.ranking.gpu),
            launches=len(part.chosen.launches),
            total_kernel_ns=part.inside_ns,
            busy_ns=part.spans.busy,
            memory_ns=part.spans.memory,
            wall_ns=part.spans.wall,
            collectives_ns=sum(kernel.exposed_ns or 0 for kernel in moved),
            steps=part.chosen.count,
            phase=part.chosen.phase,
            bound=part.bound.by if part.bound else None,
            bound_pct=part.bound.pct if part.bound else None,
            hotspots=part.hotspots,
        )


def _sum_note(devices: Sequence[DeviceProfile]) -> ProfileWarning:
    """That the first table is a sum, and how evenly the devices worked."""
    work = [device.busy_ns - device.collectives_ns for device in devices]
    mean = sum(work) / len(work)
    most = max(range(len(work)), key=lambda i: work[i])
    uneven = 100 * (work[most] / mean - 1) if mean else 0.0
    busy = sum(device.busy_ns for device in devices)
    moved = 100 * sum(device.collectives_ns for device in devices) / busy if busy else 0.0
    message = (
        f"{len(devices)} devices are added up in the first table; each has its own below. Device "
        f"{devices[most].device} computes longest, {uneven:.1f} % above the mean; collectives take "
        f"{moved:.1f} % of the busy time, waiting for other devices included"
    )
    return ProfileWarning(kind="devices_added", message=message)


def _joined(parts: Sequence[Launches]) -> Launches:
    """The launches of all devices, one device after the other."""
    first = parts[0]
    call = None
    if all(part.call is not None for part in parts):
        call = np.concatenate([part.call for part in parts if part.call is not None])
    return Launches(
        texts=first.texts,
        name=np.concatenate([part.name for part in parts]),
        start=np.concatenate([part.start for part in parts]),
        end=np.concatenate([part.end for part in parts]),
        device=np.concatenate([part.device for part in parts]),
        stream=np.concatenate([part.stream for part in parts]),
        call=call,
    )


def _merged_chains(parts: Sequence[_Part]) -> list[Hotspot]:
    """The rows of chains of one name, added up over the devices."""
    rows: dict[str, list[Hotspot]] = {}
    for part in parts:
        for spot in part.hotspots:
            if spot.kind == "chain":
                rows.setdefault(spot.name, []).append(spot)
    merged = []
    for spots in rows.values():
        variants: dict[str, Variant] = {}
        for variant in (variant for spot in spots for variant in spot.variants):
            known = variants.get(variant.name)
            variants[variant.name] = variant.model_copy(
                update={
                    "instances": variant.instances + (known.instances if known else 0),
                    "total_ns": variant.total_ns + (known.total_ns if known else 0),
                }
            )
        merged.append(
            spots[0].model_copy(
                update={
                    "exposed_ns": sum(spot.exposed_ns or 0 for spot in spots),
                    "total_ns": sum(spot.total_ns for spot in spots),
                    "instances": sum(spot.instances for spot in spots),
                    "gap_ns": sum(spot.gap_ns for spot in spots),
                    "variants": tuple(variants.values()),
                    "reachable_pct": None,
                }
            )
        )
    return merged


def _drawn(
    part: _Part, spots: Sequence[Hotspot], kernels: Sequence[KernelStat]
) -> tuple[StepLaunch, ...]:
    number = {kernel.name: index for index, kernel in enumerate(kernels)}
    row = {spot.name: index for index, spot in enumerate(spots) if spot.kind == "chain"}
    home = {place: row[chain.name] for chain in part.chains for place in chain.places()}
    return tuple(
        StepLaunch(
            kernel=number[printable(part.ranking.texts[place.name])],
            start_ns=place.start_ns,
            duration_ns=place.duration_ns,
            stream=place.stream,
            chain=home.get(index),
        )
        for index, place in enumerate(part.places[:MOST_DRAWN])
    )
