"""Takes trials within a time: loads the processes, takes what is left, keeps it, ends them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from patcher.bench import BudgetError
from patcher.bench.ab.processes import WARM_UP_STEPS
from patcher.bench.ab.windows import prompt_seed
from patcher.bench.lab.trials.folder import Folder, TrialsStart
from patcher.bench.lab.trials.trial import (
    Repeats,
    Resident,
    Setting,
    TrialKind,
    VerdictTrial,
    draw,
    take_repeats,
    take_windows,
    verdict_on,
)
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe

COLD_S, WARM_S, BESIDE_S = 135.0, 48.0, 75.0
"""Until the first process is loaded, with nothing compiled yet and with all; until five more are,
side by side. Guesses until OUT has its own."""
PREFILL_TOKENS_PER_S, STEP_S, COMMAND_S = 30_000.0, 0.005, 0.0005
"""What the estimate of a window goes by: the whole batch, and one question to a process."""
RESERVE_S = 25.0
"""Kept of `--seconds` to end all processes and to write."""
StartProcess = Callable[[int, bool, float], Resident]
"""Starts process number N, with the patch in or not, within so many seconds."""


class Needs(NamedTuple):
    """Seconds, as estimated, or as the last ones took."""

    start: float
    aa: float
    planted: float
    repeats: float


@dataclass
class Driver:
    """Takes what is left within the time, one thing after the other."""

    folder: Folder
    seconds: float
    start: StartProcess
    clock: Callable[[], float] = time.monotonic
    loaded: dict[int, Resident] = field(default_factory=dict)
    """By number."""

    def __post_init__(self) -> None:
        self.begun = self.clock()
        asked = self.folder.asked
        self.setting = Setting(asked.workload, asked.pairs, asked.margin_pct, asked.seed)
        self.patched = asked.process_pairs if asked.patch else 0

    def needs(self) -> Needs:
        asked, folder = self.folder.asked, self.folder
        pair = asked.process_pairs * 2 * self._window_s(asked.workload.output_len)
        repeats = (asked.repeats + 1) * self._window_s(asked.repeat_steps)
        start = folder.starts[-1].wall_s if folder.starts else COLD_S + BESIDE_S
        aa = [one.seconds for one in folder.trials if one.kind != "planted"]
        planted = [one.seconds for one in folder.trials if one.kind == "planted"]
        own = [one.seconds for one in folder.repeats]
        return Needs(
            start,
            max(aa, default=(asked.pairs + 1) * pair),
            max(planted, default=(asked.planted_pairs + 1) * pair),
            max(own, default=repeats),
        )

    def _window_s(self, steps: int) -> float:
        load = self.folder.asked.workload
        prefill = load.batch * load.input_len / PREFILL_TOKENS_PER_S
        return prefill + steps * (STEP_S + 0.4 * COMMAND_S) + 5 * COMMAND_S

    def plan(self) -> list[str]:
        """What is left and what it takes, in words."""
        left, needs = self.folder.left(), self.needs()
        each = {"repeats": needs.repeats, "planted": needs.planted}
        lines = [f"start of {self.folder.asked.processes} processes: {needs.start:.0f} s"]
        total = needs.start + RESERVE_S
        if not self.folder.starts:
            lines[0] += f" ({WARM_S + BESIDE_S:.0f} s where vLLM's compile cache is warm)"
        for kind, count in left.items():
            seconds = count * each.get(kind, needs.aa)
            total += seconds
            lines.append(f"{kind}: {count} left, {seconds:.0f} s")
        lines.append(f"in all {total:.0f} s; each call pays the start again")
        return lines

    def run(self) -> None:
        """Until nothing is left or time is up. No process outlives this.

        Raises:
            PatcherError: a process does not load, or died.
        """
        asked, needs = self.folder.asked, self.needs()
        if not any(self.folder.left().values()):
            return
        if needs.aa + RESERVE_S > self.seconds:
            raise BudgetError(
                f"a trial takes about {needs.aa:.0f} s, beside the start of all processes",
                "give more --seconds",
            )
        with ClockMonitor(asked.workload.device) as clocks:
            try:
                self._load(clocks)
                self._repeats(clocks)
                # planted ones in between, so that a short call has some of each
                while (kind := self._next()) is not None and self._time_for(kind):
                    self._trial(kind, clocks)
            finally:
                self._close()

    @property
    def processes(self) -> list[Resident]:
        return [self.loaded[number] for number in sorted(self.loaded)]

    def _close(self) -> None:
        """Side by side: an engine may take seconds to end."""
        with ThreadPoolExecutor(max(len(self.loaded), 1)) as pool:
            list(pool.map(lambda process: process.close(), self.processes))
        self.loaded.clear()

    def _next(self) -> TrialKind | None:
        left = {kind: count for kind, count in self.folder.left().items() if kind != "repeats"}
        most = max(left, key=lambda kind: left[kind] / self._wanted(kind))
        return cast(TrialKind, most) if left[most] else None

    def _wanted(self, kind: str) -> int:
        asked = self.folder.asked
        return max(asked.planted if kind == "planted" else asked.trials, 1)

    def _time_for(self, kind: TrialKind | str) -> bool:
        needs = self.needs()
        seconds = {"planted": needs.planted, "repeats": needs.repeats}.get(kind, needs.aa)
        return self._left_s() > 1.2 * seconds

    def _left_s(self) -> float:
        return self.seconds - RESERVE_S - (self.clock() - self.begun)

    def _load(self, clocks: ClockMonitor) -> None:
        """The first one alone, which compiles; then the others side by side."""
        asked = self.folder.asked
        count, begun = asked.processes, self.clock()

        def started(number: int) -> float:
            began = self.clock()
            patched = number >= count - self.patched
            self.loaded[number] = self.start(number, patched, max(self._left_s(), 1.0))
            return self.clock() - began

        alone = [0, *([count - 1] if self.patched else [])]  # a patch is compiled in, too
        took = {number: started(number) for number in alone}
        rest = [number for number in range(count) if number not in took]
        with ThreadPoolExecutor(len(rest)) as pool:
            took |= dict(zip(rest, pool.map(started, rest), strict=True))
        for process in self.processes:
            process.warm_up(prompt_seed(asked.seed, -1), WARM_UP_STEPS)
        self.folder.keep(
            TrialsStart(
                number=len(self.folder.starts),
                seconds=tuple(took[number] for number in range(count)),
                wall_s=self.clock() - begun,
                peak_gib=tuple(process.memory().peak / 2**30 for process in self.processes),
                environment=describe(
                    asked.workload.device, asked.workload.threads, clocks.description
                ),
            )
        )
        self._say(f"{count} processes in {self.clock() - begun:.0f} s")

    def _repeats(self, clocks: ClockMonitor) -> None:
        asked, done = self.folder.asked, {one.process for one in self.folder.repeats}
        todo = [n for n in range(asked.processes) if n not in done]
        for number in todo[: self.folder.left()["repeats"]]:
            if not self._time_for("repeats"):
                return
            begun = self.clock()
            rates, step_s = take_repeats(
                self.setting, self.processes[number], asked.repeats, asked.repeat_steps, clocks
            )
            found = Repeats(
                process=number,
                start=self.folder.starts[-1].number,
                tokens_per_s=rates,
                step_s=step_s,
                seconds=self.clock() - begun,
            )
            self.folder.keep(found)
            self._say(f"repeats in process {number}: CV {found.cv_pct:.3f} %")

    def _trial(self, kind: TrialKind, clocks: ClockMonitor) -> None:
        asked, number, begun = self.folder.asked, len(self.folder.trials), self.clock()
        rng = random.Random(f"{asked.seed}:{number}")
        drawn = draw(rng, asked.processes, self.patched, asked.process_pairs)
        delay_s, setting = 0.0, self.setting
        if kind == "planted":
            delay_s = self._step_s(clocks) * asked.gain_pct / 100
            setting = setting._replace(pairs=asked.planted_pairs)
        windows = take_windows(setting, number, drawn, self.processes, clocks, delay_s)
        found = VerdictTrial(
            number=number,
            kind=kind,
            process_pairs=drawn,
            start=self.folder.starts[-1].number,
            batch=asked.workload.batch,
            delay_s=delay_s,
            comparison=verdict_on(self.setting, windows),
            windows=windows,
            seconds=self.clock() - begun,
        )
        self.folder.keep(found)
        one = found.comparison
        said = "no usable pair" if one is None else f"{one.verdict} {one.gain_pct:+.3f} %"
        self._say(f"{kind} trial {number + 1}: {said}, {found.seconds:.1f} s")

    def _step_s(self, clocks: ClockMonitor) -> float:
        """Seconds of a decode step without a delay."""
        if self.folder.repeats:
            return min(one.step_s for one in self.folder.repeats)
        steps = self.setting.workload.output_len
        return take_repeats(self.setting, self.processes[0], 2, steps, clocks)[1]

    def _say(self, what: str) -> None:
        print(f"[{self.clock() - self.begun:5.0f} s] {what}", file=sys.stderr, flush=True)
