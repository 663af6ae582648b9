"""Memory in a run: what it was told is a step of it, and what it tried is learned once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from patcher.attempts import Attempt, LoopResult
from patcher.bench import Environment, Evaluation, Language, MissingError, Op, UsageError
from patcher.bench.machine.environment import describe
from patcher.memory import Experience, LessonIds, Memory, MemoryText, Where
from patcher.runs.run import Run


def recall_for_run(
    run: Run, memory: Memory | None, op: Op, language: Language, kind: str | None
) -> MemoryText:
    """What earlier runs know of such work, as it was when this run began.

    Args:
        kind: of the device here; None when the judge is remote.

    Raises:
        UsageError: a file of the memory was edited into something that cannot be read.
    """

    def look() -> MemoryText:
        if memory is None:
            return MemoryText()
        return memory.recall(Where.of(op.contract, language, _environment(kind)))

    return run.step(f"{op.name}/recall", look, MemoryText)


def learn_from_run(
    run: Run, memory: Memory | None, op: Op, found: LoopResult, say: Callable[[str], None]
) -> None:
    """Learn from a finished loop. A memory that cannot be written costs the run nothing: it is
    said, and resuming tries again."""
    step = f"{op.name}/learn"
    if memory is None or run.done(step):
        return
    seen = list(experiences(run, found))
    try:
        learned = run.step(
            step, lambda: memory.learn(run.id, op.contract, found.language, seen), LessonIds
        )
    except (UsageError, MissingError) as error:
        say(f"memory: nothing learned: {error.message}; {error.hint}")
    else:
        counts = f"{len(learned.rules)} rules, {len(learned.techniques)} techniques"
        say(f"memory: {counts} in {memory.folder}")


def experiences(run: Run, found: LoopResult) -> Iterator[Experience]:
    """Every candidate of a loop that was judged, once each."""
    causes = {
        attempt.parents[0]: attempt.diagnosis.critical_issue
        for attempt in found.iterations
        if attempt.diagnosis and attempt.parents
    }
    for attempt in found.iterations:
        if attempt.file is None or attempt.duplicate_of is not None:
            continue
        parent = change = None
        if attempt.recommendation and attempt.parents:
            parent = _evaluation(run, found, found.iterations[attempt.parents[0]])
            change = attempt.recommendation.change
        yield Experience(
            evaluation=_evaluation(run, found, attempt),
            # bytes: reading as text would change line ends
            source=(run.path / attempt.file).read_bytes().decode(),
            parent=parent,
            change=change,
            cause=causes.get(attempt.iteration),
        )


def _evaluation(run: Run, found: LoopResult, attempt: Attempt) -> Evaluation:
    at = attempt.iteration if attempt.duplicate_of is None else attempt.duplicate_of
    return run.load(f"{found.op}/{at}/evaluate", Evaluation)


def _environment(kind: str | None) -> Environment | None:
    """Where candidates will be timed; None where that is not here."""
    if kind is None:
        return None
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            return None
    return describe(kind)
