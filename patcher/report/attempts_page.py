"""`ops/<op>/attempts.md`: the candidates of a run as a page of links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patcher.attempts import Attempt, Progress
from patcher.models import Usage
from patcher.models.ceilings import dollars
from patcher.report.markup import code, plain, table
from patcher.report.wording import clip, times
from patcher.runs.run import Run
from patcher.status import best_of


class AttemptsPage:
    """Write the page; the loop updates it as it goes."""

    def __init__(self, run: Run, op: str) -> None:
        self._run, self._op = run, op
        self._attempts: list[Attempt] = []

    def hear(self, progress: Progress) -> None:
        if progress.attempt:
            self._attempts.append(progress.attempt)
            folder = f"ops/{self._op}"
            page = attempts_page(self._op, self._attempts, self._run.path / folder)
            self._run.write(f"{folder}/attempts.md", page)


def attempts_page(op: str, attempts: Sequence[Attempt], folder: Path) -> str:
    """GitHub Markdown with links relative to `folder`, which holds the iterations' folders."""
    best, total = best_of(attempts), Usage()
    rows = []
    for attempt in attempts:
        total += attempt.usage
        number = str(attempt.iteration)
        rows.append(
            [
                f"[{number}]({number}/)" + (" **best**" if attempt is best else ""),
                str(attempt.round),
                attempt.phase + _parents(attempt),
                str(attempt.outcome).replace("_", " "),
                times(attempt.geomean_speedup),
                plain(clip("; ".join((attempt.detail, *attempt.repairs)), 300)),
                code(attempt.model),
                "" if total.cost_usd is None else dollars(total.cost_usd),
                _files(folder / number),
            ]
        )
    head = ["#", "Round", "Pass", "Outcome", "Speedup", "Detail", "Model", "Cost so far", "Files"]
    return f"# {plain(op)}: candidates\n\n{table(head, rows, 'rr  r  r')}\n{_tokens(total)}"


def _tokens(usage: Usage) -> str:
    """A line on what went to models and came from them; empty where they count nothing."""
    if usage.input_tokens is None or usage.output_tokens is None:
        return ""
    cached = usage.cached_tokens or 0
    kept = f", {cached:,} of them read from a provider's cache" if cached else ""
    return f"\nTokens: {usage.input_tokens:,} in{kept}; {usage.output_tokens:,} out.\n"


def _parents(attempt: Attempt) -> str:
    if attempt.duplicate_of is not None:
        return f" (the same source as {attempt.duplicate_of})"
    return f" of {', '.join(map(str, attempt.parents))}" if attempt.parents else ""


def _files(folder: Path) -> str:
    """Links to prompt, reply, build and verdict, in the order of their creation."""
    wanted = ("analyse", "diagnose", "generate", "candidate", "evaluation")
    names = [path.name for path in folder.iterdir() if path.is_file() and path.name[0] != "."]
    ordered = [
        name
        for word in wanted
        for part in ("prompt", "")
        for name in sorted(names)
        if name.startswith(f"{word}.") and (part in name if part else "prompt" not in name)
    ]
    return " ".join(f"[{_label(name)}]({folder.name}/{name})" for name in ordered)


def _label(name: str) -> str:
    return name.removesuffix(".md").removesuffix(".json").replace(".", " ")
