"""Find the best way to serve among what people switch on, by servers under a client of others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import JsonValue

from patcher.ab.record_files import read_record, write_record
from patcher.ab.served import taking_class
from patcher.ab.served_records import (
    ServedJob,
    ServedProcess,
    SideSetup,
    header_of,
    refuse_many_points,
)
from patcher.bench import MissingError, PatcherError, UsageError
from patcher.bench.ab.engine_config import ConfigTrial, Tuning
from patcher.bench.ab.phases import ABPhase, ABProgress
from patcher.bench.ab.tuning import Options, failed_trial, search, spread_pct
from patcher.bench.engines.switches import RefusedOption
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe

ROUNDS = 2
"""Runs at each point of a trial, with other prompts."""


def tune_served(
    job: ServedJob,
    stock: SideSetup,
    options: Options,
    refused: Sequence[RefusedOption],
    keep: Path,
    progress: ABProgress,
    tried_one: Callable[[ConfigTrial], None],
) -> Tuning:
    """Try one option after another on top of the best so far, a server for each way.

    Each server that was measured is a file, so that the same command goes on after a stop.

    Args:
        stock: the arguments that all trials have.
        options: each with its ways.
        refused: what is not tried, for the record.
        keep: a folder for the folders of trials.
        tried_one: called with each finished trial.

    Raises:
        UsageError: as `compare_served`, but for an argument that the engine refuses.
        MissingError: the engine or the client is not installed.
        PatcherError: stock itself does not run.
    """
    points = job.points * ROUNDS
    job = replace(job, points=points, process_pairs=1)
    refuse_many_points(points)
    total = 1 + sum(map(len, options)) + (2 if options else 0)
    trials: list[ConfigTrial] = []
    with ClockMonitor(job.workload.device, job.lock_mhz) as clocks:

        def try_one(arguments: Mapping[str, JsonValue]) -> ConfigTrial:
            side = replace(stock, arguments={**stock.arguments, **arguments})
            header, (installed, _) = header_of(job, (side, side))
            again = sum(one.arguments == arguments for one in trials)
            path = keep / header.folder_name / f"trial-{again}.json"
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                taking = taking_class(job)(job, header, side, installed, clocks, progress)
                try:
                    taken = taking.process(again, "baseline", 0, stock.python)
                except (UsageError, MissingError):
                    raise  # of no way to serve in particular
                except PatcherError as error:
                    return failed_trial(arguments, error)
                write_record(path, taken)
            hint = f"remove {path} to measure it again"
            return rated(arguments, read_record(path, ServedProcess, hint))

        def try_all(tried: Mapping[str, Mapping[str, JsonValue]]) -> list[ConfigTrial]:
            begun = len(trials)
            for name, arguments in tried.items():
                progress(ABPhase.TUNE, f"try {name}", len(trials), total)
                trials.append(try_one(arguments))
                tried_one(trials[-1])
                if trials[0].tokens_per_s is None:
                    break  # stock does not run, so nothing is to be compared with it
            return trials[begun:]

        best = search(try_all, options or [()])
        described = clocks.description
    return Tuning(
        trials=tuple(trials),
        chosen=best.arguments,
        workload=job.workload,
        environment=describe(job.workload.device, job.workload.threads, described),
        refused=tuple(refused),
        served=f"{job.client}: {'; '.join(dict.fromkeys(point.label for point in points))}",
    )


def rated(arguments: Mapping[str, JsonValue], taken: ServedProcess) -> ConfigTrial:
    """The speed of a measured server: output tokens/s, the geometric mean over points; median and
    spread are of rounds in which no run stalled, though it was taken again.
    """
    each = len(taken.runs) // ROUNDS
    parts = [taken.runs[begin:][:each] for begin in range(0, len(taken.runs), each)]
    rounds = [
        statistics.geometric_mean(run.compared for run in part)
        for part in parts
        if not any(run.stalled for run in part)
    ]
    if not rounds:
        gap_s = max(run.longest_gap_ms or 0 for run in taken.runs if run.stalled) / 1e3
        why = f"it stalled in each round, up to {gap_s:.3g} s, though runs were taken again"
        return ConfigTrial(arguments=dict(arguments), tokens_per_s=None, failure=why)
    return ConfigTrial(
        arguments=dict(arguments),
        tokens_per_s=statistics.median(rounds),
        spread_pct=spread_pct(rounds),
    )
