"""The GPUs that an nsys export describes, by the device numbers of its kernels.

A kernel's device is CUDA's number in its process, which `CUDA_VISIBLE_DEVICES` and the driver's
order change. TARGET_INFO_CUDA_DEVICE tells which GPU a number meant in which process. Where it does
not, and there may be several GPUs, a number is a device of its own in each process.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypedDict

import numpy as np

from patcher.hotspot.names import printable
from patcher.hotspot.profile import Gpu, ProfileWarning
from patcher.hotspot.timeline import Codes, Integers

GPUS = "TARGET_INFO_GPU"
DEVICES = "TARGET_INFO_CUDA_DEVICE"
_MOST = 4096
"""Rows that are read of either table."""
PROCESS_BITS, _PROCESSES = 24, 0xFFFFFF
"""A globalPid holds the process above so many bits, and the machine above that."""
_SAMPLE = 4000
"""Rows that are looked at for more than one process. One that has fewer kernels of millions than
such a sample meets is not told apart."""
_LISTED = 4
RowIds = tuple[int, int]


def _sample(rowids: RowIds) -> str:
    """A condition for rows that are evenly spaced; none for few rows."""
    step = (rowids[1] - rowids[0]) // _SAMPLE
    if step < 50:
        return ""
    return f" WHERE rowid IN ({', '.join(map(str, range(rowids[0], rowids[1] + 1, step)))})"


def _listed(texts: Iterable[str]) -> str:
    whole = list(texts)
    more = len(whole) - _LISTED
    return ", ".join(whole[:_LISTED]) + (f" and {more} more" if more > 0 else "")


class CardFields(TypedDict):
    """The fields of a `Recording` about its GPUs."""

    gpu: Gpu | None
    gpus: Mapping[int, Gpu]
    labels: Mapping[int, str]


@dataclass(frozen=True)
class Cards:
    """The GPUs of an export."""

    by_id: dict[int, Gpu]
    """By the export's own id of a GPU."""
    by_device: dict[int, Gpu]
    """By CUDA's device number, where all processes agree on it."""
    of_process: dict[tuple[int, int], int]
    """Id of the GPU by (process, device number)."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """What devices are whose number is new, as nothing tells which GPUs they are."""

    @property
    def ambiguous(self) -> bool:
        """Whether one device number means different GPUs in different processes."""
        meant: dict[int, set[int]] = {}
        for (_, device), gpu in self.of_process.items():
            meant.setdefault(device, set()).add(gpu)
        return any(len(gpus) > 1 for gpus in meant.values())

    def told_apart(self, database: sqlite3.Connection, table: str, rowids: RowIds) -> Cards:
        """The cards with numbers of their own for devices of which nothing tells whether they are
        one GPU: those of one number in several processes.

        Args:
            database: the export.
            table: the table of kernels, which has the columns globalPid and deviceId.
            rowids: the least and the greatest row id of it.
        """
        if len(self.by_id) == 1:
            return self
        process = f"globalPid >> {PROCESS_BITS} & {_PROCESSES}"
        query = f"SELECT DISTINCT {process} FROM {table}{_sample(rowids)}"
        if len(database.execute(query).fetchall()) < 2:
            return self
        query = f"SELECT DISTINCT {process}, IFNULL(deviceId, 0) FROM {table} LIMIT {_MOST}"
        pairs = [
            (process, device)
            for process, device in database.execute(query)
            if isinstance(process, int) and isinstance(device, int)
        ]
        often = Counter(device for _, device in pairs)
        unknown = sorted(pair for pair in pairs if pair not in self.of_process)
        if not (self.ambiguous or any(often[device] > 1 for _, device in unknown)):
            return self
        used = set(self.of_process.values())  # numbers are ids of GPUs from here on
        apart = [pair for pair in unknown if often[pair[1]] > 1 or pair[1] in used]
        taken = used | {device for _, device in set(unknown) - set(apart)}
        free = (number for number in count() if number not in taken)
        new = {pair: next(free) for pair in apart}
        labels = {
            number: f"device {device} of process {process}"
            for (process, device), number in new.items()
        }
        return replace(self, of_process={**self.of_process, **new}, labels=labels) if new else self

    def warnings(self) -> tuple[ProfileWarning, ...]:
        """That devices were told apart although they may be one GPU."""
        if not self.labels:
            return ()
        message = (
            f"the export does not tell which GPUs these are: {_listed(self.labels.values())}. Each "
            "has its own table; if some are one GPU, its time is counted in each of them"
        )
        return (ProfileWarning(kind="devices_unknown", message=message),)

    def numbered(self, devices: Codes, processes: Integers) -> Codes:
        """The ids of the GPUs in place of device numbers that processes do not agree on.

        Args:
            devices: CUDA's device number of each record.
            processes: the globalPid of each record.
        """
        key = (processes >> PROCESS_BITS & _PROCESSES) << 32 | devices
        result = devices.astype(np.int32)
        for value in np.unique(key).tolist():
            gpu = self.of_process.get((value >> 32, value & 0xFFFFFFFF))
            if gpu is not None:
                result[key == value] = gpu
        return result

    def of(self, devices: Codes) -> CardFields:
        """The GPUs of these device numbers, and the one with the most launches."""
        numbers, counts = np.unique(devices, return_counts=True)
        known = {number: gpu for number in numbers.tolist() if (gpu := self._gpu(number))}
        most = int(numbers[int(np.argmax(counts))]) if len(numbers) else -1
        return CardFields(gpu=known.get(most), gpus=known, labels=self.labels)

    def _gpu(self, device: int) -> Gpu | None:
        known = self.by_id if self.ambiguous else self.by_device
        if device in known:
            return known[device]
        alike = list(self.by_id.values())
        return alike[0] if alike and all(gpu == alike[0] for gpu in alike) else None


def read_cards(database: sqlite3.Connection, tables: set[str]) -> Cards:
    """Read the tables that describe GPUs, either of which may be missing."""
    by_id: dict[int, Gpu] = {}
    numbered: dict[int, Gpu] = {}
    for place, row in enumerate(_rows(database, GPUS, tables)):
        gpu = _gpu(row)
        if gpu is None:
            continue
        own = row.get("id")
        own = own if isinstance(own, int) else place
        by_id[own] = gpu
        number = row.get("cuDevice")
        numbered[number if isinstance(number, int) else own] = gpu
    of_process: dict[tuple[int, int], int] = {}
    for row in _rows(database, DEVICES, tables):
        process, device, card = row.get("pid"), row.get("cudaId"), row.get("gpuId")
        if isinstance(device, int) and isinstance(card, int) and card in by_id:
            of_process[process if isinstance(process, int) else -1, device] = card
    numbered |= {device: by_id[card] for (_, device), card in of_process.items()}
    return Cards(by_id, numbered, of_process)


def _rows(database: sqlite3.Connection, table: str, tables: set[str]) -> list[dict[str, Any]]:
    if table not in tables:
        return []
    cursor = database.execute(f"SELECT * FROM {table} LIMIT {_MOST}")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _gpu(row: Mapping[str, Any]) -> Gpu | None:
    if not row.get("name"):
        return None
    major, minor = row.get("smMajor"), row.get("smMinor")
    return Gpu(
        name=printable(str(row["name"])[:100]),
        memory_bytes_per_s=_positive(row.get("memoryBandwidth")),
        multiprocessors=int(_positive(row.get("smCount")) or 0) or None,
        clock_hz=_positive(row.get("clockRate")),
        compute_capability=f"{major}.{minor}" if isinstance(major, int) else None,
    )


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e18 else None
