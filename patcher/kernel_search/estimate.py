"""What the agent loop on one op would take, before anybody is asked: `optimize --dry-run`."""

from __future__ import annotations

import math
from typing import NamedTuple

from patcher.agent import MAX_TOKENS
from patcher.bench import SCHEMA_VERSION, Language, Op, Record
from patcher.judges.meter import JUDGE_LIMIT_S
from patcher.kernel_search.stage import analyst_of
from patcher.models import MODELS, Role, unknown_model
from patcher.models.ceilings import SpendingLimits
from patcher.models.client import more_room
from patcher.models.prices import old_prices
from patcher.models.registry import ModelEntry, entry_of
from patcher.prompting.rendering import Prompts
from patcher.prompting.room import CHARACTERS_PER_TOKEN
from patcher.settings import OFF, Settings
from patcher.strategies import IndependentSamples, Single
from patcher.strategies.search import Search

LATER_PROMPT = 2.0
"""A later prompt is about so many times as long as the first: it holds a kernel and its timings
(the recorded demo: 1.6 to 2.0)."""
USED_ROOM = 0.25
"""The part of its room that a reply takes, thinking included: an assumption."""
JUDGE_S = 36.0
"""Of one judgement on a GPU: the median of `bench/results/h200-transformers/evaluate-*.json.xz`."""


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
    ceilings: SpendingLimits
    """What stops the run whatever the estimate says."""
    assumptions: tuple[str, ...]


class _OfPackage(NamedTuple):
    """A model that another package brings: what it costs only that package knows."""

    provider: str


_Source = ModelEntry | _OfPackage | None
"""Who is asked; None is a file or a recording."""


class _Call(NamedTuple):
    """One call of a model."""

    entry: _Source
    input_tokens: int
    output_tokens: int

    @property
    def usd(self) -> float | None:
        if self.entry is None:
            return 0.0
        if isinstance(self.entry, _OfPackage):
            return None
        price = self.entry.price
        return price.cost_usd(self.input_tokens, self.output_tokens) if price else None


def estimate(
    op: Op,
    language: Language,
    settings: Settings,
    sweep: str | None = None,
    search: Search | None = None,
) -> Estimate:
    """Estimate a loop of `settings.iterations` candidates. Asks nobody and needs no key.

    Args:
        search: the strategy, and the kernels that all prompts show; None is iterative refinement.

    Raises:
        UsageError: an unknown model.
    """
    search = search or Search()
    kind = "cpu" if language.traits.device == "cpu" else "cuda"
    prompts = Prompts(
        op,
        language,
        "",
        op.sweep(kind, sweep),
        tokens=settings.prompt_tokens,
        known_kernels=search.known_kernels,
    )
    first = len(prompts.system("generate") + prompts.generate(None))
    analyst = analyst_of(settings, language) or settings.model
    iterations, alone = _candidates(search, settings.iterations)
    expected, worst = _calls(settings, analyst, first, iterations, alone)
    judged_s = 0.0 if kind == "cpu" else JUDGE_S
    limit_s = 0.0 if kind == "cpu" else JUDGE_LIMIT_S
    return Estimate(
        op=op.name,
        language=language,
        model=settings.model,
        analyst=analyst,
        iterations=iterations,
        calls=Figure(expected=len(expected), worst=len(worst)),
        tokens=Figure(expected=_tokens(expected), worst=_tokens(worst)),
        usd=Figure(expected=_usd(expected), worst=_usd(worst)),
        gpu_minutes=Figure(expected=iterations * judged_s / 60, worst=iterations * limit_s / 60),
        ceilings=SpendingLimits.of_run(settings.for_run(), ()),
        assumptions=(
            f"expected: every question is asked once and {_advised(iterations, alone)}"
            f"; a reply takes {USED_ROOM:.0%} of its room, a later "
            f"prompt is {LATER_PROMPT:g} times the first; {JUDGE_S:g} s for a judgement on a GPU",
            "worst: prompts fill their room at one token for each byte, every reply is cut off "
            f"until it has the most room, a judgement takes {JUDGE_LIMIT_S / 60:g} minutes",
            "calls that fail and may have been billed come on top; a ceiling holds for them, too",
            *filter(None, [old_prices()]),
        ),
    )


