"""Evaluate the self-test corpus: cheats to catch, honest candidates to pass, faults to survive.

A corpus is a folder of candidates with `cheats/`, `honest/`, `faults/` and `ops/`. A header of
comments states the expected outcome of each. A cheat has a line `CHEAT = True` (`#define CHEAT 1`);
with the other value, the same file is its honest twin. `python -m patcher.bench.selftest.corpus
FOLDER` evaluates the candidates of one device and prints one result per line. Its environment holds
a planted key that must not appear anywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge.evaluation import Evaluation, Outcome
from patcher.bench.ops.candidate import Candidate
from patcher.bench.ops.op import load_op
from patcher.bench.records import Record
from patcher.bench.selftest.cases import CorpusCase, Kind, matching, twin_of

HONEYTOKEN = "PATCHER_SELFTEST_KEY"
"""Environment variable with the planted key."""
LAYER_OF = {
    "entry": "static",
    "tripwires": "static",
    "build": "build",
    "load": "runner",
    "runs": "runner",
    "timed calls": "runner",
    "channel": "runner",
    "clocks": "timing",
}
"""Layer of each check; all other checks belong to the judge."""
SAME = {"values after": "values", "timed calls": "runs"}
"""Checks that a header names as another one, since they find the same problem later."""
PAIRS, POINTS, CALLS, SEED = 4, 2, 400, 20_260_101
GAIN = 1.05
"""Largest ratio of a cheat's speedup to its twin's that is within the noise of a short timing."""


class CaseResult(Record):
    """The judge's result for one case."""

    name: str
    """File name without suffix."""
    kind: Kind
    """`cheat`, `twin`, `honest` or `fault`."""
    number: int | None
    """Number in the catalogue of cheats."""
    title: str
    """What the candidate does."""
    expected: tuple[Outcome, ...]
    """Expected outcomes."""
    outcome: Outcome | None
    """Actual outcome; None if the judge itself failed."""
    layer: str
    """Layer of the check that failed; empty if none did."""
    check: str
    """Name of the check that failed; empty if none did."""
    detail: str
    """What the check found, or why the case failed."""
    passed: bool
    """Whether the outcome was expected and nothing leaked. After a fault, the next clean evaluation
    must also give the same outputs."""
    leaked: bool
    """Whether the planted key appeared."""
    seconds: float
    """Time of the case in seconds."""
    sandbox: str
    """Confinement of the candidate."""


def judged(
    entries: Sequence[CorpusCase], settings: JudgeSettings, token: str
) -> Iterator[CaseResult]:
    """Evaluate cases one after another with one judge.

    After each fault, a clean evaluation is repeated.

    Args:
        entries: the cases.
        settings: settings of the judge.
        token: the planted key.
    """
    with open_judge(settings) as judge:
        clean: str | None = None

        def evaluate(entry: CorpusCase) -> Evaluation:
            judge.settings = replace(settings, lives_s=entry.lives_s)
            return judge.evaluate(_candidate(entry), lambda *_: None)

        def repeated(device: str) -> str:
            judge.settings = replace(settings, pairs=3, points=1, calls=0)
            return _digest(judge.evaluate(_plain(device), lambda *_: None, SEED))

        judge.build_ahead([_candidate(entry) for entry in entries])
        for entry in entries:
            begin = time.monotonic()
            evaluation, failure = None, ""
            try:
                if entry.kind == "fault" and clean is None:
                    clean = repeated(entry.device)
                evaluation = evaluate(entry)
                if entry.gains_nothing:
                    failure = _gain(evaluation, evaluate(twin_of(entry)))
                if entry.kind == "fault" and repeated(entry.device) != clean:
                    failure = "the next clean verdict's outputs were others"
            except PatcherError as error:
                failure = f"the judge failed: {error.message}"
            yield _result(entry, evaluation, failure, token, time.monotonic() - begin)


def _gain(cheat: Evaluation, twin: Evaluation) -> str:
    if (cheat.geomean_speedup or 0.0) <= GAIN * (twin.geomean_speedup or 0.0):
        return ""
    return f"{cheat.geomean_speedup} x the baseline, its honest twin {twin.geomean_speedup}"


