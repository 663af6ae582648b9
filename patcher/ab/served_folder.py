"""The folder of a comparison as it is served: a file for each process, shared by who measures.

The same command may run on several GPUs at a time, or on hosts that share the folder. Each process
pair is taken by one of them, on one GPU; all wait for the last one and decide alike. A lock is
freed when its holder dies, and its pair is taken by another.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from patcher.ab.record_files import read_record, write_record
from patcher.ab.served_records import ServedHeader, ServedProcess, ServedResult
from patcher.bench import Record, UsageError, VerificationError
from patcher.bench.ab.served import arm_orders
from patcher.bench.stats.comparison import Arm
from patcher.runs.durable import held, held_if_free

_WORDS = {
    "fingerprint": "device, driver or version of a library",
    "sides": "pair of sides",
    "config": "config.json or weights",
}


class _Margin(Record):
    margin_pct: float


class ServedFolder:
    """What is measured of one comparison.

    Args:
        path: the folder; it is made if need be.
        header: what all of its processes share.
        pairs: process pairs that are wanted.
    """

    def __init__(self, path: Path, header: ServedHeader, pairs: int) -> None:
        self.path, self._header, self._pairs = path, header, pairs
        path.mkdir(parents=True, exist_ok=True)
        if not (path / "header.json").is_file():
            write_record(path / "header.json", header)

    def declare(self, margin_pct: float) -> None:
        """Hold the margin to the one that was declared before the first process was measured.

        Raises:
            UsageError: it is another one.
            VerificationError: the file is damaged.
        """
        with held(self.path / "margin.lock"):
            if not (self._margin.is_file() and any(self.path.glob("pair-*.json"))):
                write_record(self._margin, _Margin(margin_pct=margin_pct))
        self._require_margin(margin_pct)

    @property
    def _margin(self) -> Path:
        return self.path / "margin.json"

    def _require_margin(self, margin_pct: float) -> None:
        hint = f"remove {self._margin}"
        declared = read_record(self._margin, _Margin, hint).margin_pct
        if declared != margin_pct:
            raise UsageError(
                f"the margin was declared before it was measured: {declared:g} %",
                f"give --margin-pct {declared:g}, or remove {self.path} to measure again",
            )

    @property
    def taken(self) -> int:
        """Processes that are measured."""
        return sum(self._file(*one).is_file() for one in arm_orders(self._pairs))

    def missing(self) -> list[int]:
        """Numbers of the pairs that are not whole."""
        lacking = (number for number, arm in arm_orders(self._pairs) if not self.has(number, arm))
        return list(dict.fromkeys(lacking))

    def has(self, number: int, arm: Arm) -> bool:
        """Whether that process is measured."""
        return self._file(number, arm).is_file()

    def processes(self) -> tuple[ServedProcess, ...]:
        """All processes, in the order of their pairs.

        Raises:
            VerificationError: a file is damaged.
        """
        return tuple(self._read(*one) for one in arm_orders(self._pairs))

    def adopt(self, result: ServedResult) -> int:
        """Take whole pairs of an earlier result of the same comparison, such as of another host, in
        place of those that are not measured yet; returns their number. None is taken twice.

        Raises:
            UsageError: it is of another comparison or margin, names no machine, as older results
                do, or has pairs that nobody measured.
        """
        known = result.header.config or self._header.config
        header = result.header.model_copy(update={"config": known})
        if (other := different(header, self._header)) is not None:
            raise UsageError(
                f"that result is of another comparison: another {other}",
                "give a result of the same command, on the same kind of machine",
            )
        self._require_margin(result.comparison.margin_pct)
        if not all(one.machine for one in result.processes):
            raise UsageError("that result does not say which machine it is of", "measure it again")
        measured = [_numbered(one, 0) for one in self._measured()]
        pairs: dict[int, list[ServedProcess]] = {}
        for process in result.processes:
            pairs.setdefault(process.pair, []).append(process)
        if not all(map(self._is_pair, pairs.values())):
            raise UsageError(
                "that result is damaged: its processes are not pairs of one machine at its points",
                "give a file as --out wrote it",
            )
        adopted = 0
        for earlier, pair in pairs.items():
            free = (number for number in self.missing() if (number - earlier) % 2 == 0)  # its order
            number = next(free, None)
            if number is None or _numbered(pair[0], 0) in measured:
                continue
            measured += (_numbered(one, 0) for one in pair)
            with self.claimed(number, pair[0].machine) as mine:
                for process in pair if mine else ():
                    self.keep(_numbered(process, number))
                adopted += mine
        return adopted

    def _is_pair(self, pair: Sequence[ServedProcess]) -> bool:
        """Whether these are the two processes of a pair, on one machine."""
        arms = sorted(one.arm for one in pair)
        return (
            arms == ["baseline", "patched"]
            and pair[0].machine == pair[1].machine
            and all(map(self._at_points, pair))
        )

    def _at_points(self, process: ServedProcess) -> bool:
        return tuple(run.point for run in process.runs) == self._header.points

    def _measured(self) -> list[ServedProcess]:
        every = arm_orders(self._pairs)
        return [self._read(number, arm) for number, arm in every if self.has(number, arm)]

    def keep(self, process: ServedProcess) -> None:
        """Write what was measured of a process."""
        write_record(self._file(process.pair, process.arm), process)

    def order(self, number: int) -> list[Arm]:
        """The arms of a pair, in the order in which they are measured."""
        return [arm for one, arm in arm_orders(number + 1) if one == number]

    @contextmanager
    def claimed(self, number: int, machine: str) -> Iterator[bool]:
        """Take a pair: whether it is free. A half that another machine measured is removed.

        Args:
            machine: digest of the host and its GPU.
        """
        with held_if_free(self.path / f"pair-{number}.lock") as mine:
            if mine:
                there: list[Arm] = [arm for arm in self.order(number) if self.has(number, arm)]
                if len(there) == 1 and self._read(number, there[0]).machine != machine:
                    self._file(number, there[0]).unlink()
            yield mine

    def has_compiled(self, arm: Arm, host: str) -> bool:
        """Whether a side was compiled on a host, or is being compiled there."""
        done = self._compiled(arm, host)
        with held_if_free(done.with_suffix(".lock")) as free:
            return not free or done.exists()

    @contextmanager
    def compiling(self, arm: Arm, host: str) -> Iterator[bool]:
        """Whether a side was not yet compiled on a host; waits while another process does it.

        Args:
            host: digest of the host's name.
        """
        done = self._compiled(arm, host)
        with held(done.with_suffix(".lock")):
            needed = not done.exists()
            yield needed
            done.touch()

    def _compiled(self, arm: Arm, host: str) -> Path:
        return self.path / f"compiled-{arm}-{host}"

    def _file(self, number: int, arm: Arm) -> Path:
        return self.path / f"pair-{number}-{arm}.json"

    def _read(self, number: int, arm: Arm) -> ServedProcess:
        path = self._file(number, arm)
        hint = f"remove {path} to measure it again"
        found = read_record(path, ServedProcess, hint)
        if (found.pair, found.arm) != (number, arm) or not self._at_points(found):
            raise VerificationError(f"{path} holds another process than its name says", hint)
        return found


def _numbered(process: ServedProcess, pair: int) -> ServedProcess:
    return process.model_copy(update={"pair": pair})


def machine_of(gpu: str) -> str:
    """A digest of this host and a GPU of it."""
    return _digest(f"{platform.node()} {gpu}")


def this_host() -> str:
    """A digest of this host's name."""
    return _digest(platform.node())


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def different(one: Record, other: Record) -> str | None:
    """The first field in which two comparisons differ, as words; None if they are the same."""
    names = (name for name in type(one).model_fields if getattr(one, name) != getattr(other, name))
    name = next(names, None)
    if name == "workload":
        return different(getattr(one, name), getattr(other, name))
    return None if name is None else _WORDS.get(name, name)
