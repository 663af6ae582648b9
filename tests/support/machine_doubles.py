"""What test_waves and others share."""

from __future__ import annotations

from typing import Any

from process_doubles import Host, ScriptedProcess, ScriptedSide

from patcher.bench import Shape
from patcher.bench.ab.blocks import BASELINE, CONTROL

GAINS = {"a": 2.0, "b": 1.5, "a + b": 3.5, "c": 0.0}


class Machine(Host):
    """What its processes are called, and what each set gains."""

    def __init__(self, gains: dict[str, float] | None = None, **given: Any) -> None:
        super().__init__(**{"bias_pct": 0.03, **given})
        self.gains = GAINS if gains is None else gains
        self.names: list[str] = []
        self.shares: list[float] = []
        self.rounds: list[tuple[int, str]] = []
        self.turns: list[str] = []
        self.ends_at = -1

    def start(self, name: str, share: float) -> Named:
        made = Named(self, "baseline" if name in (BASELINE, CONTROL) else "patched", 1.0)
        made.name = name
        made.speed = 1 + self.rng.gauss(0, self.bias_pct) / 100
        made.speed *= 1 + self.gains.get(name, 0.0) / 100
        self.names.append(name)
        self.shares.append(share)
        self.open.append(made)
        self.most = max(self.most, len(self.open))
        return made


class Named(ScriptedProcess):
    name: str

    def side(self, shape: Shape | None = None) -> NamedSide:
        return NamedSide(self)


class NamedSide(ScriptedSide):
    process: Any

    def prefill(self, seed: int) -> None:
        super().prefill(seed)
        machine: Any = self.process.host
        machine.rounds.append((seed, self.process.name))
        if len(machine.rounds) == machine.ends_at:
            raise KeyboardInterrupt

    def turn(self, steps: int) -> None:
        super().turn(steps)
        machine: Any = self.process.host
        machine.turns.append(self.process.name)
