"""Models by name: `[models.NAME]` of `patcher.toml`, and what `anthropic:MODEL` and `openai:MODEL`
stand for.

A key is never written down: an entry names the environment variable that holds it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from patcher.bench import Record
from patcher.models import TOKENS_CEILING
from patcher.models.prices import Price, price, prices

Provider = Literal["anthropic", "openai"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""As both SDKs name it; `none` and `minimal` are OpenAI's alone."""


def _own_name(name: str) -> str:
    if name in ("anthropic", "openai", "exchange", "replay"):
        raise ValueError(f"{name} is a provider: choose another name")
    return name


Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$"), AfterValidator(_own_name)]
"""Of an entry: no provider's name, no colon."""

KEY_VARIABLES: dict[Provider, str] = {
    "anthropic": "ANTHROPIC_API_KEY",
    "openai": "OPENAI_API_KEY",
}
NOT_SAMPLING = frozenset(
    {
        *("model", "messages", "system", "stream", "stream_options", "n", "tools", "tool_choice"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens"),
        *("output_config", "response_format", "reasoning_effort"),
    }
)
"""Fields of a request that have their own setting, or that would change what comes back."""
_SERVERS: dict[Provider, tuple[str, str]] = {
    "anthropic": ("ANTHROPIC_BASE_URL", "https://api.anthropic.com"),
    "openai": ("OPENAI_BASE_URL", "https://api.openai.com/v1"),
}


class ModelEntry(Record):
    """One model that is asked over a network."""

    provider: Provider
    """Which protocol its server speaks."""
    model: str = Field(min_length=1)
    """As the server names it."""
    base_url: str | None = None
    """The server, e.g. `http://localhost:8000/v1`; None is the provider's own."""
    key_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")
    """Environment variable with the key. None is the provider's own variable, or no key at all
    where there is a `base_url`."""
    input_usd_per_mtok: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    output_usd_per_mtok: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """US dollars per million tokens; 0 for a server of your own."""
    images: bool | None = None
    """Whether it takes images; None is yes for the provider's own server, no for another."""
    max_output_tokens: int = Field(default=TOKENS_CEILING, ge=1)
    """The most room that the server gives a reply."""
    sampling: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """How its server is to draw tokens: fields that go into each request as they are, e.g.
    `temperature`, `top_p`, `seed`, `frequency_penalty`, or what one server alone knows."""
    stream: bool | None = None
    """Whether replies are to come piece by piece. False: whole, for a server of Chat Completions
    that counts no tokens in a stream."""
    effort: Effort | None = None
    """How much the model is to think; None leaves it to the server, which may not know the word."""
    structured: bool | None = None
    """Whether its server can hold a reply to a JSON schema; None is yes for the provider's own."""
    prompt_cache: bool | None = None
    """Whether a server of the Messages API is asked to keep what all prompts begin with for five
    minutes; None is yes for the provider's own server. Others keep it by themselves, or not."""

    batch: bool = False
    """Whether questions go to its server's batch endpoint: at half the list price, with answers
    within 24 hours. Prices of the entry's own stand as they are given."""
    batch_wait_minutes: float = Field(default=0, ge=0, allow_inf_nan=False)
    """How long a run waits for a batch before it ends, to be resumed."""

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("must be a whole address: http://HOST:PORT/v1")
            if parts.username or parts.password or parts.query:
                raise ValueError("must hold no password and no key: key_variable names one")
        return value

    @field_validator("sampling")
    @classmethod
    def _only_sampling(cls, value: dict[str, object]) -> dict[str, object]:
        for name in value:
            if name in NOT_SAMPLING:
                raise ValueError(f"{name} is set by patcher itself: it has no place here")
            if isinstance(number := value[name], float) and not math.isfinite(number):
                raise ValueError(f"{name} must be finite")
        return value

    @model_validator(mode="after")
    def _both_prices(self) -> ModelEntry:
        if (self.input_usd_per_mtok is None) != (self.output_usd_per_mtok is None):
            raise ValueError("give both prices, or none")
        return self

    @model_validator(mode="after")
    def _what_the_protocol_has(self) -> ModelEntry:
        if self.provider == "openai" and self.prompt_cache:
            raise ValueError("prompt_cache is for provider anthropic: other servers decide it")
        if self.provider == "anthropic" and self.effort in ("none", "minimal"):
            raise ValueError(f"anthropic has no effort {self.effort}: low, medium, high, ...")
        if self.provider == "anthropic" and self.stream is False:
            raise ValueError("stream = false is for provider openai: the other counts in streams")
        return self

    @property
    def key_name(self) -> str | None:
        """The environment variable that must hold a key; None when no key is needed."""
        if self.key_variable or self.base_url:
            return self.key_variable
        return KEY_VARIABLES[self.provider]

    @property
    def has_key(self) -> bool | None:
        """Whether the key is there; None when none is needed."""
        return bool(os.environ.get(self.key_name, "").strip()) if self.key_name else None

    @property
    def address(self) -> str:
        """The server that is asked: the entry's, the environment's, the provider's."""
        variable, own = _SERVERS[self.provider]
        return self.base_url or os.environ.get(variable, "").strip() or own

    @property
    def address_setting(self) -> str:
        """What a person sets to ask another server."""
        return "base_url in [models.NAME] of patcher.toml" if self.base_url else self._variable

    @property
    def _variable(self) -> str:
        return _SERVERS[self.provider][0]

    @property
    def own_server(self) -> bool:
        """Whether the provider itself is asked."""
        return self.address == _SERVERS[self.provider][1]

    @property
    def holds_to_schemas(self) -> bool:
        """Whether it is asked to hold advice to its schema."""
        return self.own_server if self.structured is None else self.structured

    @property
    def keeps_prompts(self) -> bool:
        """Whether its server is asked to keep the heads of prompts."""
        asked = self.own_server if self.prompt_cache is None else self.prompt_cache
        return self.provider == "anthropic" and asked

    @property
    def sees_images(self) -> bool:
        return self.own_server if self.images is None else self.images

    @property
    def price(self) -> Price | None:
        """By the entry, else the list price; another server's price is not guessed."""
        return self.price_of(self.model)

    def price_of(self, model: str) -> Price | None:
        """What it costs where this model answers."""
        if self.input_usd_per_mtok is not None and self.output_usd_per_mtok is not None:
            return Price(input=self.input_usd_per_mtok, output=self.output_usd_per_mtok)
        known = None if self.base_url else price(model)
        return known.times(prices().batch) if known and self.batch else known

    @property
    def price_source(self) -> str:
        """Where its price is from."""
        if self.input_usd_per_mtok is not None:
            return "patcher.toml"
        if self.price is None:
            return "no price"
        return "list price of batches" if self.batch else "list price"


def entry_of(spec: str, registry: Mapping[str, ModelEntry]) -> ModelEntry | None:
    """The model that `NAME`, `anthropic`, `anthropic:MODEL` or `openai:MODEL` stands for."""
    if spec in registry:
        return registry[spec]
    match spec.partition(":"):
        case ("anthropic", _, model):
            return ModelEntry(provider="anthropic", model=model or prices().default)
        case ("openai", _, model) if model:
            return ModelEntry(provider="openai", model=model)
    return None


class ListedModel(Record):
    """One line of `patcher models`: what can be asked, and whether its key is there."""

    name: str
    provider: Provider
    model: str
    key_variable: str | None
    """None: no key is needed."""
    has_key: bool | None
    """Never more than yes or no."""
    images: bool
    input_usd_per_mtok: float | None
    output_usd_per_mtok: float | None


def list_models(registry: Mapping[str, ModelEntry]) -> list[ListedModel]:
    """The Anthropic default and every entry of the registry."""
    own = {"anthropic": ModelEntry(provider="anthropic", model=prices().default)}
    return [
        ListedModel(
            name=name,
            provider=entry.provider,
            model=entry.model,
            key_variable=entry.key_name,
            has_key=entry.has_key,
            images=entry.sees_images,
            input_usd_per_mtok=entry.price.input if entry.price else None,
            output_usd_per_mtok=entry.price.output if entry.price else None,
        )
        for name, entry in {**own, **registry}.items()
    ]
