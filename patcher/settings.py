"""Settings: flag > PATCHER_* variable > patcher.toml > default, each with its origin."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from patcher.bench import Record, UsageError, first_error, obstacle, parse_json, parse_toml
from patcher.levers.record import AuxiliaryLever, PromptLever, ScoreLever, TripwireSettings
from patcher.models import PROMPT_TOKENS
from patcher.models.registry import ModelEntry, Name

CONFIG_FILE = "patcher.toml"
PREFIX = "PATCHER_"
OFF = "off"
"""In place of an adviser's model: nobody advises."""


class Settings(Record):
    """What a user may set. Keys and secrets are no settings: the provider's own variable holds
    them."""

    model: str = Field("anthropic", min_length=1)
    """The generation agent: see `patcher.models.PROVIDERS`."""
    analyst: str | None = Field(None, min_length=1)
    """The performance-analysis agent, `off` for nobody; None is the same model, on a CPU nobody."""
    diagnoser: str | None = Field(None, min_length=1)
    """Who judges failures before a repair; None is the same model, `off` nobody."""
    iterations: int = Field(8, ge=1, le=1000)
    """Candidates asked for, at most, per op."""
    budget_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Ceiling on what models may cost, per run; None is no ceiling."""
    budget_tokens: int | None = Field(None, ge=0)
    """Ceiling on tokens, input and output together, per run."""
    budget_minutes: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Ceiling on the time that the agent loop asks and judges, per run."""
    budget_gpu_minutes: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Ceiling on the time that the judge has the GPU, per run."""
    judge: str = Field("local", min_length=1)
    """Where candidates are judged: `local`, `exchange:DIR` (served by `patcher worker DIR`), or
    `ray[:ADDRESS][@GPU]`."""
    runs_dir: Path = Path("patcher-runs")
    margin_pct: float = Field(0.5, ge=0, le=100, allow_inf_nan=False)
    """End-to-end gain in percent that the interval's lower end must exceed."""
    sol_pct: float = Field(90, gt=0, allow_inf_nan=False)
    """Share of the speed of light at which the loop leaves an op."""
    patience: int = Field(5, ge=1)
    """Optimization rounds in a row without a gain after which it does."""
    prompt_tokens: int = Field(PROMPT_TOKENS, ge=2000)
    """Room of a prompt, estimated; what is optional is cut to fit."""
    memory: str = Field("off", min_length=1)
    """What is remembered across runs: `on` (in `PATCHER_HOME`), `off`, or a folder."""
    tripwires: TripwireSettings = TripwireSettings()
    """What a candidate's source must not or must have; JSON in `PATCHER_TRIPWIRES`."""
    prompts: tuple[PromptLever, ...] = ()
    """Text for prompts, after ours or instead of it; JSON in `PATCHER_PROMPTS`."""
    auxiliary: tuple[AuxiliaryLever, ...] = ()
    """Sources of the user's that the agents read; JSON in `PATCHER_AUXILIARY`."""
    score: ScoreLever | None = None
    """The user's own measure of right candidates; JSON in `PATCHER_SCORE`."""
    models: dict[Name, ModelEntry] = Field(default_factory=dict)
    """Models of your own; JSON in `PATCHER_MODELS`. `--model NAME` uses one."""
    origins: dict[str, str] = Field(default_factory=dict)
    """Where each value comes from: `flag --model`, `PATCHER_MODEL`, `patcher.toml` or `default`."""

    @field_validator("tripwires", "prompts", "auxiliary", "score", "models", mode="before")
    @classmethod
    def _from_variable(cls, value: object) -> object:
        return parse_json(value) if isinstance(value, str) else value

    @field_validator("runs_dir")
    @classmethod
    def _folder(cls, value: Path) -> Path:
        if file := obstacle(value):
            raise ValueError(f"{file} is a file, where runs need a folder")
        return value

    def for_run(self) -> dict[str, Any]:
        """The settings that a run records: all but where runs and servers are on this machine."""
        return self.model_dump(mode="json", exclude={"runs_dir", "models", "origins"})


NAMES = tuple(name for name in Settings.model_fields if name != "origins")


def resolve(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """Settings from flags (None means not given), the environment and `patcher.toml` in `folder`.

    Raises:
        UsageError: an unknown name in `patcher.toml`, or a value that does not fit; it names the
        origin.
    """
    environ = os.environ if environ is None else environ
    file = (folder or Path()) / CONFIG_FILE
    written = _read(file)
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name in NAMES:
        variable = PREFIX + name.upper()
        if flags and flags.get(name) is not None:
            values[name], origins[name] = flags[name], f"flag --{name.replace('_', '-')}"
        elif environ.get(variable):
            values[name], origins[name] = environ[variable], variable
        elif name in written:
            values[name], origins[name] = written[name], CONFIG_FILE
        else:
            origins[name] = "default"
    unknown = set(flags or ()) - set(NAMES)
    if unknown:
        raise ValueError(f"no such settings: {', '.join(sorted(unknown))}")
    try:
        return Settings.model_validate({**values, "origins": origins})
    except ValidationError as error:
        loc, wrong, found = first_error(error)
        name, *inside = map(str, loc)
        if name == "models":  # never its values: someone may have put a key there
            where = ".".join(str(part) for part in loc if part != "[key]")
            raise UsageError(
                f"{where} ({origins[name]}): {wrong}",
                "an entry has: " + ", ".join(ModelEntry.model_fields) + "; a key stays in the "
                "environment variable that key_variable names",
            ) from None
        value: Any = found if inside else values[name]
        raise UsageError(
            f"{'.'.join([name, *inside])} = {value!r:.200} ({origins[name]}): {wrong}",
            f"give another value for {name}",
        ) from error


def example_file() -> str:
    """A `patcher.toml` with every setting, explained."""
    return resources.files("patcher").joinpath("example.toml").read_text("utf-8")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = parse_toml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"cannot read {CONFIG_FILE}: {error}", f"correct {CONFIG_FILE} or remove it"
        ) from error
    unknown = sorted(set(found) - set(NAMES))
    if unknown:
        raise UsageError(
            f"{CONFIG_FILE} has unknown settings: {', '.join(unknown)}",
            f"known are: {', '.join(NAMES)}",
        )
    return found
