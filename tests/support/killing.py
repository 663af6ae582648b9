"""Kill a run at every boundary, resume it, and hold its end against that of a run left alone.

    python tests/support/killing.py [--story loop|whole] [--sample N] [--twice N] [--seed N]

Boundaries are found, not listed: every call of `os` that `patcher/runs/durable.py` and
`patcher/runs/journal.py` make, every change below the folder of runs that the interpreter's audit
events tell of, whoever makes it, and both ends of each effect (a question, a verdict, a
measurement). A write has one more, with half of it on the disk. A child process reaches the
boundary and gets SIGKILL; another one resumes. Prints one JSON document; exit code 1 where
something does not hold.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from killing_stories import COST_USD, STORIES, WORST_USD

from patcher.models.ceilings import account
from patcher.runs import durable, journal
from patcher.runs.journal import fold, read_events
from patcher.runs.run import JOURNAL, Run

PARALLEL = 2
HARMLESS = ("close", "fstat", "stat", "getpid")
"""Calls that leave the disk as it is; just before them is just before the next one."""
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")


class Boundaries:
    """Counts the boundaries that this process reaches, and dies at one of them."""

    def __init__(self, runs: Path, ledger: Path, deadly: int | None) -> None:
        self.names: list[str] = []
        self._runs, self._ledger, self._deadly = str(runs), ledger, deadly
        self._counted = False
        self._opened: dict[int, str] = {}

    def watch(self) -> None:
        """From now on, in this process."""
        for module in (durable, journal):
            module.os = _Counted(self)  # type: ignore[attr-defined]
        sys.addaudithook(self._heard)

    def reach(self, name: str, half: Callable[[], object] | None = None) -> None:
        """Just before the act `name`, and once more with half of it done."""
        for part in ("before", "half of") if half else ("before",):
            if self._deadly == len(self.names):
                if half and part == "half of":
                    half()
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(f"{part} {name}")

    @contextmanager
    def effect(self, step: str) -> Iterator[None]:
        """What the outside does is written to the ledger, which no kill takes back."""
        self.reach(f"the effect {step}")
        with self._ledger.open("a", encoding="utf-8") as file:
            file.write(f"{step}\n")
        yield
        self.reach(f"the end of {step}")

    def act(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """A call of `os`; what it does beneath is not counted again."""
        if name == "open" and arguments[1] == os.O_RDONLY:
            return self._uncounted(name, real, arguments)
        paths = [self._short(str(each)) for each in arguments if isinstance(each, Path)]
        paths = paths or [self._opened.get(arguments[0], "")]
        half = None
        if name == "write":
            handle, content = arguments

            def half() -> None:
                os.write(handle, content[: len(content) // 2])

        self.reach(" ".join([name, *paths]), half)
        return self._uncounted(name, real, arguments)

    def _uncounted(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self._counted = True
        try:
            result = real(*arguments)
        finally:
            self._counted = False
        if name == "open":
            self._opened[result] = self._short(str(arguments[0]))
        return result

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._counted or not arguments or not isinstance(arguments[0], str | bytes | Path):
            return
        writes = isinstance(arguments[-1], int) and arguments[-1] & (os.O_WRONLY | os.O_RDWR)
        path = os.fsdecode(arguments[0])
        if path.startswith(self._runs) and (event in CHANGES or (event == "open" and writes)):
            self.reach(f"{event} {self._short(path)}")

    def _short(self, path: str) -> str:
        """Below the run's folder."""
        return path.removeprefix(self._runs).lstrip("/").partition("/")[2] or "the run's folder"


class _Counted:
    """`os`, each of whose calls is a boundary unless it is harmless."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if not callable(real) or isinstance(real, type) or name in HARMLESS:
            return real
        return lambda *arguments: self._boundaries.act(name, real, arguments)


@dataclass(frozen=True)
class End:
    """What a run has come to: what its journal says, without how often it was tried, and its files
    by digest, without those that hold times."""

    results: dict[str, Any]
    order: tuple[str, ...]
    pending: tuple[str, ...]
    files: dict[str, str]

    @classmethod
    def of(cls, run: Path) -> End:
        state = fold(read_events(run / JOURNAL))
        results = {
            step: {key: value for key, value in data.items() if key != "recovered"}
            for step, data in state.results.items()
        }
        files = {
            str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            for file in run.rglob("*")
            if file.is_file() and file.name not in (JOURNAL, "journal.owner")
        }
        return cls(results, tuple(results), state.pending, files)

    def differences(self, other: End) -> Iterator[str]:
        for kind, ours in asdict(self).items():
            theirs = getattr(other, kind)
            if isinstance(ours, dict):
                keys = sorted(ours.keys() | theirs.keys())
                for key in keys:
                    if ours.get(key) != theirs.get(key):
                        yield f"{kind}: {key}: {ours.get(key)} and not {theirs.get(key)}"
            elif ours != theirs:
                yield f"{kind}: {ours} and not {theirs}"


@dataclass
class Trial:
    """One run, killed at these boundaries of its lives, then left alone."""

    deadly: tuple[int, ...]
    died: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Effects that had happened when it died, with no whole reply on the disk."""
    wrong: list[str] = field(default_factory=list)

    def live(self, story: str, names: Sequence[str], expected: End | None) -> End | None:
        shared = "/dev/shm"  # a kill needs no real disk: what was written stays with the kernel
        where = shared if os.access(shared, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="killing-", dir=where) as name:
            root = Path(name)
            for deadly in self.deadly:
                code = _life(story, root, deadly)
                if code == 0:
                    break  # its last life was shorter than that
                if code != -signal.SIGKILL:
                    self.wrong.append(f"ended with {code}: {_error(root)}")
                    return None
                self.died.append(names[deadly] if not self.died else f"boundary {deadly}")
                again = Counter(self.lost)
                for step, times in _ledger(root).items():
                    if step not in _stored(root) and times > again[step]:
                        self.lost.append(step)
            if (code := _life(story, root, None)) != 0:
                self.wrong.append(f"did not resume, exit code {code}: {_error(root)}")
                return None
            [run] = Run.list(root / "runs")
            found = End.of(run)
            self.wrong += found.differences(expected or found)
            self._count(root, run)
            return found

    def _count(self, root: Path, run: Path) -> None:
        """Nothing twice whose reply was stored, and nothing paid that is not counted."""
        seen = _ledger(root)
        allowed = Counter(self.lost)
        for step, times in seen.items():
            if times != 1 + allowed[step]:
                self.wrong.append(f"{step} happened {times} times")
        paid = sum(times for step, times in seen.items() if "/ask-" in step) * COST_USD
        money = account(read_events(run / JOURNAL))
        # who died between a reservation and its reply cannot know whether it was billed
        most = paid + len(self.died) * WORST_USD
        if money.reserved or not paid - 1e-9 <= money.spent_usd <= most + 1e-9:
            self.wrong.append(f"{money} in the journal, {paid} paid")


