"""A folder of loops: starts them, resumes them, and tells what each waits for.

LOOPS/code/              patcher as it was when the first loop began; commit.txt says which
LOOPS/imported/          ops of one's own, such as `patcher import --out` writes
LOOPS/patcher.toml       settings, such as what the prompts add
LOOPS/runs/NAME/         the run of a loop; runs/NAME.log is what its last command said
LOOPS/prompts/NAME/      its prompts, and the replies beside them
LOOPS/exchange/          jobs and verdicts; late.txt: jobs that were put off before
LOOPS/travel/, cache/, wheels/, sittings/    see `travel.py`
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from patcher.bench import PatcherError, UsageError, WaitingError
from patcher.bench.lab.sittings.frozen import CODE, freeze
from patcher.runs.run import Run
from patcher.settings import OFF
from patcher.status import status

LIMIT_S = 600
"""Of one command: nothing is judged and no model is asked in it."""
TOLD_LINES = 5
"""Of the log of a command that failed."""
PROMPT, REPLY, LOG = ".prompt.md", ".reply.md", ".log"
PACKED = "packed.txt"
"""In `travel`: the names of the jobs that it holds."""
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class LoopProblem:
    """One line of a list of problems: `NAME OP [OPTIONS of patcher optimize]`."""

    name: str
    op: str
    options: tuple[str, ...]


def read_problems(file: Path) -> list[LoopProblem]:
    """The problems of a list; `#` begins a comment.

    Raises:
        UsageError: it cannot be read, or a line names no loop and op, or a loop twice.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", "give a list of problems") from error
    found: dict[str, LoopProblem] = {}
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"{file}, line {number}: {error}", "close the quote") from error
        if not words:
            continue
        if len(words) < 2 or not _NAME.fullmatch(words[0]) or words[1].startswith("-"):
            raise UsageError(
                f"{file}, line {number} does not begin with a name and an op", "say NAME OP OPTIONS"
            )
        if words[0] in found:
            raise UsageError(f"{file}, line {number}: {words[0]} is there twice", "rename one")
        if words[0].endswith(LOG):
            hint = "rename it: the log of a loop is beside its run"
            raise UsageError(f"{file}, line {number}: {words[0]} ends in {LOG}", hint)
        found[words[0]] = LoopProblem(words[0], words[1], tuple(words[2:]))
    return list(found.values())