def _candidates(search: Search, most: int) -> tuple[int, int]:
    """How many the strategy asks for, and how many of them anew: without a parent or advice."""
    strategy = search.open()
    begun = len(strategy.next((), most))
    if isinstance(strategy, Single):
        return begun, begun
    return most, most if isinstance(strategy, IndependentSamples) else begun


def _advised(iterations: int, alone: int) -> str:
    if alone >= iterations:
        return "no candidate is made of another, so none asks for advice"
    which = "the first" if alone == 1 else f"the first {alone}"
    return f"every iteration but {which} asks for advice, of the dearer adviser"


def _calls(
    settings: Settings, analyst: str, first: int, iterations: int, alone: int
) -> tuple[list[_Call], list[_Call]]:
    """As expected, and in the worst case. Advice comes from the analyst or from the diagnoser: the
    dearer one counts.

    Args:
        first: characters of the first prompt.
        alone: iterations that begin anew; the others ask for advice.
    """
    writer = _entry(settings.model, settings)
    named: dict[Role, str] = {
        "analyse": analyst,
        "diagnose": settings.diagnoser or settings.model,
    }
    advisers: dict[Role, _Source] = {
        role: _entry(name, settings) for role, name in named.items() if name != OFF
    }
    room = settings.prompt_tokens
    expected, worst = list[_Call](), list[_Call]()
    for iteration in range(iterations):
        anew = iteration < alone
        characters = first * (1.0 if anew else LATER_PROMPT)
        if not anew and advisers:
            advice = [_question(entry, role, characters, room) for role, entry in advisers.items()]
            usual = max([usual for usual, _ in advice], key=_dearness)
            longest = max([longest for _, longest in advice], key=_dearness)
            expected, worst = expected + usual, worst + longest
        usual, longest = _question(writer, "generate", characters, room)
        expected += usual
        worst += longest
    return expected, worst


def _question(
    entry: _Source, role: Role, characters: float, prompt_tokens: int
) -> tuple[list[_Call], list[_Call]]:
    """The calls for one question: one, as expected, or one for each room in the worst case."""
    room = MAX_TOKENS[role]
    most = entry.max_output_tokens if isinstance(entry, ModelEntry) else room
    rooms = [min(room, most)]
    while (more := more_room(rooms[-1], most)) is not None:
        rooms.append(more)
    prompt = int(max(prompt_tokens * CHARACTERS_PER_TOKEN, characters)) + 500
    usual = _Call(entry, int(characters / CHARACTERS_PER_TOKEN), int(USED_ROOM * rooms[0]))
    return [usual], [_Call(entry, prompt, each) for each in rooms]


def _dearness(calls: list[_Call]) -> tuple[float, int]:
    usd = _usd(calls)
    return math.inf if usd is None else usd, sum(call.output_tokens for call in calls)


def _entry(spec: str, settings: Settings) -> _Source:
    """None for files and recordings: nothing is paid, and whoever answers counts the tokens."""
    found, provider = entry_of(spec, settings.models), spec.partition(":")[0]
    if found is not None or provider in ("exchange", "replay"):
        return found
    if provider in MODELS and not MODELS.ours(provider):
        return _OfPackage(provider)
    raise unknown_model(spec, settings.models)


def _tokens(calls: list[_Call]) -> int | None:
    if not all(isinstance(call.entry, ModelEntry) for call in calls):
        return None
    return sum(call.input_tokens + call.output_tokens for call in calls)


def _usd(calls: list[_Call]) -> float | None:
    costs = [call.usd for call in calls]
    return None if None in costs else sum(cost or 0.0 for cost in costs)