def _life(story: str, root: Path, deadly: int | None) -> int:
    """Go on with the run in a child, until it ends or dies; its exit code."""
    pid = os.fork()
    if pid == 0:
        _child(story, root, deadly)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _child(story: str, root: Path, deadly: int | None) -> NoReturn:
    code = 70
    try:
        boundaries = Boundaries(root / "runs", root / "ledger", deadly)
        boundaries.watch()
        STORIES[story](root / "runs", boundaries.effect)
        (root / "names").write_text("\n".join(boundaries.names))
        code = 0
    except BaseException:
        (root / "error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _ledger(root: Path) -> Counter[str]:
    file = root / "ledger"
    return Counter(file.read_text().split("\n")[:-1] if file.exists() else [])


def _stored(root: Path) -> set[str]:
    """Steps whose whole artefact is on the disk, renamed into place or not."""
    found = set()
    for file in (root / "runs").glob("*/steps/**/*.json*"):
        try:
            json.loads(file.read_text())
        except ValueError:
            continue
        folder = file.parent.relative_to(next(p for p in file.parents if p.name == "steps"))
        name = file.name.removesuffix(".tmp").removesuffix(".json").removeprefix(".")
        found.add(str(folder / name))
    return found


def _error(root: Path) -> str:
    file = root / "error"
    return file.read_text()[-2000:] if file.exists() else "nothing said"


def enumerate_boundaries(story: str) -> tuple[list[str], End]:
    """Those of a run that is left alone, and where it ends."""
    with tempfile.TemporaryDirectory(prefix="killing-") as name:
        root = Path(name)
        if (code := _life(story, root, None)) != 0:
            raise SystemExit(f"left alone, {story} ends with {code}: {_error(root)}")
        [run] = Run.list(root / "runs")
        return (root / "names").read_text().split("\n"), End.of(run)


def live_all(story: str, trials: Sequence[Trial], names: Sequence[str], end: End) -> list[Trial]:
    """The trials, lived; in several processes."""
    with tempfile.TemporaryDirectory(prefix="killing-") as folder:
        for worker in range(PARALLEL):
            if os.fork() == 0:
                mine = trials[worker::PARALLEL]
                for trial in mine:
                    trial.live(story, names, end)
                (Path(folder) / str(worker)).write_text(json.dumps([asdict(t) for t in mine]))
                os._exit(0)
        for _ in range(PARALLEL):
            os.wait()
        files = sorted(Path(folder).iterdir())
        return [Trial(**each) for file in files for each in json.loads(file.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--story", choices=sorted(STORIES), default="loop")
    parser.add_argument("--sample", type=int, help="so many boundaries; default: all")
    parser.add_argument("--twice", type=int, default=0, help="trials that are killed twice")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="killing-") as warm:
        STORIES[asked.story](Path(warm), lambda _: nullcontext())  # imports once, not in each child
    gc.freeze()  # pages that a child does not touch are not copied
    draw = random.Random(asked.seed)
    names, end = enumerate_boundaries(asked.story)
    every = list(range(len(names)))
    chosen = every if asked.sample is None else sorted(draw.sample(every, asked.sample))
    trials = [Trial((at,)) for at in chosen]
    trials += [Trial((draw.choice(every), draw.choice(every))) for _ in range(asked.twice)]
    lived = live_all(asked.story, trials, names, end)
    failed = [asdict(trial) for trial in lived if trial.wrong or not trial.died]
    lost = sorted({trial.died[0] for trial in lived if trial.lost and len(trial.died) == 1})
    document = {
        "story": asked.story,
        "boundaries": len(names),
        "trials": len(lived),
        "lost_at": lost,
        "failed": failed,
    }
    print(json.dumps(document, indent=1))
    return 1 if failed or len(lived) != len(trials) else 0


if __name__ == "__main__":
    sys.exit(main())
