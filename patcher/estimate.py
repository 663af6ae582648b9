"""What the agent loop on one op would take, before anybody is asked: `optimize --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench import SCHEMA_VERSION, Language, Op, Record, UsageError
from patcher.agent import MAX_TOKENS
from patcher.models import PROVIDERS, TOKENS_CEILING, Role
from patcher.models.budget import JUDGE_LIMIT_S
from patcher.models.ceilings import Ceilings
from patcher.models.registry import Entry, entry_of
from patcher.prompt_room import CHARACTERS_PER_TOKEN, PROMPT_TOKENS
from patcher.prompting import Prompts
from patcher.settings import Settings

LATER_PROMPT = 2.0
"""A later prompt is about so many times as long as the first: it holds a kernel and its timings
(the recorded demo: 1.6 to 2.0)."""
USED_ROOM = 0.25
"""The part of its room that a reply takes, thinking included: an assumption."""
JUDGE_S = 36.0
"""Of one judgement on a GPU: the median of `bench/results/h200-transformers/evaluate-*.json`."""


class Figure(Record):
    """None where it is not known: no price, or tokens that others count."""

    expected: float | None
    worst: float | None


class Estimate(Record):
    """Before a run."""

    schema_version: int = SCHEMA_VERSION
    op: str
    language: Language
    model: str
    analyst: str
    iterations: int
    calls: Figure
    tokens: Figure
    usd: Figure
    gpu_minutes: Figure
    ceilings: Ceilings
    """What stops the run whatever the estimate says."""
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class _Question:
    """One question, with (input, output) tokens: as expected, and of each try in the worst case."""

    entry: Entry | None
    expected: tuple[int, int]
    worst: tuple[tuple[int, int], ...]


def estimate(op: Op, language: Language, settings: Settings, sweep: str | None = None) -> Estimate:
    """Estimate a loop of `settings.iterations` candidates. Asks nobody and needs no key.

    Raises:
        UsageError: an unknown model.
    """
    kind = "cpu" if language is Language.CPP else "cuda"
    prompts = Prompts(op, language, "", op.sweep(kind, sweep))
    first = len(prompts.system("generate") + prompts.generate(None))
    analyst = settings.analyst or settings.model
    questions = list(_questions(settings, first))
    judged_s = 0.0 if kind == "cpu" else JUDGE_S
    limit_s = 0.0 if kind == "cpu" else JUDGE_LIMIT_S
    return Estimate(
        op=op.name,
        language=language,
        model=settings.model,
        analyst=analyst,
        iterations=settings.iterations,
        calls=Figure(
            expected=len(questions), worst=sum(len(question.worst) for question in questions)
        ),
        tokens=_tokens(questions),
        usd=_usd(questions),
        gpu_minutes=Figure(
            expected=settings.iterations * judged_s / 60, worst=settings.iterations * limit_s / 60
        ),
        ceilings=Ceilings.of_run(settings.for_run(), ()),
        assumptions=(
            "expected: every question is asked once and every iteration but the first asks for "
            f"advice; a reply takes {USED_ROOM:.0%} of its room, a later prompt is "
            f"{LATER_PROMPT:g} times the first; {JUDGE_S:g} s for a judgement on a GPU",
            "worst: prompts fill their room at one token for each byte, every reply is cut off "
            f"until it has the most room, a judgement takes {JUDGE_LIMIT_S / 60:g} minutes",
            "calls that fail and may have been billed come on top; a ceiling holds for them, too",
        ),
    )


def _questions(settings: Settings, first: int) -> Iterator[_Question]:
    writer = _entry(settings.model, settings)
    adviser = _entry(settings.analyst or settings.model, settings)
    for iteration in range(settings.iterations):
        characters = first * (LATER_PROMPT if iteration else 1.0)
        if iteration:
            yield _question(adviser, "analyse", characters)
        yield _question(writer, "generate", characters)


def _question(entry: Entry | None, role: Role, characters: float) -> _Question:
    room, most = MAX_TOKENS[role], entry.max_output_tokens if entry else MAX_TOKENS[role]
    rooms = [min(room, most)]
    while rooms[-1] < min(most, TOKENS_CEILING):
        rooms.append(min(2 * rooms[-1], most, TOKENS_CEILING))
    longest = int(max(PROMPT_TOKENS * CHARACTERS_PER_TOKEN, characters)) + 500
    return _Question(
        entry=entry,
        expected=(int(characters / CHARACTERS_PER_TOKEN), int(USED_ROOM * rooms[0])),
        worst=tuple((longest, each) for each in rooms),
    )


def _entry(spec: str, settings: Settings) -> Entry | None:
    """None for files and recordings: nothing is paid, and whoever answers counts the tokens."""
    found = entry_of(spec, settings.models)
    if found is None and spec.partition(":")[0] not in ("exchange", "replay"):
        known = ", ".join((*PROVIDERS, *settings.models))
        raise UsageError(f"unknown model {spec!r}", f"a model is one of: {known}")
    return found


def _tokens(questions: list[_Question]) -> Figure:
    if any(question.entry is None for question in questions):
        return Figure(expected=None, worst=None)
    return Figure(
        expected=sum(sum(question.expected) for question in questions),
        worst=sum(sum(each) for question in questions for each in question.worst),
    )


def _usd(questions: list[_Question]) -> Figure:
    expected = worst = 0.0
    for question in questions:
        if question.entry is None:
            continue
        price = question.entry.price
        if price is None:
            return Figure(expected=None, worst=None)
        expected += price.cost_usd(*question.expected)
        worst += sum(price.cost_usd(*each) for each in question.worst)
    return Figure(expected=expected, worst=worst)
