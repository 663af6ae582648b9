"""How candidates are searched for, as a user asks for it: a strategy, its numbers, and kernels to
begin from."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field, InstanceOf

from patcher.attempts import KnownKernel
from patcher.bench import Candidate, Count, Language, Op, Record, UsageError, check_arguments
from patcher.strategies import MOST_ISLANDS, Strategy, open_strategy


class Search(Record):
    """Recorded with the run, so that resuming needs nothing else."""

    strategy: str = "refine"
    width: int | None = Field(default=None, ge=1)
    """Candidates a round, of strategies that ask several together."""
    islands: int | None = Field(default=None, ge=1, le=MOST_ISLANDS)
    seed: int = 0
    """Of a strategy's draws."""
    known_kernels: tuple[KnownKernel, ...] = Field(
        default=(), validation_alias=AliasChoices("known_kernels", "elsewhere")
    )
    """Kernels to begin from, which work in another language or on another device."""

    @classmethod
    @check_arguments
    def of(
        cls,
        op: InstanceOf[Op] | None,
        language: Language | None,
        strategy: str,
        from_solutions: Sequence[str] = (),
        *,
        width: Count | None = None,
        islands: Annotated[int, Field(ge=1, le=MOST_ISLANDS)] | None = None,
        seed: int | None = None,
    ) -> Search:
        """What a command line asks for; a seed that is not given is drawn. The op is None while a
        profile has not named one.

        Raises:
            UsageError: no such strategy, solution or file, or numbers that do not go with it.
        """
        found = cls(
            strategy=strategy,
            width=width,
            islands=islands,
            seed=secrets.randbelow(1 << 31) if seed is None else seed,
        )
        found.open()
        if not from_solutions and strategy != "translate":
            return found
        if op is None or language is None:
            raise UsageError(
                "a translation needs an op and a language",
                "name both: --op, --language",
            )
        kernels = working(op, from_solutions, language)
        return found.model_copy(update={"known_kernels": kernels})

    def open(self) -> Strategy:
        """The strategy, ready to decide."""
        return open_strategy(self.strategy, width=self.width, islands=self.islands, seed=self.seed)


def working(op: Op, named: Sequence[str], language: Language) -> tuple[KnownKernel, ...]:
    """What `--from-solution` names: a solution of the op or a source file; without a name the op's
    solutions in other languages.

    Raises:
        UsageError: there is no such solution or file, or none to translate.
    """
    known = {
        info.name: KnownKernel(
            name=info.name,
            language=info.language,
            summary=info.summary,
            source=candidate.source,
        )
        for info, candidate in op.solutions()
    }
    if not named:
        named = [name for name, one in known.items() if one.language is not language]
        if not named:
            raise UsageError(
                f"{op.name} has no solution in another language than {language}",
                "name a source file: --from-solution FILE",
            )
    return tuple(known.get(name) or _from_file(op, name, list(known)) for name in named)


def _from_file(op: Op, name: str, known: Sequence[str]) -> KnownKernel:
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"{op.name} has no solution {name!r}, and there is no such file",
            f"it has: {', '.join(known) or 'none'}",
        )
    candidate = Candidate.from_file(op.name, path)
    # The file's own name alone: where it lies is no affair of a run.
    return KnownKernel(name=path.name, language=candidate.language, source=candidate.source)
