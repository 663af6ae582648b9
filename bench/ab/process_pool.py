"""The processes of an A/B: start them, find how many fit, and end them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple

from patcher.bench.ab.blocks import BASELINE
from patcher.bench.ab.phases import ABPhase
from patcher.bench.ab.processes import (
    SHARE_ALONE,
    SHARE_BESIDE,
    WARM_UP_STEPS,
    Launcher,
    Process,
    open_all,
)
from patcher.bench.ab.windows import prompt_seed
from patcher.bench.errors import MissingError, PatcherError, UsageError
from patcher.bench.workload import Workload


class Room(NamedTuple):
    """How many processes fit side by side, and what limits them."""

    processes: int
    why: str = ""


class ProcessPool(Generic[Process]):
    """Starts processes, keeps them warm, and ends them."""

    def __init__(
        self,
        launcher: Launcher[Process],
        workload: Workload,
        seed: int,
        stagger_s: float | None,
        tell: Callable[[ABPhase, str], None],
    ) -> None:
        """Set up an empty pool.

        Args:
            stagger_s: see `patcher.bench.ab.processes.ABPlan.stagger_s`.
            tell: called with the phase and the current step in words.
        """
        self.room: Room | None = None
        """None: not yet known."""
        self.baseline: Process | None = None
        """A warm process to reuse: it measured the memory, or was the control's."""
        self._launcher, self._workload, self._seed = launcher, workload, seed
        self._stagger_s, self._tell = stagger_s, tell
        self._open: dict[str, Process] = {}

    @property
    def together(self) -> bool:
        """Whether the processes of a block are loaded at once."""
        return self.room is not None and self.room.processes > 1

    def start(self, names: Sequence[str]) -> dict[str, Process]:
        """Warm processes with these names; a reused baseline comes first."""
        first, self.baseline = self.baseline, None
        going_on: dict[str, Process] = {} if first is None else {BASELINE: first}
        share = 2 * SHARE_BESIDE / len(names) if self.together else SHARE_ALONE
        return going_on | open_all(
            [name for name in names if name not in going_on],
            lambda name: self._started(name, share),
            self._stagger_s,
        )

    def end(self, but: str = "") -> None:
        """End the open processes in parallel, since an engine may take seconds to end.

        Args:
            but: the name of one to keep.
        """
        ending = [process for name, process in self._open.items() if name != but]
        self._open = {name: process for name, process in self._open.items() if name == but}
        self.baseline = self._open.get(but)
        with ThreadPoolExecutor(max(len(ending), 1)) as pool:
            ended = [pool.submit(process.close) for process in ending]
        for one in ended:
            one.result()

    def find_room(self, together: bool | None) -> Room:
        """How many fit, found once by the memory that a baseline takes; it is reused if two fit.

        Args:
            together: whether two are to be loaded at once; None: if they fit.

        Raises:
            MissingError, UsageError: the baseline cannot be started, regardless of memory.
        """
        if self.room is None:
            self.room = (
                self._room() if together is None else Room(1 + together, "as an engine is served")
            )
        return self.room

    def _room(self) -> Room:
        self._tell(ABPhase.LOAD, "loading the baseline, to see how many fit")
        try:
            first = self._started(BASELINE, SHARE_BESIDE)
        except (MissingError, UsageError):
            raise  # these errors do not depend on memory
        except PatcherError as error:
            why = f"with half of the memory it does not start: {error.message[:200]}"
            self._tell(ABPhase.PAIRS, why)
            return Room(1, why)
        memory = first.memory()
        self._tell(ABPhase.PAIRS, f"{memory.room} fit side by side")
        if memory.room < 2:
            self.end()
            return Room(1, f"one takes {_gib(memory.held)}, {_gib(memory.free)} are left")
        self.baseline = first
        return Room(memory.room)

    def _started(self, name: str, share: float) -> Process:
        self._tell(ABPhase.LOAD, f"loading {name}")
        process = self._launcher.start(name, share)
        self._open[name] = process
        steps = min(self._workload.output_len, WARM_UP_STEPS)
        process.warm_up(prompt_seed(self._seed, -1), steps)
        return process


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
