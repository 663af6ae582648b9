"""Which GPU a trace describes, and which other make's trace it is if it holds no kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from patcher.hotspot.names import printable
from patcher.hotspot.profile import Gpu
from patcher.hotspot.readers.events import Events
from patcher.hotspot.readers.times import interval
from patcher.hotspot.roofline import named_by_size
from patcher.hotspot.timeline import Codes

_MAKES = (
    (re.compile(r"/device:(GPU|TPU):\d"), "JAX"),
    (re.compile(r"Ascend|CANN|NPU"), "torch_npu (Ascend)"),
    (re.compile(r"MTIA"), "Meta's MTIA"),
    (re.compile(r"HPU|Gaudi|Habana"), "Intel Gaudi (HPU)"),
    (re.compile(r"Neuron"), "AWS Neuron"),
)
_CATEGORIES = (("mtia", "Meta's MTIA"), ("hpu", "Intel Gaudi (HPU)"), ("glow", "Glow"))


def other_maker(events: Events) -> str | None:
    """What a trace without kernels is, as the end of a sentence; None if nothing tells."""
    for pid, process in events.processes.items():
        make = next((make for pattern, make in _MAKES if pattern.search(process)), None)
        if make is None:
            continue
        work = [event for event in events.nameless if event.get("pid") == pid]
        times = [each for event in work if (each := interval(event)) is not None]
        if times:
            spent = sum(end - start for start, end in times) / 1e3
            return (
                f"is a trace of {make}, not of torch.profiler: its {len(times)} kernels on "
                f"{printable(process)[:60]} ({spent:,.1f} us) have no category"
            )
    for start, make in _CATEGORIES:
        if any(category.lower().startswith(start) for category in events.others):
            return f"is a trace of {make}, not of a GPU that torch.profiler writes kernels for"
    return None


def described(
    properties: Sequence[Any], devices: Codes, numbers: Mapping[tuple[int, object], int]
) -> dict[int, Gpu]:
    """Kineto's descriptions of the devices with kernels, by device number.

    ROCm numbers a kernel's device among all agents, CPUs included, so there the ids of the
    descriptions do not fit; descriptions that are all alike fit anyhow.
    """
    known = {
        each["id"]: gpu
        for each in properties
        if isinstance(each, dict)
        and isinstance(each.get("id"), int)
        and (gpu := _gpu(each)) is not None
    }
    alike = next(iter(known.values())) if len(set(known.values())) == 1 else None
    agents = any(isinstance(each, dict) and each.get("warpSize") == 64 for each in properties)
    own = {number: device for (device, _), number in numbers.items()}
    found = {}
    for number in np.unique(devices).tolist():
        gpu = alike if agents else known.get(own.get(number, number))
        if gpu is not None:
            found[number] = gpu
    return found


def _gpu(row: dict[str, Any]) -> Gpu | None:
    name, count, memory = row.get("name"), row.get("numSms"), row.get("totalGlobalMem")
    if not isinstance(name, str):
        return None
    major, minor = row.get("computeMajor"), row.get("computeMinor")
    known = isinstance(major, int) and isinstance(minor, int)
    capability = f"{major}.{minor}" if known else None
    count = count if isinstance(count, int) and 0 < count < 10_000 else None
    memory = memory if isinstance(memory, int) and 0 < memory < 1 << 60 else None
    given = printable(name)[:200].strip()
    return Gpu(
        name=named_by_size(given, count, capability, memory),
        multiprocessors=count,
        compute_capability=capability,
    )
