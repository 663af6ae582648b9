"""Run trials within a time limit: load the processes, run the remaining trials, store them."""

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
from patcher.bench.lab.trials.folder import Folder, Start
from patcher.bench.lab.trials.trial import (
    Kind,
    Repeats,
    Resident,
    Setting,
    VerdictTrial,
    draw,
    take_repeats,
    take_windows,
    verdict_on,
)
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe

COLD_S, WARM_S, BESIDE_S = 135.0, 48.0, 75.0
"""Estimated seconds to load the first process with a cold and a warm compile cache, and to load
five more concurrently. Measured values in OUT replace them."""
PREFILL_TOKENS_PER_S, STEP_S, COMMAND_S = 30_000.0, 0.005, 0.0005
"""Estimates for a window: prefill of the whole batch, a decode step, a command to a process."""
RESERVE_S = 25.0
"""Seconds of `--seconds` that are reserved for ending processes and writing."""
StartProcess = Callable[[int, bool, float], Resident]
"""Starts a process, given its number, whether it is patched, and a time limit in seconds."""


class Needs(NamedTuple):
    """Seconds that each kind of step takes: measured if known, else estimated."""

    start: float
    aa: float
    planted: float
    repeats: float


@dataclass
class Driver:
    """Runs the remaining trials within a time limit."""

    folder: Folder
    seconds: float
    start: StartProcess
    clock: Callable[[], float] = time.monotonic
    loaded: dict[int, Resident] = field(default_factory=dict)
    """Loaded processes by number."""

    def __post_init__(self) -> None:
        self.start_s = self.clock()
        options = self.folder.options
        self.setting = Setting(options.workload, options.pairs, options.margin_pct, options.seed)
        self.patched = options.process_pairs if options.patch else 0

    def needs(self) -> Needs:
        options, folder = self.folder.options, self.folder
        pair = options.process_pairs * 2 * self._window_s(options.workload.output_len)
        repeats = (options.repeats + 1) * self._window_s(options.repeat_steps)
        start = folder.starts[-1].wall_s if folder.starts else COLD_S + BESIDE_S
        aa = [one.seconds for one in folder.trials if one.kind != "planted"]
        planted = [one.seconds for one in folder.trials if one.kind == "planted"]
        own = [one.seconds for one in folder.repeats]
        return Needs(
            start,
            max(aa, default=(options.pairs + 1) * pair),
            max(planted, default=(options.planted_pairs + 1) * pair),
            max(own, default=repeats),
        )

    def _window_s(self, steps: int) -> float:
        load = self.folder.options.workload
        prefill = load.batch * load.input_len / PREFILL_TOKENS_PER_S
        return prefill + steps * (STEP_S + 0.4 * COMMAND_S) + 5 * COMMAND_S

    def plan(self) -> list[str]:
        """Remaining trials and their estimated time, in words."""
        left, needs = self.folder.left(), self.needs()
        each = {"repeats": needs.repeats, "planted": needs.planted}
        lines = [f"start of {self.folder.options.processes} processes: {needs.start:.0f} s"]
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
        """Run trials until none is left or the time is up, and end all processes.

        Raises:
            BudgetError: the time is too short for one trial.
            PatcherError: a process did not load, or ended.
        """
        options, needs = self.folder.options, self.needs()
        if not any(self.folder.left().values()):
            return
        if needs.aa + RESERVE_S > self.seconds:
            raise BudgetError(
                f"a trial takes about {needs.aa:.0f} s, beside the start of all processes",
                "give more --seconds",
            )
        with ClockMonitor(options.workload.device) as clocks:
            try:
                self._load(clocks)
                self._repeats(clocks)
                # interleave planted trials, so that a short call has some of each kind
                while (kind := self._next()) is not None and self._time_for(kind):
                    self._trial(kind, clocks)
            finally:
                self._close()

    @property
    def processes(self) -> list[Resident]:
        return [self.loaded[number] for number in sorted(self.loaded)]

    def _close(self) -> None:
        """Close all processes concurrently, since an engine may take seconds to end."""
        with ThreadPoolExecutor(max(len(self.loaded), 1)) as pool:
            list(pool.map(lambda process: process.close(), self.processes))
        self.loaded.clear()

    def _next(self) -> Kind | None:
        left = {kind: count for kind, count in self.folder.left().items() if kind != "repeats"}
        most = max(left, key=lambda kind: left[kind] / self._wanted(kind))
        return cast(Kind, most) if left[most] else None

    def _wanted(self, kind: str) -> int:
        options = self.folder.options
        return max(options.planted if kind == "planted" else options.trials, 1)

    def _time_for(self, kind: Kind | str) -> bool:
        needs = self.needs()
        seconds = {"planted": needs.planted, "repeats": needs.repeats}.get(kind, needs.aa)
        return self._left_s() > 1.2 * seconds

    def _left_s(self) -> float:
        return self.seconds - RESERVE_S - (self.clock() - self.start_s)

    def _load(self, clocks: ClockMonitor) -> None:
        """Load the first process alone, since it compiles, and then the others concurrently."""
        options = self.folder.options
        count, begin = options.processes, self.clock()

        def started(number: int) -> float:
            began = self.clock()
            patched = number >= count - self.patched
            self.loaded[number] = self.start(number, patched, max(self._left_s(), 1.0))
            return self.clock() - began

        alone = [0, *([count - 1] if self.patched else [])]  # a patched process compiles, too
        took = {number: started(number) for number in alone}
        rest = [number for number in range(count) if number not in took]
        with ThreadPoolExecutor(len(rest)) as pool:
            took |= dict(zip(rest, pool.map(started, rest), strict=True))
        for process in self.processes:
            process.warm_up(prompt_seed(options.seed, -1), WARM_UP_STEPS)
        self.folder.keep(
            Start(
                number=len(self.folder.starts),
                seconds=tuple(took[number] for number in range(count)),
                wall_s=self.clock() - begin,
                peak_gib=tuple(process.memory().peak / 2**30 for process in self.processes),
                environment=describe(
                    options.workload.device, options.workload.threads, clocks.description
                ),
            )
        )
        self._say(f"{count} processes in {self.clock() - begin:.0f} s")

    def _repeats(self, clocks: ClockMonitor) -> None:
        options, done = self.folder.options, {one.process for one in self.folder.repeats}
        todo = [n for n in range(options.processes) if n not in done]
        for number in todo[: self.folder.left()["repeats"]]:
            if not self._time_for("repeats"):
                return
            begin = self.clock()
            rates, step_s = take_repeats(
                self.setting, self.processes[number], options.repeats, options.repeat_steps, clocks
            )
            record = Repeats(
                process=number,
                start=self.folder.starts[-1].number,
                tokens_per_s=rates,
                step_s=step_s,
                seconds=self.clock() - begin,
            )
            self.folder.keep(record)
            self._say(f"repeats in process {number}: CV {record.cv_pct:.3f} %")

    def _trial(self, kind: Kind, clocks: ClockMonitor) -> None:
        options, number, begin = self.folder.options, len(self.folder.trials), self.clock()
        rng = random.Random(f"{options.seed}:{number}")
        drawn = draw(rng, options.processes, self.patched, options.process_pairs)
        delay_s, setting = 0.0, self.setting
        if kind == "planted":
            delay_s = self._step_s(clocks) * options.gain_pct / 100
            setting = setting._replace(pairs=options.planted_pairs)
        windows = take_windows(setting, number, drawn, self.processes, clocks, delay_s)
        record = VerdictTrial(
            number=number,
            kind=kind,
            process_pairs=drawn,
            start=self.folder.starts[-1].number,
            batch=options.workload.batch,
            delay_s=delay_s,
            comparison=verdict_on(self.setting, windows),
            windows=windows,
            seconds=self.clock() - begin,
        )
        self.folder.keep(record)
        one = record.comparison
        text = "no usable pair" if one is None else f"{one.verdict} {one.gain_pct:+.3f} %"
        self._say(f"{kind} trial {number + 1}: {text}, {record.seconds:.1f} s")

    def _step_s(self, clocks: ClockMonitor) -> float:
        """Seconds of a decode step without a delay."""
        if self.folder.repeats:
            return min(one.step_s for one in self.folder.repeats)
        steps = self.setting.workload.output_len
        return take_repeats(self.setting, self.processes[0], 2, steps, clocks)[1]

    def _say(self, what: str) -> None:
        print(f"[{self.clock() - self.start_s:5.0f} s] {what}", file=sys.stderr, flush=True)
