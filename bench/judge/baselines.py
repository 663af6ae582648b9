"""The strongest baseline that runs on this machine, and its last measured time.

The choice is cached by op, sweep, device and library versions, since it takes compiling and timing
all of them. The chosen baseline is timed anew with every candidate.
"""

from __future__ import annotations

import statistics

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
from patcher.bench.records import Record, remembered
from patcher.bench.toolchains import cache_root

LOAD_S = 600.0
BLOCKS = 4


class Strongest(Record):
    """Times of every baseline of an op on one machine."""

    name: str
    times_us: dict[str, float]
    """Geometric mean over the sweep, of baselines that run."""
    missing: dict[str, str]
    """Reasons why the others do not run."""

    def all(self) -> dict[str, BaselineTime]:
        """Baselines that run, then the others."""
        found = {name: BaselineTime(time_us=us) for name, us in self.times_us.items()}
        return found | {name: BaselineTime(missing=why) for name, why in self.missing.items()}


def strongest(
    op: Op, sweep: Sweep, device: str, runner: Runner, threads: int | None, progress: Progress
) -> Strongest:
    """Read the times from the cache, or time every baseline in the trusted runner.

    Raises:
        MissingError: none runs.
    """
    sources = [(op.folder / name).read_text("utf-8") for name in ("op.toml", "baselines.py")]
    key = fingerprint(device, threads, sweep.name, *sources)
    path = cache_root() / "strongest" / f"{op.name}-{key}.json"
    return remembered(path, Strongest, lambda: _measured(op, sweep, device, runner, progress))


def _measured(op: Op, sweep: Sweep, device: str, runner: Runner, progress: Progress) -> Strongest:
    draw = Secrets()
    stock = RandomPool(op, sweep, device, draw)
    times: dict[str, float] = {}
    missing: dict[str, str] = {}
    for index, name in enumerate(op.baselines):
        progress("baselines", index, len(op.baselines))
        try:
            runner.command("baseline", LOAD_S, op=op.name, name=name)
            arm = TimedArm(op, device, runner, stock, checked=False)
            medians = []
            for point in sweep.points():
                sets = block_sets(op, point, device)
                made = (op, point, sets, device, stock, draw)
                arm.prepare(fresh_sets(*made), LOAD_S)
                blocks = [
                    arm.block(fresh_sets(*made), list(range(sets)))[0] for _ in range(BLOCKS + 1)
                ]
                medians.append(statistics.median(block.figure for block in blocks[1:]))
            times[name] = geomean(medians)
        except RunnerFailure as failure:
            if failure.fatal:
                raise
            first = failure.message.splitlines()[0]
            if failure.kind in ("ImportError", "ModuleNotFoundError"):
                missing[name] = f"not here: {first.split(': ', 1)[-1][:200]}"
            else:
                missing[name] = f"failed: {first[:200]}"
    if not times:
        raise MissingError(f"no baseline of {op.name} runs here: {missing}", "see `patcher doctor`")
    return Strongest(name=min(times, key=lambda name: times[name]), times_us=times, missing=missing)
