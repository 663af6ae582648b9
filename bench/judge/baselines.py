"""The strongest baseline that runs here, and what it was when it was last measured.

Which one is the strongest is kept in the cache by op, sweep, device and library versions, since
finding it means compiling and timing them all; the one chosen is timed anew beside every candidate.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from pathlib import Path

from bench.contract import Sweep
from bench.environment import cpu_name, driver_version, package_versions
from bench.errors import MissingError
from bench.evaluation import geomean
from bench.judge import Progress
from bench.judge.cases import Secrets
from bench.judge.process import Runner
from bench.judge.zygote import RunnerFailure
from bench.op import Op
from bench.records import Record
from bench.timing import Arm, Batch, block_sets
from bench.toolchains import cache_root

LOAD_S = 600.0
BLOCKS = 4


class Strongest(Record):
    """What was found of every baseline of an op on one machine."""

    name: str
    times_us: dict[str, float]
    """Geometric mean over the sweep, of those that run."""
    missing: dict[str, str]
    """Why the others do not."""

    def told(self) -> dict[str, str]:
        return {**{name: f"{us:.3g} us" for name, us in self.times_us.items()}, **self.missing}


def strongest(
    op: Op, sweep: Sweep, device: str, runner: Runner, threads: int | None, progress: Progress
) -> Strongest:
    """From the cache, or by timing every baseline in the trusted runner.

    Raises:
        MissingError: none runs.
    """
    path = _path(op, sweep, device, threads)
    if path.is_file():
        return Strongest.model_validate_json(path.read_text(encoding="utf-8"))
    found = _measured(op, sweep, device, runner, list(op.baselines), progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}")
    staged.write_text(found.model_dump_json(), encoding="utf-8")
    staged.replace(path)
    return found


def _measured(
    op: Op, sweep: Sweep, device: str, runner: Runner, names: list[str], progress: Progress
) -> Strongest:
    draw = Secrets()
    times: dict[str, float] = {}
    missing: dict[str, str] = {}
    for index, name in enumerate(names):
        progress("baselines", index, len(names))
        try:
            runner.command("baseline", LOAD_S, op=op.name, name=name)
            arm = Arm(op, device, runner, checked=False)
            medians = []
            for point in sweep.points():
                sets = block_sets(op, point, device)
                arm.prepare(point, sets, draw, LOAD_S)
                blocks = [
                    arm.block(Batch.draw(arm, point, draw).data, list(range(sets)))[0]
                    for _ in range(BLOCKS + 1)
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


def _path(op: Op, sweep: Sweep, device: str, threads: int | None) -> Path:
    if device == "cuda":
        import torch

        machine = [torch.cuda.get_device_name(), driver_version()]
    else:
        machine = [cpu_name(), str(threads)]
    sources = [(op.folder / name).read_text("utf-8") for name in ("op.toml", "baselines.py")]
    known = json.dumps([*sources, sweep.name, *machine, package_versions()], sort_keys=True)
    key = hashlib.sha256(known.encode()).hexdigest()[:24]
    return cache_root() / "strongest" / f"{op.name}-{key}.json"
