"""The strongest baseline that runs on this machine, and its last measured time.

Times are cached by op, sweep, device and library versions, since it takes compiling and timing all
of them. Only a baseline whose package is not installed is remembered as missing: one that failed is
tried again for the next verdict, and one that was timed while other programs disturbed it is timed
again. The chosen baseline is timed anew with every candidate.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from patcher.bench.errors import MissingError
from patcher.bench.judge import Progress
from patcher.bench.judge.cases import Secrets
from patcher.bench.judge.evaluation import BaselineTime, geomean
from patcher.bench.judge.planning import block_sets
from patcher.bench.judge.process import Runner
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.timed_arm import TimedArm, fresh_sets
from patcher.bench.judge.zygote import RunnerFailure
from patcher.bench.machine.environment import fingerprint
from patcher.bench.ops.contract import Sweep
from patcher.bench.ops.op import Op
from patcher.bench.records import Record, write_atomically
from patcher.bench.toolchains import cache_root

LOAD_S = 600.0
BLOCKS = 4
DISTURBED = 2.5
"""Largest ratio of the slowest to the fastest block of a baseline at one point; beyond it the
baseline is timed again for the next verdict. A neighbour on the same core can double a time."""


class Strongest(Record):
    """Times of every baseline of an op on one machine."""

    name: str
    """The fastest one."""
    times_us: dict[str, float]
    """Geometric mean over the sweep, of baselines that run."""
    missing: dict[str, str]
    """Why baselines do not run whose package is not installed."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Why the others failed; they are tried again for the next verdict."""
    disturbed: tuple[str, ...] = ()
    """Baselines timed while other programs disturbed them; they are timed again."""

    def all(self) -> dict[str, BaselineTime]:
        """Baselines that run, then the others."""
        found = {name: BaselineTime(time_us=us) for name, us in self.times_us.items()}
        reasons = {**self.missing, **{name: f"failed: {why}" for name, why in self.failed.items()}}
        return found | {
            name: BaselineTime(missing=why, installed=name in self.failed)
            for name, why in reasons.items()
        }

    @property
    def settled(self) -> set[str]:
        """Names of the baselines that need not be tried again."""
        return {*self.times_us, *self.missing} - {*self.disturbed}


@dataclass
class BaselineTimer:
    """Times baselines of one sweep in the trusted runner."""

    op: Op
    sweep: Sweep
    device: str
    runner: Runner
    progress: Progress

    def strongest(self, known: Strongest | None) -> Strongest:
        """Time every baseline that `known` does not settle.

        Raises:
            MissingError: none runs.
        """
        settled = known.settled if known is not None else set()
        times = {} if known is None else dict(known.times_us)
        missing = {} if known is None else dict(known.missing)
        failed: dict[str, str] = {}
        disturbed: list[str] = []
        draw = Secrets()
        stock = RandomPool(self.op, self.sweep, self.device, draw)
        for index, name in enumerate(self.op.baselines):
            if name in settled:
                continue
            self.progress("baselines", index, len(self.op.baselines))
            try:
                time_us, quiet = self._time(name, stock, draw)
            except RunnerFailure as failure:
                if failure.fatal:
                    raise
                times.pop(name, None)
                first = failure.message.splitlines()[0]
                if failure.kind in ("ImportError", "ModuleNotFoundError"):
                    missing[name] = f"not here: {first.split(': ', 1)[-1][:200]}"
                else:
                    failed[name] = first[:200]
                continue
            # other programs only ever slow a baseline down
            times[name] = min(time_us, times.get(name, math.inf))
            if not quiet:
                disturbed.append(name)
        if not times:
            raise MissingError(
                f"no baseline of {self.op.name} runs here: {missing | failed}",
                "see `patcher doctor`",
            )
        return Strongest(
            name=min(times, key=lambda name: times[name]),
            times_us=times,
            missing=missing,
            failed=failed,
            disturbed=tuple(disturbed),
        )

    def _time(self, name: str, stock: RandomPool, draw: Secrets) -> tuple[float, bool]:
        """Geometric mean over the sweep in microseconds, and whether the blocks agree."""
        self.runner.command("baseline", LOAD_S, op=self.op.name, name=name)
        arm = TimedArm(self.op, self.device, self.runner, stock, checked=False)
        medians, quiet = [], True
        for point in self.sweep.points():
            sets = block_sets(self.op, point, self.device)
            made = (self.op, point, sets, self.device, stock, draw)
            arm.prepare(fresh_sets(*made), LOAD_S)
            blocks = [arm.block(fresh_sets(*made), list(range(sets)))[0] for _ in range(BLOCKS + 1)]
            figures = [block.figure for block in blocks[1:]]
            quiet = quiet and max(figures) <= DISTURBED * min(figures)
            medians.append(statistics.median(figures))
        return geomean(medians), quiet


def strongest(
    op: Op, sweep: Sweep, device: str, runner: Runner, threads: int | None, progress: Progress
) -> Strongest:
    """Read the times from the cache, and time every baseline that it does not settle.

    Raises:
        MissingError: none runs.
    """
    sources = [(op.folder / name).read_text("utf-8") for name in ("op.toml", "baselines.py")]
    key = fingerprint(device, threads, sweep.name, *sources)
    path = cache_root() / "strongest" / f"{op.name}-{key}.json"
    known = _remembered(path)
    if known is not None and not set(op.baselines) - known.settled:
        return known
    found = BaselineTimer(op, sweep, device, runner, progress).strongest(known)
    write_atomically(path, found.model_dump_json())
    return found


def _remembered(path: Path) -> Strongest | None:
    """The cached times; None if there are none, or the file is damaged or of another version."""
    if not path.is_file():
        return None
    try:
        return Strongest.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError):
        return None