def _candidate(entry: CorpusCase) -> Candidate:
    return Candidate(op=entry.op, language=entry.language, source=entry.source)


def _plain(device: str) -> Candidate:
    """An honest candidate of the library, for repeated evaluations."""
    wanted = "cpu_simd" if device == "cpu" else "triton_row"
    solutions = load_op("fused_add_rms_norm").solutions()
    return next(candidate for info, candidate in solutions if info.name == wanted)


def _digest(evaluation: Evaluation) -> str:
    if not evaluation.right:
        details = "; ".join(check.detail for check in evaluation.failed_checks)
        return f"{evaluation.outcome}: {details}"
    return evaluation.outputs_sha256 or ""


def _result(
    entry: CorpusCase, evaluation: Evaluation | None, failure: str, token: str, seconds: float
) -> CaseResult:
    failed = evaluation.failed_checks if evaluation else []
    check = failed[0].name if failed else ""
    fits = evaluation is not None and evaluation.outcome in entry.outcomes
    labels = evaluation.tripwires if evaluation else ()
    output = evaluation.model_dump_json() if evaluation else failure
    leaked = token in output
    labelled = [label for label in labels if entry.label in label]
    if fits and not check and entry.label and not labelled:
        fits, failure = False, f"nothing says {entry.label!r} of it"
    kind_of_check = SAME.get(check, check)
    if fits and check and entry.caught and kind_of_check not in entry.caught:
        fits, failure = False, f"caught by {check}, not by {' or '.join(entry.caught)}"
    by_label = "static" if any("CUPTI" not in label for label in labelled) else "timing"
    layer = LAYER_OF.get(check, "judge") if check else by_label if entry.label and fits else ""
    return CaseResult(
        name=entry.name,
        kind=entry.kind,
        number=entry.number,
        title=entry.title,
        expected=entry.outcomes,
        outcome=evaluation.outcome if evaluation else None,
        layer=layer,
        check=check,
        detail=(failure or (failed[0].detail if failed else "")).replace(
            token, "(the planted key)"
        ),
        passed=fits and not failure and not leaked,
        leaked=leaked,
        seconds=seconds,
        sandbox=(evaluation.sandbox or "") if evaluation else "",
    )


def settings_for(device: str, tripwires: bool, pairs: int = PAIRS) -> JudgeSettings:
    """Settings with short timings against the accuracy baseline, since speed is not tested."""
    return JudgeSettings(
        device=device,
        baseline="honest",
        pairs=pairs,
        calls=CALLS if device == "cpu" else CALLS // 2,
        lives_s=0.0,
        points=POINTS,
        timeout_s=10.0 if device == "cpu" else 20.0,
        load_timeout_s=25.0 if device == "cpu" else 60.0,
        memory_bytes=(6 if device == "cpu" else 24) << 30,
        threads=1 if device == "cpu" else None,
        tripwires=tripwires,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m patcher.bench.selftest.corpus")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="regular expression on KIND/NAME")
    parser.add_argument("--kind", action="append", help="cheat, twin, honest or fault")
    parser.add_argument("--no-tripwires", action="store_true")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of timed blocks per point")
    options = parser.parse_args()
    os.environ["PATCHER_OPS"] = str(options.folder.resolve() / "ops")
    os.environ.setdefault("PATCHER_BUILD_TIMEOUT_S", "30" if options.device == "cpu" else "90")
    token = os.environ.get(HONEYTOKEN, "no key was planted")
    try:
        if options.pairs < 1:
            raise UsageError(f"--pairs {options.pairs}", "give at least one pair per point")
        entries = [
            entry
            for entry in matching(options.folder, options.device, options.only)
            if entry.kind in (options.kind or [entry.kind])
        ]
        print(len(entries), flush=True)
        settings = settings_for(options.device, not options.no_tripwires, options.pairs)
        for result in judged(entries, settings, token):
            print(result.model_dump_json(), flush=True)
    except PatcherError as error:
        print(f"{error.message}; {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
