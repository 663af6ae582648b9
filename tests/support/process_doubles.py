"""What test_process_pairs and others share."""

from __future__ import annotations

import random

from measure_sample import WORKLOAD

from patcher import bench
from patcher.bench.ab.processes import (
    ProcessMemory,
)
from patcher.bench.ab.windows import Taken
from patcher.bench.stats.comparison import Arm

GIB = 1 << 30


class Host:
    """A double for a machine: what its processes take of its memory, and what differs by process.

    `gain_pct` is the patch's; every process has a constant of its own, of SD `bias_pct`.
    """

    def __init__(
        self, gain_pct: float = 3.0, bias_pct: float = 0.1, size: int = 10 * GIB, total: int = 100
    ) -> None:
        self.gain_pct, self.bias_pct, self.size, self.total = gain_pct, bias_pct, size, total * GIB
        self.rng = random.Random(1)
        self.started: list[tuple[Arm, float]] = []
        self.open: list[ScriptedProcess] = []
        self.most = 0
        self.dies_after: int | None = None

    def start(self, name: str, share: float) -> ScriptedProcess:
        arm: Arm = "patched" if name == "patched" else "baseline"
        self.started.append((arm, share))
        speed = 1 + self.rng.gauss(0, self.bias_pct) / 100
        made = ScriptedProcess(self, arm, speed * (1 + self.gain_pct / 100 * (arm == "patched")))
        if arm == "patched" and len([one for one, _ in self.started if one == arm]) == 1:
            made.compiling = GIB  # whichever is the first of its kind
        self.open.append(made)
        self.most = max(self.most, len(self.open))
        return made


class ScriptedProcess:
    vocab_size = 100

    def __init__(self, host: Host, arm: Arm, speed: float) -> None:
        self.host, self.arm, self.speed = host, arm, speed
        self.windows, self.compiling = 0, 0

    def side(self, shape: bench.Shape | None = None) -> ScriptedSide:
        return ScriptedSide(self, WORKLOAD.batch if shape is None else shape.batch)

    def warm_up(self, seed: int, steps: int) -> None:
        return

    def in_steps(self, seed: int) -> list[float]:
        return [0.01 / self.speed] * 9 + [0.02]

    def memory(self) -> ProcessMemory:
        free = self.host.total - len(self.host.open) * self.host.size
        peak = self.host.size + (self.arm == "patched") + self.compiling
        return ProcessMemory(self.host.size, peak, free)

    def close(self) -> None:
        if self in self.host.open:
            self.host.open.remove(self)


class ScriptedSide:
    seeds: list[tuple[int, Arm]] = []  # noqa: RUF012

    def __init__(self, process: ScriptedProcess, batch: int = WORKLOAD.batch) -> None:
        self.process, self.batch = process, batch

    def prefill(self, seed: int) -> None:
        self.seeds.append((seed, self.process.arm))
        self.process.windows += 1
        self.decode_s, self.steps = 0.0, 0
        # the first window of a process is slow
        self.slow = 3.0 if self.process.windows == 1 else 1.0

    def turn(self, steps: int) -> None:
        host = self.process.host
        if host.dies_after is not None and len(self.seeds) > host.dies_after:
            raise bench.PatcherError("the patched process ended (killed by SIGKILL): last words")
        noise = 1 + host.rng.gauss(0, 0.0005)
        self.decode_s += self.slow * (steps - 1) * 0.01 * noise / self.process.speed
        self.steps += steps

    def end(self) -> Taken:
        tokens = [[1] * (1 + self.steps)] * self.batch
        calls = self.steps if self.process.arm == "patched" else 0
        return Taken(tokens, self.decode_s, 0.1, calls)
