"""What the commands of `patcher throughput` end with: a verdict shown, its file, its page.

Imported inside the commands only.
"""

from __future__ import annotations

import shlex
import sys
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
from patcher.ab.verdict import compare_and_decide, decide_again, read_result
from patcher.bench import UsageError
from patcher.bench.stats.compare import compare, read_samples
from patcher.commands.console import Output, runs_dir, write_out
from patcher.commands.throughput_options import NO_PAGE, PageChoice
from patcher.hotspot import Profile, read
from patcher.integrate import Patch, unpacked
from patcher.report import write
from patcher.report.judged import report_of
from patcher.settings import resolve
from patcher.show.comparison import comparison_lines
from patcher.show.throughput import best_set_lines, result_lines


def decide_on_samples(
    file: Path, model: str, margin_pct: float | None, output: Output, out: Path | None
) -> int:
    """Show the verdict on recorded samples; returns the command's exit code."""
    margin = resolve({"margin_pct": margin_pct}).margin_pct
    comparison = compare(read_samples(file), margin_pct=margin)
    write_out(out, comparison)
    output.emit(comparison, comparison_lines(model, comparison))
    return 0 if comparison.verdict == "accept" else 1


@dataclass(frozen=True)
class ThroughputCommand:
    """Where the result of a command goes; each method returns the command's exit code."""

    command: str
    """As it was typed."""
    output: Output
    out: Path | None
    """File for the whole result."""
    page: PageChoice

    @classmethod
    def of(
        cls,
        output: Output,
        out: Path | None,
        page: PageChoice = NO_PAGE,
    ) -> ThroughputCommand:
        """Of the command line that runs."""
        return cls(shlex.join(["patcher", *sys.argv[1:]]), output, out, page)

    def compare(self, job: ABJob, files: Sequence[Path]) -> int:
        """Measure patches, all in together, and decide."""
        before, after = self._profiles(job.workload.model)
        with ExitStack() as stack:
            bundles = [stack.enter_context(unpacked(file)) for file in files]
            with self.output.progress() as bar:
                timeline = Timeline(bar)
                result = compare_and_decide(job, bundles, timeline, before, after, runs_dir())
            took_s = timeline.took_s()
            when = {"command": self.command, "created": _now(), "took_s": took_s}
            result = result.model_copy(update=when)
            patches = [Patch.load(one) for one in bundles]
            return self._show(result, patches, (self.command,), before, after)

    def decide_again(self, file: Path, files: Sequence[Path], model: str | None) -> int:
        """Decide anew on what was measured.

        Args:
            file: what `compare --out` wrote.
            model: None, or the model that it must be of.
        """
        of = read_result(file).measured[0].throughput.workload.model
        before, after = self._profiles(of)
        with ExitStack() as stack:
            patches = [Patch.load(stack.enter_context(unpacked(one))) for one in files]
            result = decide_again(file, patches, before, after)
            if model not in (None, of):
                raise UsageError(f"{file} is of {of}, not of {model}", f"say {of}")
            commands = tuple(filter(None, (result.command, self.command)))
            return self._show(result, patches, commands, before, after)

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

    def _profiles(self, model: str) -> tuple[Profile | None, Profile | None]:
        """Of the engine as it comes, and of the patched one."""
        before, after = (
            read(one, model) if one else None
            for one in (self.page.profile, self.page.patched_profile)
        )
        return before, after

    def _show(
        self,
        result: ABResult,
        patches: Sequence[Patch],
        commands: tuple[str, ...],
        before: Profile | None,
        after: Profile | None,
    ) -> int:
        write_out(self.out, result)
        lines: list[Any] = [*result_lines(result)]
        if self.page.report is not None:
            created = result.created or _now()
            told = report_of(result, patches, created, commands, before, after)
            lines.append(Text(f"report: {write(told, self.page.report)[0]}"))
        self.output.emit(result, *lines)
        return 0 if result.decision.verdict == "accept" else 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
