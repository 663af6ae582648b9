"""Turn the options of `patcher throughput` into a job."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from patcher.ab.job import ABJob
from patcher.bench import UsageError, Workload, content, parse_json
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.ab.processes import ABPlan
from patcher.bench.ab.traffic import traffic
from patcher.bench.engines import in_process
from patcher.bench.machine.environment import describe
from patcher.bench.stats.compare import DEFAULT_PAIRS, MIN_PROCESS_PAIRS

_MODEL = "the model is the first word after the command"
OWN = {
    **dict.fromkeys(("model", "model_path", "tokenizer", "tokenizer_path"), _MODEL),
    "host": "leave it out: servers are driven on this machine",
    "port": "use --port of patcher",
}
"""Arguments of engines that would measure another one than what is driven, and what to do."""


@dataclass(frozen=True)
class ThroughputOptions:
    """Options given by a traffic preset, as defaults.

    Raises:
        UsageError: no such preset.
    """

    preset: str | None
    batch: int | None
    input_len: int | None
    output_len: int | None
    pairs: int | None
    processes: int | None

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        """Batch, prompt tokens, decode steps."""
        if self.preset is None:
            return self.batch, self.input_len, self.output_len
        found = traffic(self.preset)
        return (
            self.batch or found.batch,
            self.input_len or found.input_len,
            self.output_len or found.output_len,
        )

    def plan(self, engine: str) -> ABPlan | None:
        """Number of process pairs and of pairs in each; None: one process for both arms.

        `pairs` is the number for the whole session in either case.
        """
        planned = ABPlan() if self.preset is None else traffic(self.preset).plan()
        count = self.processes
        if count is None:
            count = 0 if in_process(engine) and not self.preset else planned.process_pairs
        if count == 0:
            return None
        each = planned.pairs if self.pairs is None else -(-self.pairs // count)
        return ABPlan(process_pairs=count, pairs=max(each, 2))


def job_of(
    asked: ThroughputOptions,
    workload: Workload,
    tune: bool,
    engine_args: Sequence[str],
    margin_pct: float,
    quality_steps: int,
    tuned: Tuning | None = None,
) -> ABJob:
    """Check that the options can be combined.

    Raises:
        UsageError: they cannot.
    """
    plan = asked.plan(workload.engine)
    if plan is None and not in_process(workload.engine):
        raise UsageError(
            f"{workload.engine} is patched when a process starts, not while it runs",
            f"give each arm separate processes: --processes {MIN_PROCESS_PAIRS}",
        )
    if plan is not None and plan.process_pairs < MIN_PROCESS_PAIRS:
        pairs = f"{plan.process_pairs} process pair{'' if plan.process_pairs == 1 else 's'}"
        raise UsageError(
            f"{pairs} cannot show the difference between processes",
            f"use --processes {MIN_PROCESS_PAIRS} or more",
        )
    given = {"--tune-baseline": tune, "--tuned": tuned, "--engine-arg": engine_args}
    names = [name for name, value in given.items() if value]
    if in_process(workload.engine) and names:
        raise UsageError(
            f"{workload.engine} has no configuration to tune",
            f"omit {' and '.join(names)}, or use --engine vllm",
        )
    if tune and tuned:
        raise UsageError("a search, and what one found", "give either --tune-baseline or --tuned")
    job = ABJob(
        workload=workload,
        margin_pct=margin_pct,
        max_pairs=asked.pairs or DEFAULT_PAIRS,
        quality_steps=quality_steps,
        arguments=engine_arguments(engine_args, tuned),
        tune=tune,
        tuned=tuned,
    )
    if plan is None:
        return job
    return job.model_copy(update={"process_pairs": plan.process_pairs, "pairs_each": plan.pairs})


def read_tuning(path: Path, workload: Workload) -> Tuning:
    """Read the result of a search for the best stock configuration, at any traffic.

    Raises:
        UsageError: the file holds none, or it is for another model, machine or library.
    """
    hint = "make one: patcher throughput tune MODEL --engine vllm --out FILE"
    try:
        found = Tuning.model_validate_json(content(path))
    except (OSError, ValidationError) as error:
        reason = "is no search" if isinstance(error, ValidationError) else "cannot be read"
        raise UsageError(f"{path} {reason}", hint) from error
    if found.workload is None or found.environment is None:
        raise UsageError(f"{path} does not record which model and machine it is for", hint)
    of = found.workload.model_copy(
        update={name: getattr(workload, name) for name in ("batch", "input_len", "output_len")}
    )
    here, there = describe(workload.device, workload.threads), found.environment
    differ = [
        name
        for name, same in (
            *(
                (each, getattr(of, each) == getattr(workload, each))
                for each in Workload.model_fields
            ),
            ("device", here.device == there.device),
            ("driver", here.driver == there.driver),
            ("libraries", here.packages == there.packages),
        )
        if not same
    ]
    if differ:
        raise UsageError(f"{path} is a search with other {', '.join(differ)}", hint)
    return found


def argument(text: str) -> tuple[str, JsonValue]:
    """Parse `NAME=VALUE`, with the value as JSON or else as text.

    Raises:
        UsageError: the name or the value is missing.
    """
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise UsageError(f"--engine-arg {text!r}", "give NAME=VALUE, such as moe_backend=marlin")
    try:
        read: JsonValue = parse_json(value)
    except ValueError:
        read = value
    return name, read


def engine_arguments(texts: Sequence[str], tuned: Tuning | None = None) -> dict[str, JsonValue]:
    """What `--engine-arg` says, each name once.

    Raises:
        UsageError: one is no `NAME=VALUE`, is patcher's to say, is there twice, or is another one
            than a search chose.
    """
    found: dict[str, JsonValue] = {}
    for text in texts:
        name, value = named_once(text, found)
        if name == "dtype":
            raise UsageError("a dtype is an option of patcher, too", "use --dtype")
        if tuned is not None and tuned.chosen.get(name, value) != value:
            raise UsageError(
                f"--engine-arg {text}, and the search of --tuned chose {tuned.chosen[name]}",
                "leave out one of them, or search with it: patcher throughput tune --engine-arg",
            )
        found[name] = value
    return found


def named_once(text: str, found: Container[str]) -> tuple[str, JsonValue]:
    """An argument of an engine, with its name as Python spells it.

    Args:
        found: names that were given before.

    Raises:
        UsageError: as `argument`; it is there, or patcher gives it to each engine itself.
    """
    name, value = argument(text)
    name = name.replace("-", "_")
    if name in OWN:
        raise UsageError(f"{text}: patcher gives each engine its {name}", OWN[name])
    if name in found:
        raise UsageError(f"{name} is given twice", "give each argument of the engine once")
    return name, value


def united(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine from two sides, at any depth; where both say something, the second."""
    found = {**first, **second}
    for name in first.keys() & second.keys():
        if isinstance(first[name], dict) and isinstance(second[name], dict):
            found[name] = united(first[name], second[name])
    return found
