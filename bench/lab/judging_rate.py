"""Candidates that `--judge ray` judges in an hour, with one GPU of this machine and with more.

`python -P -m patcher.bench.lab.judging_rate FILE... --op OP --language cuda --gpus 1 --gpus 2`

For each number of GPUs a Ray cluster is started that has these alone, `--repeats` times in turn. A
candidate a GPU that is not counted goes first: it starts workers and compiles baselines. Then
`--each` candidates a GPU are handed over together. They are the FILEs, over and over, each with a
comment of its own at its end, so that none was built or judged before. At the end one is judged
without Ray, and its verdict held against the one that Ray brought. Without GPUs, `--gpus 0` is the
CPU of this machine.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from patcher.bench import Candidate, Evaluation, Language, PatcherError, Record, UsageError
from patcher.bench.judge import JudgeSettings
from patcher.bench.records import write_atomically
from patcher.judges import LOCAL, open_judges

MARKS = {True: "#", False: "//"}


class RateArm(Record):
    """One cluster."""

    gpus: int
    candidates: int
    seconds: float
    """From handing all over to the last verdict."""
    outcomes: dict[str, int]
    judge_s: float
    """Mean seconds of a verdict, as the judge itself counts them."""

    @property
    def an_hour(self) -> float:
        return 3600 * self.candidates / self.seconds


class JudgingRate(Record):
    """What was measured."""

    op: str
    sweep: str | None
    device: str
    arms: tuple[RateArm, ...]
    same_as_local: bool
    """Whether one candidate is right, and by the same checks, as the local judge says."""


def measure(
    given: argparse.Namespace, sources: Sequence[str], settings: JudgeSettings
) -> JudgingRate:
    """All arms, each in a process of its own, and one verdict without Ray."""
    language = Language(given.language)
    count = max(1, *given.gpus) * (given.each + 1) * len(given.gpus) * given.repeats
    every = list(copies(given.op, language, sources, count + 1))
    arms, elsewhere, left = [], [], iter(every[1:])
    for gpus in list(given.gpus) * given.repeats:
        own = list(islice(left, max(1, gpus) * (given.each + 1)))
        arm, found = apart(one_arm, gpus, own, given.each, settings, every[0])
        arms.append(arm)
        elsewhere.append(found)
        print(f"{gpus} GPUs: {arm.candidates} in {arm.seconds:.0f} s, {arm.an_hour:.0f} an hour")
    here = apart(judged, LOCAL, [every[0]], settings)[0]
    return JudgingRate(
        op=given.op,
        sweep=given.sweep,
        device=here.environment.device if here.environment else "",
        arms=tuple(arms),
        same_as_local=all(told(each) == told(here) for each in elsewhere),
    )


def apart(function: Any, *arguments: Any) -> Any:
    """What a function gives in a new process, in which no GPU was seen before."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def copies(op: str, language: Language, sources: Sequence[str], count: int) -> Iterator[Candidate]:
    """As many candidates, each of which nobody has judged."""
    salt = secrets.token_hex(4)
    for index, source in enumerate(islice(cycle(sources), count)):
        text = f"{source.rstrip()}\n{MARKS[language.in_python]} copy {index} of {salt}\n"
        yield Candidate(op=op, language=language, source=text)


def one_arm(
    gpus: int, own: list[Candidate], each: int, settings: JudgeSettings, shared: Candidate
) -> tuple[RateArm, Evaluation]:
    """The rate of one cluster, and its verdict on the candidate that all judge."""
    import ray

    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpus)))
    ray.init(
        address="local",
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        first, rest = own[: max(1, gpus)], own[max(1, gpus) :]
        judged("ray", first, settings)
        begin = time.monotonic()
        found = judged("ray", rest, settings)
        seconds = time.monotonic() - begin
        [same] = judged("ray", [shared], settings)
    finally:
        ray.shutdown()
    arm = RateArm(
        gpus=gpus,
        candidates=len(rest),
        seconds=seconds,
        outcomes=dict(Counter(one.outcome.value for one in found)),
        judge_s=sum(one.total_s or 0.0 for one in found) / len(found),
    )
    return arm, same


def judged(
    judge: str, candidates: Sequence[Candidate], settings: JudgeSettings
) -> list[Evaluation]:
    with open_judges(judge, settings, secrets.token_hex(4), lambda *_: None) as judges:
        judges.prepare(candidates)
        return judges.evaluate(candidates)


def told(verdict: Evaluation) -> tuple[bool, tuple[tuple[str, bool | None], ...]]:
    """What of a verdict depends neither on times nor on the inputs that were drawn."""
    return verdict.right, tuple((each.name, each.passed) for each in verdict.checks)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m patcher.bench.lab.judging_rate")
    parser.add_argument("files", type=Path, nargs="+", help="right candidates of the op")
    parser.add_argument("--op", required=True)
    parser.add_argument("--language", required=True)
    parser.add_argument("--sweep")
    parser.add_argument("--gpus", type=int, action="append", required=True)
    parser.add_argument("--each", type=int, default=8, help="candidates a GPU")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--points", type=int, help="most points that are timed; default: all")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    given = parser.parse_args(words)
    try:
        if given.each < 1 or given.repeats < 1 or min(given.gpus) < 0:
            raise UsageError("nothing would be judged", "give whole numbers from 1")
        sources = [path.read_text(encoding="utf-8") for path in given.files]
        settings = JudgeSettings(sweep=given.sweep, points=given.points)
        found = measure(given, sources, settings)
    except PatcherError as error:
        print(f"error: {error.message}; {error.hint}", file=sys.stderr)
        return error.exit_code
    write_atomically(given.out, found.model_dump_json(indent=1) + "\n")
    print(f"as the local judge says: {'yes' if found.same_as_local else 'NO'}; {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
