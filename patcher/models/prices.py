"""What models cost, from `prices.toml`."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from functools import cache
from importlib import resources

from patcher.bench import Record

OLD_DAYS = 90
"""Days after which list prices are shown with a warning."""


class CacheShares(Record):
    """What tokens of a provider's cache cost, as shares of the price of input."""

    read: float
    written: float
    """For five minutes."""


UNKNOWN_CACHE = CacheShares(read=1.0, written=2.0)
"""The most that is charged where shares are not known, or where a cache was not asked for."""


class Price(Record):
    """US dollars per million tokens."""

    input: float
    output: float
    cache: CacheShares = UNKNOWN_CACHE
    long_above: int | None = None
    """Prompts of more tokens than this cost `long_input` and `long_output`."""
    long_input: float | None = None
    long_output: float | None = None

    def times(self, share: float) -> Price:
        """All of it at this share."""
        known = self.model_dump(include={"input", "output", "long_input", "long_output"})
        return self.model_copy(
            update={name: each * share for name, each in known.items() if each is not None}
        )

    def cost_usd(
        self, input_tokens: int, output_tokens: int, *, read: int = 0, written: int = 0
    ) -> float:
        """The cost of a call in US dollars.

        Args:
            input_tokens: all of the prompt.
            read: of these, read from the provider's cache.
            written: of these, written to it.
        """
        is_long = self.long_above is not None and input_tokens > self.long_above
        per_input = self.long_input if is_long and self.long_input is not None else self.input
        per_output = self.long_output if is_long and self.long_output is not None else self.output
        charged = input_tokens + read * (self.cache.read - 1) + written * (self.cache.written - 1)
        return (charged * per_input + output_tokens * per_output) / 1e6


class Prices(Record):
    default: str
    """The model that is used when none is named."""
    looked_at: date
    """When the list prices were looked up."""
    batch: float
    """Share of the list price that a call in a batch costs."""
    caches: dict[str, CacheShares]
    """By the beginning of models' names."""
    models: dict[str, Price]


@cache
def prices() -> Prices:
    text = resources.files("patcher").joinpath("models", "prices.toml").read_text(encoding="utf-8")
    return Prices(**tomllib.loads(text))


def old_prices(today: date | None = None) -> str | None:
    """A warning if the list prices are older than `OLD_DAYS`, else None.

    Args:
        today: None: the machine's date.
    """
    known = prices().looked_at
    days = ((today or date.today()) - known).days
    if days <= OLD_DAYS:
        return None
    return (
        f"list prices are of {known}, {days} days old: models and prices may have changed; "
        "[models.NAME] of patcher.toml gives your own"
    )


def price(model: str) -> Price | None:
    """The model's price; a dated name (`claude-haiku-4-5-20251001`) has the price of the undated
    one."""
    known = prices()
    found = known.models.get(model) or known.models.get(undated(model))
    shares = next((one for name, one in known.caches.items() if model.startswith(name)), None)
    return found.model_copy(update={"cache": shares}) if found and shares else found


def undated(model: str) -> str:
    """The name without its date."""
    return re.sub(r"-20\d{2}-?\d{2}-?\d{2}$", "", model)


def same_model(one: str, other: str) -> bool:
    """Whether two names are of one model: a date, or a provider before a slash, does not count."""
    return undated(one.rpartition("/")[2]) == undated(other.rpartition("/")[2])