class LoopFolder:
    """What lies in LOOPS, and what is done with it.

    Raises:
        UsageError: LOOPS is a file.
    """

    def __init__(self, root: Path, say: Callable[[str], None] = print) -> None:
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root} is a file", "give the folder of the loops")
        self.root, self.say = root.absolute(), say
        self.exchange = self.root / "exchange"

    def names(self, only: Sequence[str] = ()) -> list[str]:
        """The loops that were started.

        Raises:
            UsageError: one that is asked for is not among them.
        """
        found = sorted(path.name for path in (self.root / "runs").glob("*") if Run.list(path))
        if unknown := sorted(set(only) - set(found)):
            known = ", ".join(found) or "none"
            raise UsageError(f"no loop {unknown[0]} in {self.root}", f"there are: {known}")
        return [name for name in found if not only or name in only]

    def require(self) -> None:
        """
        Raises:
            UsageError: nothing here is of loops.
        """
        if not (self.root / CODE).is_dir() and not self.names():
            raise UsageError(f"{self.root} is no folder of loops", "pack, start or restore first")

    def run_of(self, name: str) -> Run:
        """The newest run of a loop, to be read."""
        return Run.open(Run.list(self.root / "runs" / name)[-1], read_only=True)

    def start(
        self,
        problems: Sequence[LoopProblem],
        options: Sequence[str],
        only: Sequence[str] = (),
        untold: bool = False,
    ) -> list[str]:
        """Start the loops that are not there yet; each writes its first prompt. Returns what went
        wrong.

        Args:
            options: of `patcher optimize`, for all; those of a problem's own line come after them.
            only: names of problems; empty: all.
            untold: start also if no worker has told what its machine is.

        Raises:
            UsageError: no worker has, or `only` names what is no problem.
        """
        if unknown := sorted(set(only) - {each.name for each in problems}):
            raise UsageError(f"no problem {unknown[0]} in the list", "name one that is")
        todo = [
            each
            for each in problems
            if (not only or each.name in only) and not Run.list(self.root / "runs" / each.name)
        ]
        if todo and not untold and not list((self.exchange / "machines").glob("*.json")):
            raise UsageError(
                "no worker has told what its machine is, and a loop keeps what it is told first",
                "hold a sitting without jobs before (pack, sitting.sh, back), or say --untold",
            )
        for name in ("jobs", "results", "machines"):
            (self.exchange / name).mkdir(parents=True, exist_ok=True)
        failed = []
        for problem in todo:
            (self.root / "prompts" / problem.name).mkdir(parents=True, exist_ok=True)
            words = (*("optimize", problem.op), *options, *problem.options)
            model = f"exchange:prompts/{problem.name}"
            places = ("--model", model, "--judge", "exchange:exchange")
            code = self._patcher(problem.name, *words, *places)
            if code != WaitingError.exit_code:
                failed.append(self._told(problem.name, code))
        return failed

    def step(self, only: Sequence[str] = ()) -> list[str]:
        """Resume every loop that has not ended: it takes in replies and verdicts, and writes jobs
        and the next prompts. Returns what went wrong.

        Raises:
            UsageError: nothing here is of loops.
        """
        self.require()
        going = [
            (name, run.id)
            for name, run in ((name, self.run_of(name)) for name in self.names(only))
            if status(run).state != "finished"
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            codes = pool.map(lambda one: self._patcher(one[0], "resume", one[1]), going)
        failed = []
        for (name, _), code in zip(going, codes, strict=True):
            over = code in (0, 1) and status(self.run_of(name)).state == "finished"
            if code != WaitingError.exit_code and not over:
                failed.append(self._told(name, code))
        return failed

    def _patcher(self, name: str, *words: str) -> int:
        """Run the loops' own patcher. `exchange:DIR` is below the current folder, so that LOOPS can
        be moved."""
        freeze(self.root, self.say)
        imported = self.root / "imported"
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root / "code"),
            "PATCHER_OPS": str(imported) if imported.is_dir() else "",
            "PATCHER_HOME": str(self.root / "home"),
            "PATCHER_MEMORY": OFF,  # who learns from whom would depend on the order of replies
            "PATCHER_RUNS_DIR": f"runs/{name}",
        }
        runs = self.root / "runs"
        runs.mkdir(exist_ok=True)
        with (runs / f"{name}{LOG}").open("wb") as log:
            try:
                return subprocess.run(
                    [sys.executable, "-P", "-m", "patcher", *words],
                    cwd=self.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT_S,
                ).returncode
            except subprocess.TimeoutExpired:
                return 124

    def _told(self, name: str, code: int) -> str:
        log = (self.root / "runs" / f"{name}{LOG}").read_text(encoding="utf-8", errors="replace")
        return "\n  ".join([f"{name}: exit code {code}", *log.splitlines()[-TOLD_LINES:]])

    def open_prompts(self) -> list[Path]:
        """Prompts without a reply."""
        found = sorted(self.root.glob(f"prompts/*/*{PROMPT}"))
        return [each for each in found if not _filled(reply_to(each))]

    def open_jobs(self) -> list[Path]:
        """Jobs without a verdict."""
        return [
            each
            for each in sorted((self.exchange / "jobs").glob("[!.]*"))
            if not (self.exchange / "results" / each.name / "manifest.json").is_file()
        ]

    def packed(self) -> set[str]:
        """The jobs that `travel` holds."""
        file = self.root / "travel" / PACKED
        return set(file.read_text(encoding="utf-8").split()) if file.is_file() else set()

    def state(self) -> Iterator[str]:
        """A line for each thing that is waited for, and for each loop that ended."""
        prompts, jobs, names = self.open_prompts(), self.open_jobs(), self.names()
        yield from (f"reply  {reply_to(each)}" for each in prompts)
        yield from (f"judge  {each.name}" for each in jobs)
        if jobs and self.packed() != {each.name for each in jobs}:
            yield "pack   travel does not hold these jobs: a sitting would judge others"
        ended = 0
        for name in names:
            try:
                now = status(self.run_of(name))
            except PatcherError as error:
                yield f"broken {name}: {error.message}"
                continue
            if now.state == "finished":
                ended += 1
                best = f", best {now.best_speedup:.3f}x" if now.best_speedup else ""
                yield f"ended  {name}: {now.candidates} candidates{best}"
        yield (
            f"{len(prompts)} replies to be written, {len(jobs)} jobs to be judged, "
            f"{ended} of {len(names)} loops ended"
        )


def reply_to(prompt: Path) -> Path:
    """The file that a reply to the prompt goes to."""
    return prompt.with_name(prompt.name.removesuffix(PROMPT) + REPLY)


def _filled(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0
