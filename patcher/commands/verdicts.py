"""What `patcher throughput --patch` ends with: a verdict shown, its file, its page.

Imported inside the command only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from patcher.ab.job import ABJob
from patcher.ab.result import ABResult
from patcher.ab.set_search import find_best_set, folder_name, reported
from patcher.ab.timeline import Timeline
from patcher.ab.verdict import compare_and_decide, decide_again
from patcher.bench import UsageError
from patcher.commands.console import Output, runs_dir, write_out
from patcher.hotspot import Profile
from patcher.integrate import Patch, unpacked
from patcher.report import write
from patcher.report.judged import report_of
from patcher.show.comparison import decision_lines
from patcher.show.quality import quality_lines
from patcher.show.throughput import best_set_lines, other_workload_lines, throughput_lines


@dataclass(frozen=True)
class Verdicts:
    """What is to come of a verdict; each method returns the command's exit code."""

    command: str
    """As it was typed."""
    output: Output
    out: Path | None
    """File for the whole result."""
    report: Path | None
    """Folder for the page."""
    before: Profile | None
    after: Profile | None
    """Of the patched engine."""

    def measured(self, job: ABJob, files: Sequence[Path]) -> int:
        """Measure patches, all in together."""
        with ExitStack() as stack:
            bundles = [stack.enter_context(unpacked(file)) for file in files]
            with self.output.progress() as bar:
                timeline = Timeline(bar)
                result = compare_and_decide(job, bundles, timeline, self.before, self.after)
            took_s = timeline.took_s()
            when = {"command": self.command, "created": _now(), "took_s": took_s}
            result = result.model_copy(update=when)
            return self._tell(result, [Patch.load(one) for one in bundles], (self.command,))

    def once_more(self, kept: Path, files: Sequence[Path], model: str) -> int:
        """Decide anew on what was measured."""
        with ExitStack() as stack:
            patches = [Patch.load(stack.enter_context(unpacked(file))) for file in files]
            result = decide_again(kept, patches, self.before, self.after)
            of = result.measured[0].throughput.workload.model
            if of != model:
                raise UsageError(f"{kept} is of {of}, not of {model}", f"say {of}")
            commands = tuple(filter(None, (result.command, self.command)))
            return self._tell(result, patches, commands)

    def best_set(self, job: ABJob, files: Sequence[Path]) -> int:
        """Measure the combinations, and name the best."""
        output = self.output
        with ExitStack() as stack:
            folders = [stack.enter_context(unpacked(file)) for file in files]
            keep = runs_dir() / folder_name(job, folders)
            if not output.as_json:
                output.err.print(Text(f"each combination is kept in {keep}", style="dim"))
            bar = stack.enter_context(output.progress())
            found = find_best_set(job, folders, keep, Timeline(bar))
            write_out(self.out, found)
            of_id = {patch.manifest.id: patch for patch in map(Patch.load, folders)}
            best = reported(found)
            patches = [of_id[name] for name in best.patches]
            told = report_of(best, patches, _now(), (self.command,), best_set=found.best)
            page = write(told, keep)[0]
        output.emit(found.best, *best_set_lines(found.best), Text(f"report: {page}"))
        return 0 if found.best.patches else 1

    def _tell(self, result: ABResult, patches: Sequence[Patch], commands: tuple[str, ...]) -> int:
        write_out(self.out, result)
        page: list[Text] = []
        if self.report is not None:
            created = result.created or _now()
            told = report_of(result, patches, created, commands, self.before, self.after)
            page.append(Text(f"report: {write(told, self.report)[0]}"))
        measured = result.measured[0]
        lines: list[Any] = [
            *throughput_lines(measured.throughput),
            *quality_lines(measured.quality),
        ]
        if measured.other_workloads is not None:
            lines += other_workload_lines(measured.other_workloads)
        for name, one in zip(result.patches, result.measured, strict=True):
            whose = f" of {name}" if len(result.patches) > 1 else ""
            calls = f"{one.receipt.total_calls:,} calls of the patched kernel"
            lines.append(Text(f"receipt{whose}: {calls}"))
        if result.took_s:
            spent = ", ".join(f"{kind} {seconds:.0f}" for kind, seconds in result.took_s.items())
            lines.append(Text(f"took {sum(result.took_s.values()):.0f} s: {spent}"))
        self.output.emit(result, *lines, *decision_lines(result.decision), *page)
        return 0 if result.decision.verdict == "accept" else 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
