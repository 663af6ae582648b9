"""The folder that keeps trials: what was asked, a line for each thing that was taken, a summary."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeVar

from pydantic import Field, JsonValue, ValidationError

from patcher.bench import SCHEMA_VERSION, Environment, Record, UsageError, Workload
from patcher.bench.lab.trials.trial import (
    Repeats,
    TrialKind,
    TrialsSummary,
    VerdictTrial,
    summarise,
)

RecordT = TypeVar("RecordT", bound=Record)


class TrialsRequest(Record):
    """What a folder's trials are of; another set of options goes into another folder."""

    schema_version: int = SCHEMA_VERSION
    workload: Workload
    arguments: dict[str, JsonValue]
    """Of the engine."""
    patch: str | None
    """Digest of the bundle that half of the processes have in."""
    processes: int = Field(ge=6)
    trials: int = Field(ge=1)
    pairs: int = Field(ge=2)
    planted: int = Field(ge=0)
    planted_pairs: int = Field(ge=2)
    """Of each process pair of those: a small gain takes more pairs to find than none to reject."""
    gain_pct: float
    repeats: int = Field(ge=0)
    repeat_steps: int = Field(ge=2)
    margin_pct: float
    seed: int

    @property
    def process_pairs(self) -> int:
        """Of a trial."""
        return self.processes // 2


class TrialsStart(Record):
    """One start of all processes."""

    number: int
    seconds: tuple[float, ...]
    """Until each was loaded; the first one alone, the others side by side."""
    wall_s: float
    peak_gib: tuple[float, ...]
    """What the tensors of each took at most, without a KV cache of vLLM's."""
    environment: Environment


class Folder:
    """Raises:
    UsageError: it holds what was asked for otherwise, or what is no record.
    """

    def __init__(self, path: Path, asked: TrialsRequest) -> None:
        self.path, self.asked = path, asked
        path.mkdir(parents=True, exist_ok=True)
        known = path / "asked.json"
        if known.is_file():
            if _read(known, known.read_bytes(), TrialsRequest) != asked:
                raise UsageError(
                    f"{path} holds trials of other options", "give the same ones, or a new folder"
                )
        else:
            known.write_text(asked.model_dump_json(indent=1) + "\n", encoding="utf-8")
        self.trials = self._lines("trials.jsonl", VerdictTrial)
        self.repeats = self._lines("repeats.jsonl", Repeats)
        self.starts = self._lines("starts.jsonl", TrialsStart)

    def keep(self, record: VerdictTrial | Repeats | TrialsStart) -> None:
        """On the disk before the next one is taken."""
        match record:
            case VerdictTrial():
                self.trials.append(record)
            case Repeats():
                self.repeats.append(record)
            case TrialsStart():
                self.starts.append(record)
        name = {VerdictTrial: "trials", Repeats: "repeats", TrialsStart: "starts"}[type(record)]
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def left(self) -> dict[TrialKind | str, int]:
        """What is still to be taken, by kind; `repeats`: processes."""
        asked = self.asked
        wanted: dict[TrialKind | str, int] = {
            "repeats": 0 if asked.patch or not asked.repeats else asked.processes,
            "patch" if asked.patch else "aa": asked.trials,
            "planted": 0 if asked.patch else asked.planted,
        }
        done = {kind: sum(one.kind == kind for one in self.trials) for kind in wanted}
        done["repeats"] = len({one.process for one in self.repeats})
        return {kind: max(count - done[kind], 0) for kind, count in wanted.items()}

    def summary(self) -> TrialsSummary:
        """Of all until now, written as `summary.json` and `summary.md`."""
        found = summarise(self.trials, self.repeats)
        text = found.model_dump_json(indent=1) + "\n"
        (self.path / "summary.json").write_text(text, encoding="utf-8")
        (self.path / "summary.md").write_text(markdown(found, self), encoding="utf-8")
        return found

    def _lines(self, name: str, kind: type[RecordT]) -> list[RecordT]:
        path = self.path / name
        if not path.is_file():
            return []
        lines = path.read_bytes().split(b"\n")
        # a process that was killed while it wrote leaves half a line
        whole, rest = lines[:-1], lines[-1]
        if rest:
            path.write_bytes(b"".join(line + b"\n" for line in whole))
        return [_read(path, line, kind) for line in whole]


