"""From what a run tried to what is worth remembering: rules of failures, gains of changes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patcher.bench import Contract, Environment, Evaluation, Language, Outcome, Record
from patcher.memory.entries import Gain, MemoryRule, Observation, identifier, shapes_of
from patcher.memory.patterns import failure_in, technique_in
from patcher.memory.screen import phrase, significant, vocabulary

_LONGEST_LOG = 20_000
"""Characters; candidates write into logs, too."""
ALIKE = 0.5
"""Share of their words that two causes of the same failed check have in common if they are one."""
_PYTHON = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Resources|Construct)\b.*)$", re.M)
_TRITON = re.compile(r"^[\w.]*CompilationError: at \d+:\d+:\n(?:.*\n)*? *\^ *\n(.+)$", re.M)
"""The line after the source that it quotes and the mark under it."""
_COMPILER = re.compile(
    r"\berror\s*(?:#?[\w-]+)?\s*:\s*(.+)$|.*(\bundefined (?:reference|symbol).*)$", re.M
)
_SAYS = {
    Outcome.COMPILATION_FAILURE: ("build such a source", "the compiler says"),
    Outcome.RUNTIME_ERROR: ("run such a kernel", "the call ends with"),
    Outcome.GUARD_VIOLATION: ("pass with such a kernel", "the judge says"),
}
_UNEXPLAINED = "you cannot do this: {cause}, because the check of {check} fails"


@dataclass(frozen=True)
class Experience:
    """One candidate, as memory reads it."""

    evaluation: Evaluation
    source: str
    parent: Evaluation | None = None
    """Of the candidate that it was made from."""
    change: str | None = None
    """What the analyst recommended."""
    cause: str | None = None
    """What a diagnosis says of a candidate that failed, in a sentence."""


class Where(Record):
    """For what kind of work an entry holds."""

    family: str
    language: Language
    device: str = "unknown"
    architecture: str = "unknown"

    @classmethod
    def of(cls, contract: Contract, language: Language, environment: Environment | None) -> Where:
        # An op may be the user's own: only a public word of it is kept.
        family = contract.operation if contract.operation.lower() in vocabulary() else "other"
        if environment is None:
            return cls(family=family, language=language)
        capability = environment.capability
        return cls(
            family=family,
            language=language,
            device=environment.device,
            architecture=f"sm_{capability.replace('.', '')}"
            if capability
            else environment.device_kind,
        )


def rule_after(
    rules: Sequence[MemoryRule], where: Where, seen: Experience, sighting: Observation, day: str
) -> MemoryRule | None:
    """The rule that a failed candidate teaches, new or known and counted once more."""
    evaluation = seen.evaluation
    failed = evaluation.failed_checks[0] if evaluation.failed_checks else None
    if evaluation.right or failed is None or failed.name == "tripwires":
        return None  # a policy is its user's own
    messages = [*_messages(evaluation.log), failed.detail]
    known = next((found for each in messages if (found := failure_in(each))), None)
    cause = phrase(seen.cause, [seen.source]) if seen.cause else None
    if known is not None:
        name, text = known.name, known.text + (f" (once: {cause})" if cause else "")
        identity = identifier(known.name, where.language)
    elif evaluation.outcome in _SAYS and (said := phrase(messages[0], [seen.source])):
        name = failed.name
        what, says = _SAYS[evaluation.outcome]
        what = f"do this: {cause}" if cause else what
        text = f"you cannot {what}, because {says}: {said}"
        words = " ".join(sorted(significant(said)))
        identity = identifier(failed.name, where.language, words)
    elif cause:
        name = failed.name
        text = _UNEXPLAINED.format(cause=cause, check=name)
        alike = (each for each in rules if _alike(each, where.language, name, text))
        identity = next((each.id for each in alike), identifier(name, where.language, text))
    else:
        return None
    old = next((rule for rule in rules if rule.id == identity), None)
    old = old or MemoryRule(
        id=identity, text=text, language=where.language, failure=name, count=0, last=day
    )
    return old.again(sighting, where.family, where.architecture, day)


def gains_after(
    gains: Sequence[Gain],
    where: Where,
    contract: Contract,
    seen: Experience,
    sighting: Observation,
    day: str,
) -> Iterator[Gain]:
    """What a recommended change was worth, an entry for each size of call that was timed."""
    if seen.change is None or seen.parent is None or not seen.parent.right:
        return
    known = technique_in(seen.change)
    text = known.says if known else phrase(seen.change, [seen.source])
    if text is None:
        return
    name = known.name if known else ""
    for shapes, ratio in _ratios(contract, seen.parent, seen.evaluation).items():
        identity = identifier(name or "other", text, *where.model_dump().values(), shapes)
        old = next((gain for gain in gains if gain.id == identity), None)
        old = old or Gain(
            id=identity, text=text, technique=name, shapes=shapes, last=day, **where.model_dump()
        )
        yield old.again(sighting, ratio, day)


def _ratios(contract: Contract, parent: Evaluation, child: Evaluation) -> dict[str, float | None]:
    """How much faster the child is, by size of call; None: it is not right."""
    if child.right and (parent.baseline, parent.sweep) != (child.baseline, child.sweep):
        return {}  # their speedups are over different things
    sweep = next((each for each in contract.sweeps if each.name == parent.sweep), None)
    if sweep is None:
        return {}
    after = {tuple(sorted(timing.axes.items())): timing.speedup for timing in child.timings}
    found: dict[str, list[float | None]] = defaultdict(list)
    for timing in parent.timings:
        size = contract.bytes_moved(contract.point_of(sweep, timing.axes))
        speedup = after.get(tuple(sorted(timing.axes.items())))
        if not child.right:
            found[shapes_of(size)].append(None)
        elif speedup is not None:
            found[shapes_of(size)].append(math.log(speedup / timing.speedup))
    return {
        shapes: math.exp(sum(known) / len(known))
        if (known := [v for v in logs if v is not None])
        else None
        for shapes, logs in found.items()
    }


def _messages(log: str) -> list[str]:
    """What the tools say in a log, without the sources that they quote; the cause first."""
    log = log[-_LONGEST_LOG:]
    triton = [match[1] for match in _TRITON.finditer(log)]
    if triton:
        return [triton[-1]]
    python = [match[1] for match in _PYTHON.finditer(log)]
    if python:
        return [python[-1]]
    return [match[1] or match[2] for match in _COMPILER.finditer(log)]


def _alike(rule: MemoryRule, language: Language, failure: str, text: str) -> bool:
    if (rule.language, rule.failure) != (language, failure):
        return False
    around = significant(_UNEXPLAINED.format(cause="", check=failure))
    ours, theirs = significant(text) - around, significant(rule.text) - around
    return len(ours & theirs) >= ALIKE * max(len(ours | theirs), 1)
