"""The judge's scorecard on a corpus: cheats caught, false rejects, and faults survived.

The candidates of each device run in a separate process, with a planted key in its environment.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.machine.environment import ROOT, Environment, describe, python_path
from patcher.bench.records import SCHEMA_VERSION, Record
from patcher.bench.selftest.cases import matching
from patcher.bench.selftest.corpus import HONEYTOKEN, CaseResult

FALSE_REJECTS_PCT = 2.0
"""Largest acceptable share of honest candidates that are rejected."""
Progress = Callable[[str, int, int], None]


class ScoreCard(Record):
    """Results of the corpus on one device."""

    schema_version: int = SCHEMA_VERSION
    device: str
    """`cpu` or `cuda`."""
    environment: Environment
    """Device and versions."""
    sandbox: str
    """Confinement of the candidates."""
    results: tuple[CaseResult, ...]
    """Results of all cases."""
    without_static: tuple[CaseResult, ...]
    """Results of the cheats with tripwires switched off."""
    complete: bool = True
    """Whether all cases were judged; False: the self-test is in progress or was interrupted."""

    @property
    def cheats(self) -> list[CaseResult]:
        """Results of the cheats."""
        return [result for result in self.results if result.kind == "cheat"]

    @property
    def honest(self) -> list[CaseResult]:
        """Results of honest candidates, twins included."""
        return [result for result in self.results if result.kind in ("twin", "honest")]

    @property
    def faults(self) -> list[CaseResult]:
        """Results of the faults."""
        return [result for result in self.results if result.kind == "fault"]

    @property
    def leaks(self) -> int:
        """Number of cases in which the planted key appeared."""
        return sum(result.leaked for result in (*self.results, *self.without_static))

    def by_layer(self) -> dict[str, int]:
        """Number of cheats caught, by the layer of the check that failed.

        `none` counts cheats that failed no check: labelled, or no faster than their twin.
        """
        return dict(Counter(result.layer or "none" for result in self.cheats if result.passed))

    @property
    def ok(self) -> bool:
        """Whether all cases were judged, all cheats caught, all faults survived, few honest
        candidates rejected, and no key leaked.
        """
        missed = [r for r in (*self.cheats, *self.faults, *self.without_static) if not r.passed]
        rejected = sum(not result.passed for result in self.honest)
        few = 100 * rejected <= FALSE_REJECTS_PCT * len(self.honest)
        return self.complete and not missed and few and not self.leaks


def corpus_folder(chosen: Path | None = None) -> Path:
    """Folder of the corpus: the chosen one, else `tests/corpus` of a checkout.

    It holds working exploits, so the wheel does not include it.

    Raises:
        UsageError: the folder holds no cases, or none was chosen and this is no checkout.
    """
    folder = chosen or ROOT / "tests" / "corpus"
    if (folder / "cheats").is_dir():
        return folder
    if chosen is not None:
        raise UsageError(
            f"{chosen} holds no self-test cases",
            "name tests/corpus of a checkout or of the sdist; it has cheats/, honest/ and faults/",
        )
    raise UsageError(
        "an installed patcher carries no self-test cases",
        "name their folder: --corpus FOLDER (tests/corpus of a checkout or of the sdist)",
    )


def score(
    device: str,
    only: str,
    report: Progress,
    folder: Path | None = None,
    keep: Callable[[ScoreCard], None] | None = None,
) -> ScoreCard:
    """Evaluate the corpus on one device.

    Args:
        device: `cpu` or `cuda`.
        only: regular expression on KIND/NAME; empty: all cases.
        report: called with (stage, done, total).
        folder: folder of the corpus; None: that of this checkout.
        keep: called with the incomplete score card after each case.

    Raises:
        UsageError: no case matches `only`.
        PatcherError: the process ended early; the message holds its last output.
    """
    folder = corpus_folder(folder)
    matching(folder, device, only)
    environment = describe(device)
    results: list[CaseResult] = []
    without: list[CaseResult] = []

    def card(complete: bool) -> ScoreCard:
        boxes = [result.sandbox for result in results if result.sandbox.startswith("R")]
        return ScoreCard(
            device=device,
            environment=environment,
            sandbox=Counter(boxes).most_common(1)[0][0] if boxes else "nothing was run",
            results=tuple(results),
            without_static=tuple(without),
            complete=complete,
        )

    def kept(what: str, done: int, total: int) -> None:
        if keep and done:
            keep(card(complete=False))
        report(what, done, total)

    run_corpus(device, only, kept, folder, results=results)
    run_corpus(device, only, kept, folder, static=False, kinds=("cheat",), results=without)
    return card(complete=True)


def run_corpus(
    device: str,
    only: str,
    report: Progress,
    folder: Path,
    static: bool = True,
    kinds: tuple[str, ...] = (),
    root: Path = ROOT,
    cache: Path | None = None,
    results: list[CaseResult] | None = None,
) -> list[CaseResult]:
    """Evaluate cases in one process.

    Args:
        device: `cpu` or `cuda`.
        only: regular expression on KIND/NAME; empty: all cases.
        report: called with (stage, done, total).
        folder: folder of the corpus.
        static: whether tripwires are on.
        kinds: kinds of cases; empty: all.
        root: folder that the process imports `patcher` from.
        cache: folder of its builds and measurements; None: the user's.
        results: list that each result is appended to; None: a new one.

    Returns:
        The list of results.
    """
    what = "corpus" if static else "without the static layer"
    command = [sys.executable, "-P", "-m", "patcher.bench.selftest.corpus", str(folder.resolve())]
    command += ["--device", device, "--only", only, *(f"--kind={kind}" for kind in kinds)]
    command += [] if static else ["--no-tripwires"]
    token = f"honeytoken-{secrets.token_hex(12)}"
    keys = dict.fromkeys((HONEYTOKEN, "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "HF_TOKEN"), token)
    environment = {**os.environ, **keys, "PYTHONPATH": python_path(root)}
    environment |= {} if cache is None else {"PATCHER_CACHE": str(cache)}
    results = [] if results is None else results
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        try:
            whole = json.loads(process.stdout.readline() or b"0")
            report(what, 0, whole)
            for line in process.stdout:
                results.append(CaseResult.model_validate_json(line))
                report(what, len(results), whole)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if code != 0 or len(results) != whole:
            errors.seek(0)
            tail = errors.read().decode("utf-8", "replace").replace(token, "(the planted key)")
            raise PatcherError(f"judging the corpus ended early: {tail[-1500:].strip()}")
    return results