def _read(path: Path, line: bytes, kind: type[RecordT]) -> RecordT:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        raise UsageError(
            f"{path} holds what is no record of trials", "restore it, or give a new folder"
        ) from error


NAMES = {"aa": "A/A", "planted": "planted", "patch": "patch"}


def markdown(found: TrialsSummary, folder: Folder) -> str:
    """A table for people, and what it was made on."""
    head = "| | trials | accept | inconclusive | reject | gain, mean (range) % | half-width % "
    rows = [
        f"{head}| truth in interval |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, one in found.kinds.items():
        name = NAMES[kind]
        if one.planted_pct is not None:
            name += f" {one.planted_pct:+.2f} %"
        low, high = one.gain_range_pct or (0.0, 0.0)
        words = " | ".join(str(one.verdicts[word]) for word in one.verdicts)
        covered = "-" if kind == "patch" else f"{one.covered} of {one.trials}"
        rows.append(
            f"| {name} | {one.trials} | {words} | {one.gain_mean_pct or 0:+.3f} "
            f"({low:+.3f} to {high:+.3f}) | {one.half_width_pct or 0:.3f} | {covered} |"
        )
    asked, load = folder.asked, folder.asked.workload
    told = [
        f"{load.model} on {load.engine}, {load.weights} weights, batch {load.batch}, "
        f"{load.input_len:,} prompt tokens, {load.output_len} decode steps a window, "
        f"margin {asked.margin_pct:g} %.",
        f"A trial: {asked.process_pairs} process pairs of {asked.processes} loaded processes, "
        f"none in two of them, arms drawn; {asked.pairs} pairs of windows in each after one to "
        "warm up; windows of no other trial. The processes come again from trial to trial "
        f"({found.starts} start{'s' if found.starts != 1 else ''} of all).",
    ]
    aa = found.kinds.get("aa")
    if found.false_accept_limit_pct is not None and aa is not None:
        told.append(
            f"No A/A trial of {aa.trials} was accepted: at most {found.false_accept_limit_pct:.1f} "
            "% would be (95 % limit), had they been independent."
        )
    if aa is not None and aa.process_pair_sd_pct is not None and aa.pair_sd_pct is not None:
        alone = aa.pair_sd_pct / math.sqrt(asked.pairs)
        told.append(
            f"SD of pairs of windows: {aa.pair_sd_pct:.3f} %; of the means of process pairs, with "
            f"{asked.pairs} in each: {aa.process_pair_sd_pct:.3f} % (of windows alone: "
            f"{alone:.3f} %)."
        )
    if aa is not None and aa.turn_sd_ms is not None:
        told.append(
            f"In one turn both windows of a pair differ by {aa.turn_sd_ms:.3f} ms (SD); were that "
            f"all, and another in each turn, pairs would differ by {aa.pair_sd_by_turns_pct:.3f} %."
        )
    if found.cv_within_pct is not None:
        between = "-" if found.cv_between_pct is None else f"{found.cv_between_pct:.3f} %"
        told.append(
            f"CV of {found.repeats} repeats of one window of {asked.repeat_steps} steps: "
            f"{found.cv_within_pct:.3f} % within a process (median of {len(folder.repeats)}; "
            f"{found.cv_within_max_pct:.3f} % at most), {between} between processes; "
            f"{found.tokens_per_s or 0:,.1f} tokens/s."
        )
    if folder.starts:
        last = folder.starts[-1]
        told.append(
            f"Loaded in {last.wall_s:.0f} s ({max(last.peak_gib):.1f} GiB each). "
            f"{last.environment.device}; {_versions(last.environment)}."
        )
    return "\n".join(rows) + "\n\n" + "\n\n".join(told) + "\n"


def _versions(environment: Environment) -> str:
    return ", ".join(f"{name} {version}" for name, version in environment.packages.items())
