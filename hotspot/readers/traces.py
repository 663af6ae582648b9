"""Read the launches of `nsys stats` traces: cuda_gpu_trace and cuda_kern_exec_trace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from patcher.bench import UsageError
from patcher.hotspot.profile import Gpu
from patcher.hotspot.readers.cells import nanoseconds
from patcher.hotspot.readers.sums import (
    HINT,
    Kind,
    not_a_row,
    table_units,
    warn_of_launches,
    warn_of_step,
    without_range,
)
from patcher.hotspot.readers.tables import Table
from patcher.hotspot.recording import Launches, Recording

_LONGEST = 1 << 60
"""Limit in ns (36 years) of all kernels and of what lies between them."""
_DEVICE = re.compile(r"(.*?) ?\((\d{1,4})\)")


def read_trace(table: Table, source: str, name: str, kind: Kind) -> Recording:
    """Read launches in order of start, and copies and fills separately.

    Streams are renumbered if several contexts share a number. A cuda_kern_exec_trace does not name
    streams, so all launches of one thread count as one stream.

    Raises:
        UsageError: a row is malformed.
    """
    where = {column: at for at, column in enumerate(table.names)}
    gpu_trace = kind.name == "cuda_gpu_trace"
    begin, length = ("Start", "Duration") if gpu_trace else ("Kernel Start", "Kernel Dur")
    device = where.get("Device" if gpu_trace else "DevId")
    lanes = [where[c] for c in (("Ctx", "Strm") if gpu_trace else ("PID", "TID")) if c in where]
    at_begin, at_length, at_grid = where[begin], where[length], where.get("GrdX")
    units = table_units(table)
    step = Decimal(0)
    kernels: list[tuple[int, int, str, str, tuple[str, ...]]] = []
    memory: list[tuple[str, int, int]] = []
    hidden = 0
    for line, cells in table.rows:
        try:
            start, coarse = nanoseconds(cells[at_begin], units[at_begin])
            duration, fine = nanoseconds(cells[at_length], units[at_length])
        except ValueError:
            raise not_a_row(name, line, kind, cells) from None
        step = max(step, coarse, fine)
        text = cells[-1]
        if not text.strip():
            raise not_a_row(name, line, kind, cells)
        first, end = round(start), round(start + duration)
        on = "" if device is None else cells[device]
        if text.startswith("[") and text.endswith("]") and (at_grid is None or not cells[at_grid]):
            if "graph" in text.lower():
                hidden += 1
            memory.append((on, first, end))
        else:
            kernels.append((first, end, text, on, tuple(cells[lane] for lane in lanes)))
    if not kernels:
        raise UsageError(f"{name} holds a {kind.what} without kernels", HINT)
    kernels.sort(key=lambda kernel: kernel[0])
    begun, ended = kernels[0][0], max(kernel[1] for kernel in kernels)
    if max(ended - begun, sum(end - start for start, end, *_ in kernels)) > _LONGEST:
        raise UsageError(f"{name} has kernels with impossible times", HINT)
    cells_of = [*(kernel[3] for kernel in kernels), *(row[0] for row in memory)]
    devices, gpus = _devices(cells_of)
    spans = np.array([row[1:] for row in memory], dtype=np.int64).reshape(-1, 2)
    copied = np.column_stack([devices[len(kernels) :].astype(np.int64), spans])
    bare = {text: without_range(text) for text in {kernel[2] for kernel in kernels}}
    texts, names = _coded([bare[kernel[2]] for kernel in kernels])
    launches = Launches(
        texts=tuple(texts),
        name=names,
        start=np.array([kernel[0] for kernel in kernels], dtype=np.int64),
        end=np.array([kernel[1] for kernel in kernels], dtype=np.int64),
        device=devices[: len(kernels)],
        stream=_streams([kernel[4] for kernel in kernels]),
    )
    return Recording(
        source,
        launches=launches,
        memory=copied if gpu_trace else None,
        gpu=gpus.get(_most_frequent(devices[: len(kernels)])),
        gpus=gpus,
        hidden=_graphs(hidden),
        warnings=(*warn_of_launches(kind), *warn_of_step(step)),
    )


def _graphs(count: int) -> str | None:
    if not count:
        return None
    return (
        f"{count} CUDA graphs were recorded as a whole, without their kernels; profile with "
        "--cuda-graph-trace=node"
    )


def _coded(values: Sequence[str]) -> tuple[list[str], NDArray[np.int32]]:
    """The distinct values in order of appearance, and each value as an index into them."""
    codes: dict[str, int] = {}
    indices = [codes.setdefault(value, len(codes)) for value in values]
    return list(codes), np.array(indices, dtype=np.int32)


def _devices(cells: Sequence[str]) -> tuple[NDArray[np.int32], dict[int, Gpu]]:
    """Device numbers from `NVIDIA H200 (0)` or `0`, and the GPUs by number if they are named."""
    texts, codes = _coded(cells)
    matches = [_DEVICE.fullmatch(text.strip()) for text in texts]
    plain = [text.strip() for text in texts]
    gpus: dict[int, Gpu] = {}
    if all(matches):
        numbers = [int(one[2]) for one in matches if one]
        gpus = {int(one[2]): Gpu(name=one[1]) for one in matches if one and one[1]}
    else:
        digits = all(text.isascii() and text.isdigit() and len(text) < 5 for text in plain)
        numbers = [int(text) for text in plain] if digits else list(range(len(texts)))
    return np.array(numbers, dtype=np.int32)[codes], gpus


def _most_frequent(devices: NDArray[np.int32]) -> int:
    numbers, counts = np.unique(devices, return_counts=True)
    return int(numbers[int(np.argmax(counts))])


def _streams(lanes: Sequence[tuple[str, ...]]) -> NDArray[np.int32]:
    """Stream numbers as printed; new numbers if there are several contexts or processes."""
    texts, codes = _coded(["/".join(lane) for lane in lanes])
    last = [text.rpartition("/")[2] for text in texts]
    small = all(text.isascii() and text.isdigit() and len(text) < 9 for text in last)
    if small and len(set(last)) == len(last):
        return np.array([int(text) for text in last], dtype=np.int32)[codes]
    return codes
