"""The folder that stores trials: the options, one line per result, and a summary."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeVar

from pydantic import Field, JsonValue, ValidationError

from patcher.bench import SCHEMA_VERSION, Environment, Record, UsageError, Workload
from patcher.bench.lab.trials.trial import Kind, Repeats, TrialsSummary, VerdictTrial, summarise

RecordT = TypeVar("RecordT", bound=Record)


class TrialOptions(Record):
    """Options of a folder's trials. Other options need another folder."""

    schema_version: int = SCHEMA_VERSION
    workload: Workload
    arguments: dict[str, JsonValue]
    """Arguments of the engine."""
    patch: str | None
    """Digest of the bundle that half of the processes run with."""
    processes: int = Field(ge=6)
    trials: int = Field(ge=1)
    pairs: int = Field(ge=2)
    planted: int = Field(ge=0)
    planted_pairs: int = Field(ge=2)
    """Pairs per process pair of a planted trial. Detecting a small gain takes more pairs than
    rejecting none."""
    gain_pct: float
    repeats: int = Field(ge=0)
    repeat_steps: int = Field(ge=2)
    margin_pct: float
    seed: int

    @property
    def process_pairs(self) -> int:
        """Number of process pairs of a trial."""
        return self.processes // 2


class Start(Record):
    """One start of all processes."""

    number: int
    seconds: tuple[float, ...]
    """Load time of each process; the first loads alone, the others concurrently."""
    wall_s: float
    """Seconds until all processes were loaded."""
    peak_gib: tuple[float, ...]
    """Peak memory of each process's tensors in GiB, without vLLM's KV cache."""
    environment: Environment


class Folder:
    """Stored trials of one set of options.

    Raises:
        UsageError: the folder has trials with other options, or an invalid record.
    """

    def __init__(self, path: Path, options: TrialOptions) -> None:
        self.path, self.options = path, options
        path.mkdir(parents=True, exist_ok=True)
        known = path / "asked.json"
        if known.is_file():
            if _read(known, known.read_bytes(), TrialOptions) != options:
                raise UsageError(
                    f"{path} holds trials of other options", "give the same ones, or a new folder"
                )
        else:
            known.write_text(options.model_dump_json(indent=1) + "\n", encoding="utf-8")
        self.trials = self._lines("trials.jsonl", VerdictTrial)
        self.repeats = self._lines("repeats.jsonl", Repeats)
        self.starts = self._lines("starts.jsonl", Start)

    def keep(self, record: VerdictTrial | Repeats | Start) -> None:
        """Append a record and sync it to disk."""
        match record:
            case VerdictTrial():
                self.trials.append(record)
            case Repeats():
                self.repeats.append(record)
            case Start():
                self.starts.append(record)
        name = {VerdictTrial: "trials", Repeats: "repeats", Start: "starts"}[type(record)]
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def left(self) -> dict[Kind | str, int]:
        """Number of remaining trials by kind; for `repeats`, of remaining processes."""
        options = self.options
        wanted: dict[Kind | str, int] = {
            "repeats": 0 if options.patch or not options.repeats else options.processes,
            "patch" if options.patch else "aa": options.trials,
            "planted": 0 if options.patch else options.planted,
        }
        done = {kind: sum(one.kind == kind for one in self.trials) for kind in wanted}
        done["repeats"] = len({one.process for one in self.repeats})
        return {kind: max(count - done[kind], 0) for kind, count in wanted.items()}

    def summary(self) -> TrialsSummary:
        """Summarise all trials until now, and write `summary.json` and `summary.md`."""
        result = summarise(self.trials, self.repeats)
        text = result.model_dump_json(indent=1) + "\n"
        (self.path / "summary.json").write_text(text, encoding="utf-8")
        (self.path / "summary.md").write_text(markdown(result, self), encoding="utf-8")
        return result

    def _lines(self, name: str, kind: type[RecordT]) -> list[RecordT]:
        path = self.path / name
        if not path.is_file():
            return []
        lines = path.read_bytes().split(b"\n")
        # a process that was killed while writing leaves an incomplete line
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


def markdown(summary: TrialsSummary, folder: Folder) -> str:
    """Format a summary as a Markdown table, with notes on the measurement."""
    head = "| | trials | accept | inconclusive | reject | gain, mean (range) % | half-width % "
    rows = [
        f"{head}| truth in interval |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, one in summary.kinds.items():
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
    options, load = folder.options, folder.options.workload
    notes = [
        f"{load.model} on {load.engine}, {load.weights} weights, batch {load.batch}, "
        f"{load.input_len:,} prompt tokens, {load.output_len} decode steps a window, "
        f"margin {options.margin_pct:g} %.",
        f"A trial: {options.process_pairs} process pairs of {options.processes} loaded processes, "
        f"none in two of them, arms drawn; {options.pairs} pairs of windows in each after one to "
        "warm up; windows of no other trial. The processes come again from trial to trial "
        f"({summary.starts} start{'s' if summary.starts != 1 else ''} of all).",
    ]
    aa = summary.kinds.get("aa")
    if summary.false_accept_limit_pct is not None and aa is not None:
        notes.append(
            f"No A/A trial of {aa.trials} was accepted: at most "
            f"{summary.false_accept_limit_pct:.1f} % would be (95 % limit), had they been "
            "independent."
        )
    if aa is not None and aa.process_pair_sd_pct is not None and aa.pair_sd_pct is not None:
        alone = aa.pair_sd_pct / math.sqrt(options.pairs)
        notes.append(
            f"SD of pairs of windows: {aa.pair_sd_pct:.3f} %; of the means of process pairs, with "
            f"{options.pairs} in each: {aa.process_pair_sd_pct:.3f} % (of windows alone: "
            f"{alone:.3f} %)."
        )
    if aa is not None and aa.turn_sd_ms is not None:
        notes.append(
            f"In one turn both windows of a pair differ by {aa.turn_sd_ms:.3f} ms (SD); were that "
            f"all, and another in each turn, pairs would differ by {aa.pair_sd_by_turns_pct:.3f} %."
        )
    if summary.cv_within_pct is not None:
        between = "-" if summary.cv_between_pct is None else f"{summary.cv_between_pct:.3f} %"
        notes.append(
            f"CV of {summary.repeats} repeats of one window of {options.repeat_steps} steps: "
            f"{summary.cv_within_pct:.3f} % within a process (median of {len(folder.repeats)}; "
            f"{summary.cv_within_max_pct:.3f} % at most), {between} between processes; "
            f"{summary.tokens_per_s or 0:,.1f} tokens/s."
        )
    if folder.starts:
        last = folder.starts[-1]
        notes.append(
            f"Loaded in {last.wall_s:.0f} s ({max(last.peak_gib):.1f} GiB each). "
            f"{last.environment.device}; {_versions(last.environment)}."
        )
    return "\n".join(rows) + "\n\n" + "\n\n".join(notes) + "\n"


def _versions(environment: Environment) -> str:
    return ", ".join(f"{name} {version}" for name, version in environment.packages.items())
